"""How the GPU programs of ``pick_rows`` read index rows: plain numbers, fp4 pairs, or fp8 codes.

plain       one part: all channels
mxfp4       two parts: the lower nibbles of a row's bytes are its even channels, the higher ones
            its odd channels, so that nothing is interleaved; queries are split alike
fp8_index   one part: the codes; the row's one scale multiplies its products
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from pallas_kernels.packing import gpu_codes
from pallas_kernels.packing.layout import RowLayout


def parts_of(layout: RowLayout) -> int:
    """Into how many parts the channels of rows and queries are split."""
    return 2 if layout.coding.bits == 4 else 1


def split_channels(queries: jax.Array, layout: RowLayout) -> jax.Array:
    """Queries ``[..., width]`` with the channels of a part side by side."""
    parts = parts_of(layout)
    if parts == 1:
        return queries
    pairs = queries.reshape(*queries.shape[:-1], -1, parts)
    return jnp.swapaxes(pairs, -1, -2).reshape(queries.shape)


def load_rows(
    pool: Any, row: jax.Array, valid: jax.Array, layout: RowLayout, dtype: Any
) -> tuple[list[jax.Array], jax.Array | None]:
    """Parts ``[rows, width / parts]`` of ``dtype``; their scale ``[rows]``, where rows have one.

    Rows that are not ``valid`` are zero, by selection: their bytes are not read.
    """
    if not layout.packed:
        return [_read(pool, row, 0, layout.width, valid).astype(dtype)], None
    code = _read(pool, row, 0, layout.data.stop, valid)
    if layout.coding.bits == 4:
        unit = gpu_codes.ue8m0(_read(pool, row, layout.scales.start, layout.groups, valid))
        form = (*unit.shape, layout.coding.group // 2)
        unit = jnp.broadcast_to(unit[:, :, None], form).reshape(code.shape)
        wide = code.astype(jnp.int32)
        return [(gpu_codes.e2m1(x) * unit).astype(dtype) for x in (wide, wide >> 4)], None
    column = [jnp.full(row.shape, layout.scales.start + i, jnp.int32) for i in range(4)]
    zero = jnp.zeros((), jnp.uint8)
    scale = [plt.load(pool.at[row, x], mask=valid, other=zero).astype(jnp.int32) for x in column]
    bits = scale[0] | (scale[1] << 8) | (scale[2] << 16) | (scale[3] << 24)
    return [gpu_codes.e4m3(code).astype(dtype)], jax.lax.bitcast_convert_type(bits, jnp.float32)


def _read(ref: Any, row: jax.Array, start: int, count: int, valid: jax.Array) -> jax.Array:
    """Numbers ``[rows, count]`` from column ``start`` on."""
    at = spread((row,), start + jnp.arange(count, dtype=jnp.int32))
    return plt.load(ref.at[at], mask=valid[:, None], other=jnp.zeros((), ref.dtype))


def spread(rows: tuple[jax.Array, ...], channel: jax.Array) -> tuple[jax.Array, ...]:
    """Indices ``[rows, channels]``: the interpreter takes no arrays beside slices."""
    form = (rows[0].shape[0], channel.shape[0])
    return (
        *(jnp.broadcast_to(row[:, None], form) for row in rows),
        jnp.broadcast_to(channel[None, :], form),
    )
