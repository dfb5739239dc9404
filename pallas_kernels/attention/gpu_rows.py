"""How the GPU programs of ``attend`` read rows: plain numbers, or e4m3 bytes beside bfloat16."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from pallas_kernels.packing import gpu_codes

GROUP = 64
"""Channels that share a scale in ``fp8_rope16`` rows."""


class Packed(NamedTuple):
    """Refs of ``fp8_rope16`` rows: the same bytes twice, because loads are of one width."""

    bytes: Any
    """uint8 ``[..., row_bytes]``"""
    halves: Any
    """uint16 ``[..., row_bytes // 2]``"""


def load_rows(
    ref: Any, at: tuple[jax.Array, ...], valid: jax.Array, width: int, coded: int, dtype: Any
) -> jax.Array:
    """Rows ``[step, width]``; those not valid are zero, by selection: their bytes are not read.

    Args:
      ref: rows of numbers, or ``Packed``.
      at: indices of the rows, ``[step]`` or scalars.
      valid: bool ``[step]``.
      width: channels of a row, a power of two.
      coded: channels that packed rows keep as e4m3; the others are bfloat16.
      dtype: of the result. Packed rows decode exactly to bfloat16.
    """
    at = tuple(jnp.broadcast_to(i, valid.shape) for i in at)
    if isinstance(ref, Packed):
        return _unpacked(ref, at, valid, width, coded).astype(dtype)
    keys = _read(ref, at, jnp.arange(width, dtype=jnp.int32), valid[:, None])
    return keys.astype(dtype)


def _unpacked(
    ref: Packed, at: tuple[jax.Array, ...], valid: jax.Array, width: int, coded: int
) -> jax.Array:
    """bfloat16 rows, by the layout that ``packing.layout`` states for ``fp8_rope16``."""
    channel = jnp.arange(width, dtype=jnp.int32)
    small = channel < coded
    # No selection in the indices, or loads would be of single bytes. Masked ones are not read.
    code = _read(ref.bytes, at, channel, valid[:, None] & small[None, :])
    place = channel + (coded // 2 - coded)
    wide = _read(ref.halves, at, place, valid[:, None] & ~small[None, :])
    group = jnp.arange(max(width // GROUP, 1), dtype=jnp.int32)
    start = coded + 2 * (width - coded)
    has_scale = valid[:, None] & (group * GROUP < coded)[None, :]
    unit = gpu_codes.ue8m0(_read(ref.bytes, at, start + group, has_scale))
    spread = (valid.shape[0], group.shape[0], width // group.shape[0])
    unit = jnp.broadcast_to(unit[:, :, None], spread).reshape(valid.shape[0], width)
    value = (gpu_codes.e4m3(code) * unit).astype(jnp.bfloat16)
    return jnp.where(small[None, :], value, jax.lax.bitcast_convert_type(wide, jnp.bfloat16))


def _read(ref: Any, at: tuple[jax.Array, ...], channel: jax.Array, mask: jax.Array) -> jax.Array:
    """Numbers ``[step, channels]``; zero where masked."""
    return plt.load(ref.at[spread(at, channel)], mask=mask, other=jnp.zeros((), ref.dtype))


def spread(rows: tuple[jax.Array, ...], channel: jax.Array) -> tuple[jax.Array, ...]:
    """Indices ``[rows, channels]``: the interpreter takes no arrays beside slices."""
    form = (rows[0].shape[0], channel.shape[0])
    return (
        *(jnp.broadcast_to(row[:, None], form) for row in rows),
        jnp.broadcast_to(channel[None, :], form),
    )
