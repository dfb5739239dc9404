"""Window and compressed attention."""
