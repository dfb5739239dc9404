"""The on-disk store of prefixes, in one folder: see ``store``."""

from hybridkv.tiers.store.store import Store

__all__ = ["Store"]
