"""Bookkeeping of entries: which blocks and snapshots are where, who reads them, what goes first."""
