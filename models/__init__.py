"""Models that run on hybridkv caches."""
