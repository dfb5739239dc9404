"""Jitted steps, sampling and generation over any model that follows the protocol."""
