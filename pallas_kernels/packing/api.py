"""Rows to stored bytes and back.

A stored row is float32 channels, or bit patterns in uint32, uint16 or uint8: XLA's CPU compiler
scatters those in place where it rewrites a whole donated bfloat16 array. Which bytes mean what is
in ``layout``.

Codes are the nearest ones of ``channel / scale``, ties going to the even code, and are limited to
the largest. Zeros keep their sign. Rows are independent of each other, and so are the groups of
channels that share a scale: where one channel of a group is infinite or NaN, the group is read as
NaN and nothing else is.

A row that was decoded encodes to the same values. Not always to the same bytes: where the largest
code of a group was rounded down to half the range, its scale becomes half as large. There are two
exceptions: a float32 scale is rounded anew, and an e4m3 scale below 2 ** -6 (a group whose largest
channel is below 0.1) has too few bits to be found again.
"""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.implementations import REFERENCE, first_supported
from pallas_kernels.packing.layout import Format, RowLayout


def encode(
    rows: Float[Array, "*n width"], format: Format, *, implementation: str | None = REFERENCE
) -> Shaped[Array, "*n stored"]:
    """Stored form of ``rows`` (any float dtype): uint8 ``[*n, row_bytes]`` for packed layouts.

    Args:
      rows: of the layout's width.
      format: what they are stored as.
      implementation: see ``pallas_kernels.implementations``. XLA's unless another is asked for: it
        joins the arithmetic to what makes the rows, and splits it over devices. All give the same.

    Raises:
      NotImplementedError: no implementation packs ``format``.
      ValueError: the rows are of another width than the layout, or a packed format is only named.
    """
    return _first("encode", rows, format, implementation)


def decode(
    stored: Shaped[Array, "*n stored"], format: Format, *, implementation: str | None = REFERENCE
) -> Float[Array, "*n width"]:
    """float32 rows from their stored form, exact to the last bit, subnormal values too.

    Only the product with a float32 scale (``fp8_index``) is rounded.

    Args:
      stored: rows as ``encode`` makes them.
      format: what they are stored as.
      implementation: as in ``encode``.

    Raises:
      NotImplementedError: no implementation unpacks ``format``.
      ValueError: the stored rows do not have the layout's bytes, or a packed format is only named.
    """
    return _first("decode", stored, format, implementation)


def _first(operation: str, rows: jax.Array, format: Format, name: str | None) -> jax.Array:
    def by(module: str) -> jax.Array:
        found = importlib.import_module(f"pallas_kernels.packing.{module}")
        result: jax.Array = getattr(found, operation)(rows, format)
        return result

    candidates = {
        "tpu": partial(by, "tpu"),
        "gpu": partial(by, "gpu"),
        REFERENCE: partial(by, REFERENCE),
    }
    return first_supported(f"{operation} of rows", candidates, name)


def stored_form(layout: RowLayout) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one stored row."""
    if layout.packed:
        return jax.ShapeDtypeStruct((layout.row_bytes,), jnp.uint8)
    if layout.coding.words:
        return jax.ShapeDtypeStruct((layout.width // 2,), jnp.uint32)
    dtype = {32: jnp.float32, 16: jnp.uint16}[layout.coding.bits]
    return jax.ShapeDtypeStruct((layout.width,), dtype)
