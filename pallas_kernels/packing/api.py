"""Rows to stored bytes and back.

A stored row is float32 channels, or bit patterns in uint16/uint8: XLA's CPU compiler scatters those
in place where it rewrites a whole donated bfloat16 array.
"""

import jax
from jaxtyping import Array, Float, Shaped

from pallas_kernels.packing import reference


def encode(rows: Float[Array, "*n width"], format: str) -> Shaped[Array, "*n stored"]:
    """Stored form of ``rows`` (any float dtype).

    Raises:
      NotImplementedError: no implementation packs ``format``.
    """
    return reference.encode(rows, format)


def decode(stored: Shaped[Array, "*n stored"], format: str) -> Float[Array, "*n width"]:
    """float32 rows from their stored form.

    Raises:
      NotImplementedError: no implementation unpacks ``format``.
    """
    return reference.decode(stored, format)


def stored_form(width: int, format: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one stored row of ``width`` channels."""
    return jax.eval_shape(
        lambda: reference.encode(jax.numpy.zeros((width,), jax.numpy.float32), format)
    )
