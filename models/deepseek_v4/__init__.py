"""DeepSeek-V4 in Flax NNX."""
