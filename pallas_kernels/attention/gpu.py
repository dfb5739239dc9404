"""Pallas implementation of ``attend`` for NVIDIA GPUs, through Triton.

Triton and not Mosaic GPU: one source reaches machine code for Hopper and Blackwell, compiles
without a GPU and runs in plain interpret mode on a CPU. JAX deprecates it from 0.11 on.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.attention.gpu_kernel import Sizes, attend_program, join_program
from pallas_kernels.attention.gpu_rows import Packed
from pallas_kernels.blocks import BlockRows
from pallas_kernels.interpreting import interpret_params
from pallas_kernels.packing.layout import Format, RowLayout
from pallas_kernels.sequences import Active
from pallas_kernels.tuning.table import tuned

SPAN = 512
"""Rows of one range: 64 times what a program's result weighs when it has to be joined."""

FEW_QUERIES = 16
"""From so many queries a sequence on there are programs enough without splitting the rows."""

STEP = 32
"""Rows summed at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What ``tuning.table`` may choose, keys ``format`` (of the rows) and ``width``.

    Not the rows summed at once nor those of a range, whose sums have an order.
    """

    warps: int = 8
    stages: int = 3
    """Steps whose rows are on their way to a program, its own included."""


_PACKED = "fp8_rope16"


def attend(
    q: Float[Array, "n t heads width"],
    local: Shaped[Array, "n buffer stored"],
    first: Int[Array, " n"],
    sink: Float[Array, " heads"],
    *,
    active: Active,
    window: int,
    scale: float,
    rows: BlockRows | None = None,
    visible: Int[Array, "n t"] | None = None,
    picks: Int[Array, "n t k"] | None = None,
    key_block: int = 128,
    format: Format = "float32",
    local_format: Format = "float32",
) -> Float[Array, "n t heads width"]:
    """See ``api.attend``. bfloat16 rows are multiplied as bfloat16, queries and weights too.

    ``key_block`` is an upper limit of the rows summed at once.

    Raises:
      NotImplementedError: a format, width or pool that these kernels have no code for.
    """
    layouts = _layouts(q, rows, format, local_format)
    n, t, heads, width = q.shape
    sizes = _sizes(t, heads, width, window, scale, key_block, layouts)
    lengths = _lengths(n, t, active, visible, picks, rows)
    stored = places = None
    if rows is not None:
        blocks, per, _ = rows.pool.shape
        sizes = sizes._replace(blocks=blocks, per=per)
        pool = rows.pool.reshape(blocks * per, -1)
        stored = (_readable(pool, layouts[0]), rows.table)
        places = None if picks is None else _places(rows, picks).reshape(n * t, -1)
    out = _call(
        first,
        lengths,
        sink.astype(jnp.float32),
        q.reshape(n * t, heads, width).astype(sizes.dtype),
        _readable(local, layouts[1]),
        stored,
        places,
        sizes=sizes,
        tuning=tuned("attention/gpu", Tuning(), format=layouts[0].name, width=width),
    )
    return out.reshape(n, t, heads, width)


def _layouts(
    q: jax.Array, rows: BlockRows | None, format: Format, local_format: Format
) -> tuple[RowLayout, RowLayout]:
    """Layouts of the compressed rows and of the window's."""
    width = q.shape[-1]
    if width < 16 or width & (width - 1):
        raise NotImplementedError(f"width {width} is not a power of two from 16 on")
    if width > 512:
        raise NotImplementedError(f"width {width}: the sum of more than 512 channels does not fit")
    if rows is not None and (rows.pool.shape[0] == 0 or rows.table.shape[1] == 0):
        raise NotImplementedError("a pool without blocks: leave the rows out")
    layouts = _layout(format, width), _layout(local_format, width)
    if len({layout.rope for layout in layouts if layout.packed}) > 1:
        raise NotImplementedError("window rows and compressed rows of different rotary widths")
    # Triton counts bytes in signed 32 bits up to this size, which end half-way.
    if layouts[0].packed and rows is not None and 2**31 <= rows.pool.size <= 2**32:
        raise NotImplementedError("a packed pool of 2 to 4 GiB cannot be addressed: size it apart")
    return layouts


def _layout(format: Format, width: int) -> RowLayout:
    layout = format if isinstance(format, RowLayout) else None
    name = format if layout is None else layout.name
    if name not in ("float32", "bfloat16", _PACKED) or (layout is None and name == _PACKED):
        raise NotImplementedError(f"the GPU kernel reads no rows of format {format!r}")
    layout = RowLayout(name, width) if layout is None else layout
    if layout.packed and (layout.coded % 2 or layout.row_bytes % 2 or layout.coded == 0):
        raise NotImplementedError(f"rows of {layout} cannot be read as bytes and halves")
    return layout


