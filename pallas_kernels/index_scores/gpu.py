"""Pallas implementation of ``pick_rows`` for NVIDIA GPUs, through Triton.

Triton for the reasons that ``attention.gpu`` gives. Scores go to memory, a radix selection finds
the worst score that is still picked, and one pass writes the picks in order. No sort: what is done
follows the rows that a query sees, and capacity costs programs that end at once.
"""

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
from pallas_kernels.index_scores.reference import NO_ROW
from pallas_kernels.interpreting import interpret_params
from pallas_kernels.packing.layout import Format, RowLayout
from pallas_kernels.sequences import Active

SCORES = 2**25
"""Most scores kept at once (int32); queries wait for each other beyond it."""

STEP = 128
"""Rows scored at once."""

PLAIN = 16
"""Of float32: without tensor cores more would not fit the registers."""

_FORMATS = ("float32", "bfloat16")


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
    """See ``api.pick_rows``. Queries are multiplied as bfloat16 with rows of bfloat16.

    ``key_block`` is an upper limit of the rows scored at once; it changes no bit.

    Raises:
      NotImplementedError: a format, width, number of heads or pool that it has no code for.
    """
    format = format.format if isinstance(format, RowLayout) else format
    _check(queries, rows, format)
    n, t, heads, width = queries.shape
    sizes = _sizes(t, heads, width, rows, key_block, format)
    seen = jnp.where(_alive(n, active)[:, None], visible, 0).reshape(n * t)
    # While all visible rows fit, scores do not matter and are not computed.
    lengths = jnp.where(seen > topk, seen, 0)
    blocks, per, _ = rows.pool.shape
    pool = rows.pool if format == "float32" else _halves(rows.pool)
    best = _in_chunks(
        lengths,
        queries.reshape(n * t, heads, width).astype(sizes.dtype),
        weights.reshape(n * t, heads).astype(jnp.float32),
        pool.reshape(blocks * per, width),
        rows.table,
        topk=topk,
        sizes=sizes,
    )
    row = jnp.arange(topk, dtype=jnp.int32)[None, :]
    every = jnp.where(row < seen[:, None], row, NO_ROW)
    return jnp.where((seen > topk)[:, None], best, every).reshape(n, t, topk)


def _check(queries: jax.Array, rows: BlockRows, format: Format) -> None:
    if format not in _FORMATS:
        raise NotImplementedError(f"the GPU kernel reads no index rows of format {format!r}")
    heads, width = queries.shape[-2:]
    if not 16 <= width <= 512 or width & (width - 1):
        raise NotImplementedError(f"index width {width} is not a power of two from 16 to 512")
    if heads > 128:
        raise NotImplementedError(f"{heads} index heads do not fit one program: at most 128")
    if rows.pool.shape[0] == 0 or rows.table.shape[1] == 0:
        raise NotImplementedError("a pool without blocks has no rows to pick")


def _sizes(
    t: int, heads: int, width: int, rows: BlockRows, key_block: int, format: Format
) -> Sizes:
    plain = format == "float32"
    below = 1 << (key_block.bit_length() - 1)
    return Sizes(
        queries=t,
        heads=heads,
        group=max(pl.next_power_of_2(heads), 16),
        width=width,
        step=min(max(below, 16), PLAIN if plain else STEP),
        per=rows.rows_per_block,
        dtype=jnp.float32 if plain else jnp.bfloat16,
    )


def _alive(n: int, active: Active) -> jax.Array:
    at = jnp.where(jnp.arange(n, dtype=jnp.int32) < active.count, active.order, n)
    return jnp.zeros((n,), bool).at[at].set(True, mode="drop")


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
        3,
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
    program: Any, name: str, grid: tuple[int, int], form: tuple[int, ...], stages: int
) -> Any:
    return pl.pallas_call(
        program,
        grid=grid,
        out_shape=jax.ShapeDtypeStruct(form, jnp.int32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=stages),
        interpret=bool(interpret_params()),
        name=name,
    )
