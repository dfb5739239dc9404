"""Stored formats of rows."""
