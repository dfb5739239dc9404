"""Metrics, events and views of engines; nothing below imports this."""
