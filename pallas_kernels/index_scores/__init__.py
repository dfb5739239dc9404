"""Index scores and streaming top-k."""
