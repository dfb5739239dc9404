"""Blocks out of a pool and back into one."""
