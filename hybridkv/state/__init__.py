"""Device pytrees of the cache, and pure functions on them."""
