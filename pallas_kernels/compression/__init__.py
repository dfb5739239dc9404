"""Pooling of cells into rows."""
