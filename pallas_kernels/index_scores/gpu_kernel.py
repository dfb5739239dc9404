"""The Pallas-Triton programs of ``pick_rows``: scores, counts of their digits, and the picks.

Scores become int32 bits whose unsigned order is theirs, so that the ``topk``-th best is found
exactly, digit by digit: the counts of a digit say in which bin it lies. Programs own a range of
rows each; what is past a sequence's length is neither read nor counted.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.index_scores.gpu_rows import load_rows, parts_of, spread
from pallas_kernels.packing.layout import RowLayout

DIGIT = 4
"""Bits of a digit."""

BINS = 1 << DIGIT
COUNTED = 1024
"""Rows of one range that is counted and picked from."""

SCORED = 512
"""Rows of one range that is scored."""

COUNT_STEP = 128
SIGN = np.int32(-(2**31))


class Sizes(NamedTuple):
    """What a program knows when it is compiled."""

    queries: int
    """Queries of one sequence."""
    heads: int
    group: int
    """``heads`` rounded up to a power of two; the heads past it weigh nothing."""
    width: int
    step: int
    """Rows scored at once, a power of two that divides ``SCORED``."""
    per: int
    """Rows of one block of the pool."""
    layout: RowLayout
    """Of the rows."""
    warps: int
    stages: int
    """What programs that score are launched with."""
    dtype: Any
    """Of both sides of the products; they accumulate in float32."""


def score_program(lengths, queries, weights, pool, table, out, *, sizes: Sizes) -> None:  # type: ignore[no-untyped-def]
    """Scores one range of rows for one query.

    Refs: ``lengths`` int32 ``[queries]``; ``queries`` ``[queries, heads, width]``, channels as
    ``gpu_rows.split_channels`` leaves them; ``weights`` float32 ``[queries, heads]``; ``pool``
    ``[blocks * per, stored]``; ``table`` int32 ``[n, places]``; ``out`` int32 ``[queries, rows]``,
    ordered bits, left alone past the length.
    """
    at, part = pl.program_id(0), pl.program_id(1)
    count = jnp.clip(lengths[at] - part * SCORED, 0, SCORED)

    @pl.when(count > 0)
    def _score() -> None:
        head = jnp.arange(sizes.group, dtype=jnp.int32)
        exists = head < sizes.heads
        query = _query(queries, at, head, exists, sizes)
        weight = plt.load(weights.at[at, head], mask=exists, other=0.0)

        def body(number: jax.Array, carry: jax.Array) -> jax.Array:
            step = number * sizes.step + jnp.arange(sizes.step, dtype=jnp.int32)
            valid = step < count
            row = part * SCORED + step
            keys, unit = load_rows(
                pool, _places(pool, table, at, row, valid, sizes), valid, sizes.layout, sizes.dtype
            )
            products = _product(query[0], keys[0].T)
            for own, key in zip(query[1:], keys[1:], strict=True):
                products += _product(own, key.T)
            if unit is not None:
                products *= unit[None, :]
            hits = jnp.maximum(products, 0.0)
            score = jnp.sum(hits * weight[:, None], axis=0)
            plt.store(out.at[at, row], ordered(score), mask=valid)
            return carry

        steps = (count + sizes.step - 1) // sizes.step
        jax.lax.fori_loop(jnp.int32(0), steps, body, jnp.int32(0))


def ordered(score: jax.Array) -> jax.Array:
    """int32 bits whose order, read as unsigned, is that of ``score``; -0.0 is as 0.0."""
    score = jnp.where(score == 0.0, 0.0, score)
    bits = jax.lax.bitcast_convert_type(score, jnp.int32)
    return jnp.where(bits < 0, ~bits, bits ^ SIGN)


def count_program(shift, lengths, prefix, keys, out) -> None:  # type: ignore[no-untyped-def]
    """Counts one digit, over the rows of one range whose higher digits are those of ``prefix``.

    Refs: ``shift`` int32 ``[1]``, the digit's lowest bit; ``lengths`` and ``prefix`` int32
    ``[queries]``; ``keys`` int32 ``[queries, rows]``; ``out`` int32 ``[queries, ranges, BINS]``.
    """
    at, part = pl.program_id(0), pl.program_id(1)
    count = jnp.clip(lengths[at] - part * COUNTED, 0, COUNTED)
    low, wanted = shift[0], prefix[at]
    bins = jnp.arange(BINS, dtype=jnp.int32)

    def body(number: jax.Array, counts: jax.Array) -> jax.Array:
        step = number * COUNT_STEP + jnp.arange(COUNT_STEP, dtype=jnp.int32)
        key = plt.load(keys.at[at, part * COUNTED + step], mask=step < count, other=0)
        # Two shifts: the first digit has no higher ones, and a shift by 32 means nothing.
        higher = _shift(_shift(key ^ wanted, low), DIGIT)
        digit = _shift(key, low) & (BINS - 1)
        digit = jnp.where((step < count) & (higher == 0), digit, BINS)
        return counts + (digit[None, :] == bins[:, None]).astype(jnp.int32)

    steps = (count + COUNT_STEP - 1) // COUNT_STEP
    start = jnp.zeros((BINS, COUNT_STEP), jnp.int32)
    counts = jax.lax.fori_loop(jnp.int32(0), steps, body, start)
    plt.store(out.at[at, part, bins], jnp.sum(counts, axis=1))


def pick_program(lengths, least, ties, placed, tied, keys, out) -> None:  # type: ignore[no-untyped-def]
    """Writes the picks of one range, ascending, behind those of earlier ranges.

    Refs: ``lengths`` int32 ``[queries]``; ``least`` int32 ``[queries]``, the bits of the worst
    pick; ``ties`` int32 ``[queries]``, how many rows of just those bits are picked, the lowest;
    ``placed`` and ``tied`` int32 ``[queries, ranges]``, the picks and the rows of those bits in
    earlier ranges; ``keys`` int32 ``[queries, rows]``; ``out`` int32 ``[queries, topk]``.
    """
    at, part = pl.program_id(0), pl.program_id(1)
    count = jnp.clip(lengths[at] - part * COUNTED, 0, COUNTED)
    border, most, topk = least[at] ^ SIGN, ties[at], out.shape[1]

    def body(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        placed, tied = carry
        step = number * COUNT_STEP + jnp.arange(COUNT_STEP, dtype=jnp.int32)
        valid, row = step < count, part * COUNTED + step
        key = plt.load(keys.at[at, row], mask=valid, other=0) ^ SIGN
        equal = (valid & (key == border)).astype(jnp.int32)
        rank = tied + jnp.cumsum(equal) - equal
        picked = (valid & (key > border)) | ((equal > 0) & (rank < most))
        one = picked.astype(jnp.int32)
        place = jnp.where(picked, placed + jnp.cumsum(one) - one, topk)
        plt.store(out.at[jnp.broadcast_to(at, place.shape), place], row, mask=picked)
        return placed + jnp.sum(one), tied + jnp.sum(equal)

    steps = (count + COUNT_STEP - 1) // COUNT_STEP
    jax.lax.fori_loop(jnp.int32(0), steps, body, (placed[at, part], tied[at, part]))


def _query(
    queries: Any, at: jax.Array, head: jax.Array, exists: jax.Array, sizes: Sizes
) -> list[jax.Array]:
    """Parts ``[group, width / parts]`` of one query; zeros for heads that do not exist."""
    parts = parts_of(sizes.layout)
    channel = jnp.arange(sizes.width // parts, dtype=jnp.int32)
    rows, zero = (jnp.broadcast_to(at, head.shape), head), jnp.zeros((), queries.dtype)
    places = [spread(rows, part * channel.shape[0] + channel) for part in range(parts)]
    loaded = [plt.load(queries.at[x], mask=exists[:, None], other=zero) for x in places]
    return [x.astype(sizes.dtype) for x in loaded]


def _places(
    pool: Any, table: Any, at: jax.Array, row: jax.Array, valid: jax.Array, sizes: Sizes
) -> jax.Array:
    """Where in the pool a sequence's rows are; somewhere in it for those not valid."""
    place = jnp.minimum(row // sizes.per, table.shape[1] - 1)
    sequence = jnp.broadcast_to(at // sizes.queries, place.shape)
    block = plt.load(table.at[sequence, place], mask=valid, other=0)
    block = jnp.clip(block, 0, pool.shape[0] // sizes.per - 1)
    return block * sizes.per + row % sizes.per


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _shift(value: jax.Array, by: Any) -> jax.Array:
    return jax.lax.shift_right_logical(value, jnp.broadcast_to(jnp.int32(by), value.shape))
