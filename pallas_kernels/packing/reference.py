"""XLA implementation of the row formats."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

FORMATS = ("float32", "bfloat16")


def encode(rows: Float[Array, "*n width"], format: str) -> Shaped[Array, "*n stored"]:
    """See ``api.encode``."""
    _check(format)
    if format == "float32":
        return rows.astype(jnp.float32)
    return jax.lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)


def decode(stored: Shaped[Array, "*n stored"], format: str) -> Float[Array, "*n width"]:
    """See ``api.decode``."""
    _check(format)
    if format == "float32":
        return stored
    return jax.lax.bitcast_convert_type(stored, jnp.bfloat16).astype(jnp.float32)


def _check(format: str) -> None:
    if format not in FORMATS:
        raise NotImplementedError(
            f"rows of format {format!r} can be sized but not yet packed: use {' or '.join(FORMATS)}"
        )