def _sizes(
    t: int,
    heads: int,
    width: int,
    window: int,
    scale: float,
    key_block: int,
    layouts: tuple[RowLayout, RowLayout],
) -> Sizes:
    """Tensor cores take at least 16 heads and 16 rows; float32 has a quarter of their reach."""
    plain = any(layout.name == "float32" for layout in layouts)
    step = min(max(_power_of_two_below(key_block), 16), 16 if plain else STEP)
    group = min(max(pl.next_power_of_2(heads), 16), 16 if plain else 64)
    return Sizes(
        queries=t,
        heads=heads,
        width=width,
        group=group,
        step=step,
        span=SPAN if t < FEW_QUERIES else 2**30,
        window=window,
        blocks=1,
        per=1,
        coded=min(layout.coded for layout in layouts),
        scale=scale,
        dtype=jnp.float32 if plain else jnp.bfloat16,
    )


def _power_of_two_below(value: int) -> int:
    return 1 << (value.bit_length() - 1)


def _lengths(
    n: int,
    t: int,
    active: Active,
    visible: Int[Array, "n t"] | None,
    picks: Int[Array, "n t k"] | None,
    rows: BlockRows | None,
) -> Int[Array, " queries"]:
    """How many rows or picks each query reads; -1 where its sequence is idle."""
    if rows is None or visible is None:
        lengths = jnp.zeros((n, t), jnp.int32)
    elif picks is None:
        most = rows.table.shape[1] * rows.pool.shape[1]
        lengths = jnp.clip(visible, 0, most)
    else:
        lengths = jnp.sum(picks < visible[..., None], axis=-1, dtype=jnp.int32)
    return jnp.where(active.mask[:, None], lengths, -1).reshape(n * t)


def _places(rows: BlockRows, picks: Int[Array, "n t k"]) -> Int[Array, "n t k"]:
    """Which rows of the whole pool are picked: one look-up in the kernel instead of two."""
    n, _, _ = picks.shape
    blocks, per, _ = rows.pool.shape
    sequence = jnp.arange(n, dtype=jnp.int32)[:, None, None]
    block = rows.table.at[sequence, picks // per].get(mode="clip")
    return jnp.clip(block, 0, blocks - 1) * per + picks % per


def _readable(stored: jax.Array, layout: RowLayout) -> Any:
    """The same bytes as numbers that the kernel loads: XLA makes no copy of them."""
    if layout.name == "float32":
        return stored
    if layout.name == "bfloat16":
        return jax.lax.bitcast_convert_type(stored, jnp.bfloat16)
    pairs = stored.reshape(*stored.shape[:-1], -1, 2)
    return Packed(stored, jax.lax.bitcast_convert_type(pairs, jnp.uint16))


def _call(*arrays: Any, sizes: Sizes, tuning: Tuning) -> jax.Array:
    _, lengths, _, q, _, rows, picks = arrays
    most = _most(rows, picks, sizes)
    ranges = max(pl.cdiv(most, sizes.span), 1)
    groups = pl.cdiv(sizes.heads, sizes.group)
    queries = q.shape[0]
    form = (queries, sizes.heads, sizes.width)
    out = [jax.ShapeDtypeStruct(form, jnp.float32)]
    if ranges > 1:
        out.append(jax.ShapeDtypeStruct((queries, ranges, *form[1:]), jnp.float32))
        out += [jax.ShapeDtypeStruct((queries, ranges, sizes.heads), jnp.float32)] * 2
    leaves, tree = jax.tree.flatten(arrays)

    def program(*refs: Any) -> None:
        inputs: Any = jax.tree.unflatten(tree, refs[: len(leaves)])
        first, lengths, sink, q, local, rows, picks = inputs
        outs = refs[len(leaves) :]
        attend_program(first, lengths, sink, q, local, rows, picks, outs, sizes=sizes)

    done, *unfinished = pl.pallas_call(
        program,
        grid=(queries, ranges, groups),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=tuning.stages),
        interpret=bool(interpret_params()),
        name="attend",
    )(*leaves)
    if not unfinished:
        return done
    narrow = sizes._replace(group=min(sizes.group, 16))
    return pl.pallas_call(
        partial(join_program, sizes=narrow),
        grid=(queries, pl.cdiv(sizes.heads, narrow.group)),
        out_shape=out[0],
        input_output_aliases={4: 0},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=bool(interpret_params()),
        name="attend_join",
    )(lengths, *unfinished, done)


def _most(rows: Any, picks: jax.Array | None, sizes: Sizes) -> int:
    """The most rows that a query may read."""
    if rows is None:
        return 0
    _, table = rows
    return picks.shape[-1] if picks is not None else table.shape[1] * sizes.per
