"""The Pallas-Triton programs of ``attend``: one a (query, range of rows, group of heads).

A program's heads are the M of its tensor-core products, the rows of one step their N. Steps run in
absolute order and how many there are is data. A range is ``Sizes.span`` rows wherever the sequence
ends, so neither the capacity nor anything else that is not the query's own can change a bit::

    window, rows 0 ... span-1 | rows span ... 2 span-1 | ...      one program each
    `---------------- joined in this order ----------------'      ``join_program``

Range 0 starts with the window and the sink. A sequence that ends in it is finished by its program.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.attention.gpu_rows import load_rows, spread

LOG2_E = math.log2(math.e)
LOWEST = -1e30
"""Stands for "no logit yet": finite, so that a fully masked step joins without NaN."""


class Sizes(NamedTuple):
    """What a program knows when it is compiled."""

    queries: int
    """Queries of one sequence."""
    heads: int
    width: int
    group: int
    """Heads of one program, a power of two; those past ``heads`` are computed and dropped."""
    step: int
    """Rows of one step, a power of two."""
    span: int
    """Rows of one range."""
    window: int
    blocks: int
    """Of the pool."""
    per: int
    """Rows of one block."""
    coded: int
    """Channels of packed rows that are e4m3."""
    scale: float
    dtype: Any
    """Of both sides of the products; they accumulate in float32."""


class Softmax(NamedTuple):
    """A softmax to base 2 in progress: largest logit, sum of powers, weighted sum of values."""

    top: jax.Array
    """float32 ``[group]``"""
    total: jax.Array
    """float32 ``[group]``"""
    acc: jax.Array
    """float32 ``[group, width]``"""


def attend_program(first, lengths, sink, q, local, rows, picks, outs, *, sizes: Sizes) -> None:  # type: ignore[no-untyped-def]
    """Sums one range of one query.

    Refs, with ``queries`` those of all sequences: ``first`` int32 ``[n]``; ``lengths`` int32
    ``[queries]``, -1 where nothing is asked for; ``sink`` float32 ``[heads]``; ``q`` ``[queries,
    heads, width]``; ``local`` ``[n, buffer, width]``; ``rows`` a pair of pool ``[blocks * per,
    width]`` and table int32 ``[n, places]``, or none; ``picks`` int32 ``[queries, k]``, rows of the
    pool, or none. Window and pool may be ``Packed``. ``outs`` is the output ``[queries, heads,
    width]`` and, with more ranges than one, what is unfinished: ``acc [queries, ranges, heads,
    width]``, then top and total ``[queries, ranges, heads]``; all are float32.
    """
    at, part = pl.program_id(0), pl.program_id(1)
    heads = pl.program_id(2) * sizes.group + jnp.arange(sizes.group, dtype=jnp.int32)
    length = lengths[at]
    out, *unfinished = outs

    @pl.when((length < 0) & (part == 0))
    def _idle() -> None:
        _store(out, (at,), heads, jnp.zeros((sizes.group, sizes.width), jnp.float32), sizes)

    @pl.when((length >= 0) & (part * sizes.span < jnp.maximum(length, 1)))
    def _sum() -> None:
        queries = _heads_of(q, (at,), heads, sizes).astype(sizes.dtype)
        state = _start(sink, heads, part, sizes)
        state = _window(first, local, at, part, queries, state, sizes)
        if rows is not None:
            state = _range(rows, picks, at, part, length, queries, state, sizes)

        if not unfinished:
            _store(out, (at,), heads, state.acc / state.total[:, None], sizes)
            return

        @pl.when(length <= sizes.span)
        def _finish() -> None:
            _store(out, (at,), heads, state.acc / state.total[:, None], sizes)

        @pl.when(length > sizes.span)
        def _leave() -> None:
            accs, tops, totals = unfinished
            inside = heads < sizes.heads
            plt.store(tops.at[at, part, heads], state.top, mask=inside)
            plt.store(totals.at[at, part, heads], state.total, mask=inside)
            _store(accs, (at, part), heads, state.acc, sizes)


def join_program(lengths, accs, tops, totals, _, out, *, sizes: Sizes) -> None:  # type: ignore[no-untyped-def]
    """Joins the ranges of one query that has several; refs as in ``attend_program``."""
    at, group = pl.program_id(0), pl.program_id(1)
    heads = group * sizes.group + jnp.arange(sizes.group, dtype=jnp.int32)
    length = lengths[at]
    inside = heads < sizes.heads

    def read(part: jax.Array) -> Softmax:
        return Softmax(
            plt.load(tops.at[at, part, heads], mask=inside, other=0.0),
            plt.load(totals.at[at, part, heads], mask=inside, other=1.0),
            _heads_of(accs, (at, part), heads, sizes),
        )

    def body(part: jax.Array, state: Softmax) -> Softmax:
        other = read(part)
        top = jnp.maximum(state.top, other.top)
        keep, add = jnp.exp2(state.top - top), jnp.exp2(other.top - top)
        return Softmax(
            top,
            state.total * keep + other.total * add,
            state.acc * keep[:, None] + other.acc * add[:, None],
        )

    @pl.when(length > sizes.span)
    def _join() -> None:
        ranges = (length + sizes.span - 1) // sizes.span
        state = jax.lax.fori_loop(jnp.int32(1), ranges, body, read(jnp.int32(0)))
        _store(out, (at,), heads, state.acc / state.total[:, None], sizes)


def _start(sink: Any, heads: jax.Array, part: jax.Array, sizes: Sizes) -> Softmax:
    """The sink is a logit without a value; it belongs to range 0."""
    logit = plt.load(sink.at[heads], mask=heads < sizes.heads, other=0.0) * LOG2_E
    logit = jnp.where(part == 0, logit, -jnp.inf)
    top = jnp.maximum(logit, LOWEST)
    acc = jnp.zeros((sizes.group, sizes.width), jnp.float32)
    return Softmax(top, jnp.exp2(logit - top), acc)


def _window(
    first: Any,
    local: Any,
    at: jax.Array,
    part: jax.Array,
    queries: jax.Array,
    state: Softmax,
    sizes: Sizes,
) -> Softmax:
    """The window rows of range 0, from the oldest that the query sees."""
    sequence, query = at // sizes.queries, at % sizes.queries
    oldest = sizes.window - 1 - first[sequence]  # rows before it stand before position 0

    def body(number: jax.Array, state: Softmax) -> Softmax:
        seen = number * sizes.step + jnp.arange(sizes.step, dtype=jnp.int32)
        row = query + seen
        valid = (seen < sizes.window) & (row >= oldest)
        place = jnp.where(valid, row, 0)
        keys = _load(local, (sequence, place), valid, sizes)
        return _join_step(queries, keys, valid, state, sizes)

    steps = (part == 0).astype(jnp.int32) * pl.cdiv(sizes.window, sizes.step)
    return jax.lax.fori_loop(jnp.int32(0), steps, body, state)


def _range(
    rows: Any,
    picks: Any,
    at: jax.Array,
    part: jax.Array,
    length: jax.Array,
    queries: jax.Array,
    state: Softmax,
    sizes: Sizes,
) -> Softmax:
    """The compressed rows of one range: those at its places, or the picks at its places."""
    pool, table = rows
    start = part * sizes.span
    count = jnp.minimum(length - start, sizes.span)
    sequence = at // sizes.queries

    def body(number: jax.Array, state: Softmax) -> Softmax:
        step = number * sizes.step + jnp.arange(sizes.step, dtype=jnp.int32)
        valid = step < count
        row = jnp.where(valid, start + step, 0)
        if picks is None:
            place = jnp.minimum(row // sizes.per, table.shape[1] - 1)
            block = plt.load(table.at[sequence, place], mask=valid, other=0)
            block = jnp.clip(block, 0, sizes.blocks - 1)
            row = block * sizes.per + row % sizes.per
        else:
            row = plt.load(picks.at[at, row], mask=valid, other=0)
        return _join_step(queries, _load(pool, (row,), valid, sizes), valid, state, sizes)

    steps = (count + sizes.step - 1) // sizes.step
    return jax.lax.fori_loop(jnp.int32(0), steps, body, state)


def _load(ref: Any, at: tuple[jax.Array, ...], valid: jax.Array, sizes: Sizes) -> jax.Array:
    return load_rows(ref, at, valid, sizes.width, sizes.coded, sizes.dtype)


def _join_step(
    queries: jax.Array, keys: jax.Array, valid: jax.Array, state: Softmax, sizes: Sizes
) -> Softmax:
    logits = _product(queries, keys.T)
    logits = jnp.where(valid[None, :], logits * (sizes.scale * LOG2_E), -jnp.inf)
    top = jnp.maximum(state.top, jnp.max(logits, axis=1))
    weights = jnp.exp2(logits - top[:, None])
    keep = jnp.exp2(state.top - top)
    values = _product(weights.astype(sizes.dtype), keys)
    return Softmax(
        top,
        state.total * keep + jnp.sum(weights, axis=1),
        state.acc * keep[:, None] + values,
    )


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """float32; operands of float32 are not rounded to the 19 bits that tensor cores would take."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _heads_of(ref: Any, at: tuple[Any, ...], heads: jax.Array, sizes: Sizes) -> jax.Array:
    """``[group, width]`` of a query; zeros for heads that do not exist."""
    inside = (heads < sizes.heads)[:, None]
    at = _whole((*(jnp.broadcast_to(i, heads.shape) for i in at), heads), sizes)
    return plt.load(ref.at[at], mask=inside, other=jnp.zeros((), ref.dtype))


def _store(ref: Any, at: tuple[Any, ...], heads: jax.Array, value: Any, sizes: Sizes) -> None:
    inside = (heads < sizes.heads)[:, None]
    at = _whole((*(jnp.broadcast_to(i, heads.shape) for i in at), heads), sizes)
    plt.store(ref.at[at], value, mask=inside)


def _whole(rows: tuple[jax.Array, ...], sizes: Sizes) -> tuple[jax.Array, ...]:
    return spread(rows, jnp.arange(sizes.width, dtype=jnp.int32))
