"""Llama in Flax NNX: one attention kind, on the same cache and steps as hybrid models."""
