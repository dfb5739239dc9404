"""Rows to stored bytes and back.

A stored row is float32 channels, or bit patterns in uint16/uint8: XLA's CPU compiler scatters those
in place where it rewrites a whole donated bfloat16 array. Which bytes mean what is in ``layout``.

Codes are the nearest ones of ``channel / scale``, ties going to the even code, and are limited to
the largest. Zeros keep their sign. Rows are independent of each other, and so are the groups of
channels that share a scale: where one channel of a group is infinite or NaN, the group is read as
NaN and nothing else is.

A row that was decoded encodes to the same values. Not always to the same bytes: where the largest
code of a group was rounded down to half the range, its scale becomes half as large. There are two
exceptions: a float32 scale is rounded anew, and an e4m3 scale below 2 ** -6 (a group whose largest
channel is below 0.1) has too few bits to be found again.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.packing import reference
from pallas_kernels.packing.layout import Format, RowLayout


def encode(rows: Float[Array, "*n width"], format: Format) -> Shaped[Array, "*n stored"]:
    """Stored form of ``rows`` (any float dtype): uint8 ``[*n, row_bytes]`` for packed layouts.

    Raises:
      NotImplementedError: no implementation packs ``format``.
      ValueError: the rows are of another width than the layout, or a packed format is only named.
    """
    return reference.encode(rows, format)


def decode(stored: Shaped[Array, "*n stored"], format: Format) -> Float[Array, "*n width"]:
    """float32 rows from their stored form, exact to the last bit, subnormal values too.

    Only the product with a float32 scale (``fp8_index``) is rounded.

    Raises:
      NotImplementedError: no implementation unpacks ``format``.
      ValueError: the stored rows do not have the layout's bytes, or a packed format is only named.
    """
    return reference.decode(stored, format)


def stored_form(layout: RowLayout) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one stored row."""
    if layout.packed:
        return jax.ShapeDtypeStruct((layout.row_bytes,), jnp.uint8)
    dtype = {32: jnp.float32, 16: jnp.uint16}[layout.coding.bits]
    return jax.ShapeDtypeStruct((layout.width,), dtype)
