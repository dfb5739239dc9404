"""Pallas implementation of ``pick_rows`` for NVIDIA GPUs, through Triton.

Triton for the reasons that ``attention.gpu`` gives. Scores go to memory, a radix selection finds
the worst score that is still picked, and one pass writes the picks in order. No sort: what is done
follows the rows that a query sees, and capacity costs programs that end at once.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import BlockRows
from pallas_kernels.index_scores.gpu_kernel import (
    BINS,
    COUNTED,
    DIGIT,
    SCORED,
    Sizes,
    count_program,
    pick_program,
    score_program,
)
from pallas_kernels.index_scores.gpu_rows import split_channels
from pallas_kernels.index_scores.reference import NO_ROW
from pallas_kernels.interpreting import interpret_params
from pallas_kernels.packing.layout import Format, RowLayout
from pallas_kernels.sequences import Active
from pallas_kernels.tuning.table import tuned

SCORES = 2**25
"""Most scores kept at once (int32); queries wait for each other beyond it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What ``tuning.table`` may choose, keys ``format``, ``heads`` and ``width``."""

    rows: int = 128
    """Rows scored at once, a power of two up to ``SCORED``. Each has its own sums."""
    warps: int = 4
    """Of the program that scores; the others have 4."""
    stages: int = 3
    """Steps whose rows are on their way to a program, its own included."""


PLAIN = 16
"""Of float32: without tensor cores more would not fit the registers."""

_PACKED = ("mxfp4", "fp8_index")
_FORMATS = ("float32", "bfloat16", *_PACKED)


def pick_rows(
    queries: Float[Array, "n t heads width"],
    weights: Float[Array, "n t heads"],
    rows: BlockRows,
    visible: Int[Array, "n t"],
    *,
    active: Active,
    topk: int,
    key_block: int = 512,
    format: Format = "float32",
) -> Int[Array, "n t topk"]:
    """See ``api.pick_rows``. Queries are multiplied as bfloat16 with all rows but float32 ones.

    Codes of four and eight bits are multiplied as they are: bfloat16 has them exactly.
    ``key_block`` is an upper limit of the rows scored at once; it changes no bit.

    Raises:
      NotImplementedError: a format, width, number of heads or pool that it has no code for.
    """
    layout = _layout(format, queries.shape[-1])
    _check(queries, rows, layout)
    n, t, heads, width = queries.shape
    sizes = _sizes(t, heads, width, rows, key_block, layout)
    seen = jnp.where(active.mask[:, None], visible, 0).reshape(n * t)
    # While all visible rows fit, scores do not matter and are not computed.
    lengths = jnp.where(seen > topk, seen, 0)
    blocks, per, _ = rows.pool.shape
    pool = _halves(rows.pool) if layout.name == "bfloat16" else rows.pool
    best = _in_chunks(
        lengths,
        split_channels(queries, layout).reshape(n * t, heads, width).astype(sizes.dtype),
        weights.reshape(n * t, heads).astype(jnp.float32),
        pool.reshape(blocks * per, -1),
        rows.table,
        topk=topk,
        sizes=sizes,
    )
    row = jnp.arange(topk, dtype=jnp.int32)[None, :]
    every = jnp.where(row < seen[:, None], row, NO_ROW)
    return jnp.where((seen > topk)[:, None], best, every).reshape(n, t, topk)


def _layout(format: Format, width: int) -> RowLayout:
    """The layout of rows that the programs read."""
    name = format.name if isinstance(format, RowLayout) else format
    if name not in _FORMATS or (name in _PACKED and name is format):
        raise NotImplementedError(f"the GPU kernel reads no index rows of format {format!r}")
    layout = format if isinstance(format, RowLayout) else RowLayout(name, width)
    if name == "fp8_index" and layout.groups > 1:
        raise NotImplementedError(f"index width {width}: several float32 scales a row")
    if name == "mxfp4" and width % layout.coding.group:
        raise NotImplementedError(f"index width {width} is no whole number of scaled groups")
    return layout


def _check(queries: jax.Array, rows: BlockRows, layout: RowLayout) -> None:
    heads, width = queries.shape[-2:]
    if not 16 <= width <= 512 or width & (width - 1):
        raise NotImplementedError(f"index width {width} is not a power of two from 16 to 512")
    if heads > 128:
        raise NotImplementedError(f"{heads} index heads do not fit one program: at most 128")
    if rows.pool.shape[0] == 0 or rows.table.shape[1] == 0:
        raise NotImplementedError("a pool without blocks has no rows to pick")
    # Triton counts bytes in signed 32 bits up to this size, which end half-way.
    if layout.packed and 2**31 <= rows.pool.size <= 2**32:
        raise NotImplementedError("a packed pool of 2 to 4 GiB cannot be addressed: size it apart")


def _sizes(
    t: int, heads: int, width: int, rows: BlockRows, key_block: int, layout: RowLayout
) -> Sizes:
    plain = layout.name == "float32"
    below = 1 << (key_block.bit_length() - 1)
    tuning = tuned("index_scores/gpu", Tuning(), format=layout.name, heads=heads, width=width)
    most = min(tuning.rows, SCORED)
    return Sizes(
        queries=t,
        heads=heads,
        group=max(pl.next_power_of_2(heads), 16),
        width=width,
        step=min(max(below, 16), PLAIN if plain else 1 << (most.bit_length() - 1)),
        per=rows.rows_per_block,
        layout=layout,
        dtype=jnp.float32 if plain else jnp.bfloat16,
        warps=tuning.warps,
        stages=tuning.stages,
    )


def _halves(pool: jax.Array) -> jax.Array:
    """The same bytes as bfloat16: XLA makes no copy of them."""
    return jax.lax.bitcast_convert_type(pool, jnp.bfloat16)


def _in_chunks(
    lengths: jax.Array,
    queries: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    table: jax.Array,
    *,
    topk: int,
    sizes: Sizes,
) -> jax.Array:
    """``_best`` of so many whole sequences, or queries of one, at once that their scores fit."""
    count = queries.shape[0]
    capacity = pl.cdiv(table.shape[1] * sizes.per, COUNTED) * COUNTED
    limit = max(SCORES // capacity, 1)
    size = next(s for s in range(min(limit, count), 0, -1) if _fits(s, count, sizes.queries))
    if size == count:
        return _best(lengths, queries, weights, pool, table, capacity, topk, sizes)
    chunks = count // size
    if size % sizes.queries == 0:
        tables = table.reshape(chunks, -1, table.shape[1])
    else:
        which = jnp.arange(chunks, dtype=jnp.int32) * size // sizes.queries
        tables = table[which][:, None]

    def one(part: Any) -> jax.Array:
        length, query, weight, table = part
        return _best(length, query, weight, pool, table, capacity, topk, sizes)

    parts = jax.tree.map(
        lambda x: x.reshape(chunks, size, *x.shape[1:]), (lengths, queries, weights)
    )
    return jax.lax.map(one, (*parts, tables)).reshape(count, topk)


def _fits(size: int, count: int, queries: int) -> bool:
    """Whether chunks of ``size`` are whole sequences, or equal parts of one."""
    return count % size == 0 and (size % queries == 0 or queries % size == 0)


def _best(
    lengths: jax.Array,
    queries: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    table: jax.Array,
    capacity: int,
    topk: int,
    sizes: Sizes,
) -> jax.Array:
    count = queries.shape[0]
    keys = _call(
        partial(score_program, sizes=sizes),
        "score_rows",
        (count, capacity // SCORED),
        (count, capacity),
        sizes.stages,
        sizes.warps,
    )(lengths, queries, weights, pool, table)
    least, ties, placed, tied = _select(lengths, keys, topk)
    grid = (count, capacity // COUNTED)
    pick = _call(pick_program, "pick_rows", grid, (count, topk), 1)
    return pick(lengths, least, ties, placed, tied, keys)


def _select(
    lengths: jax.Array, keys: jax.Array, topk: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """What ``pick_program`` wants to know; sums of counts, so no order of adding matters."""
    count, ranges = lengths.shape[0], keys.shape[1] // COUNTED
    counts_of = _call(count_program, "count_digits", (count, ranges), (count, ranges, BINS), 1)
    digits = jnp.arange(BINS, dtype=jnp.int32)

    def body(number: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        prefix, left, better, _ = state
        low = 32 - DIGIT * (number + 1)
        counts = counts_of(low[None], lengths, prefix, keys)
        total = jnp.sum(counts, axis=1)
        from_here = jnp.cumsum(total[:, ::-1], axis=1)[:, ::-1]
        digit = jnp.maximum(jnp.sum(from_here >= left[:, None], axis=1, dtype=jnp.int32) - 1, 0)
        above = digits[None, :] > digit[:, None]
        left = left - jnp.sum(jnp.where(above, total, 0), axis=1)
        better = better + jnp.sum(jnp.where(above[:, None, :], counts, 0), axis=2)
        same = jnp.take_along_axis(counts, digit[:, None, None], axis=2)[..., 0]
        return prefix | (digit << low), left, better, same

    start = (
        jnp.zeros((count,), jnp.int32),
        jnp.full((count,), topk, jnp.int32),
        jnp.zeros((count, ranges), jnp.int32),
        jnp.zeros((count, ranges), jnp.int32),
    )
    least, ties, better, same = jax.lax.fori_loop(jnp.int32(0), 32 // DIGIT, body, start)
    tied = jnp.cumsum(same, axis=1) - same
    placed = jnp.cumsum(better, axis=1) - better + jnp.minimum(tied, ties[:, None])
    return least, ties, placed, tied


def _call(
    program: Any,
    name: str,
    grid: tuple[int, int],
    form: tuple[int, ...],
    stages: int,
    warps: int = 4,
) -> Any:
    return pl.pallas_call(
        program,
        grid=grid,
        out_shape=jax.ShapeDtypeStruct(form, jnp.int32),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=bool(interpret_params()),
        name=name,
    )
