"""The body of the TPU attention kernel: one grid step is one task.

    window rows ----> (acc, top, total) <---- key block 0, 1, 2 ... of that sequence
                             |
                      sink, division ----> output

Key blocks are copied from HBM by hand, an item at a time, some items before they are summed.

A single query's sums are chains of dependent steps that leave most units idle. There, the window
and the first key block are summed at once, and two later blocks are an item: their logits are
computed side by side and then joined one after the other.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention import tpu_packed
from pallas_kernels.attention.tpu_plan import (
    LANES,
    STEP,
    Plan,
    Scalars,
    first_block,
)

_UNROLLED = 128
"""Most copies of an item that are written out one by one, to run beside the vector work."""
_CLEARED = 64
"""Rows zeroed at once."""
_LOWEST = float(np.finfo(np.float32).min)


class Refs(NamedTuple):
    """What the kernel reads and writes beside scalars."""

    q: Any
    """float32 ``[1, queries, heads, width]``"""
    local: Any
    """Stored ``[1, buffer / group, group, stored]``, window rows of the sequence."""
    sink: Any
    """float32 ``[heads, LANES]``"""
    pool: Any
    """Stored ``[blocks, per_block / group, group, width]``, in HBM."""
    out: Any
    """float32 ``[1, queries, heads, width]``"""
    keys: Any
    """Stored ``[buffers, item / group, group, width]``"""
    queries: Any
    """``[lines, width]``: the queries, scaled, as rows are multiplied."""
    acc: Any
    """float32 ``[lines, width]``: weighted sum of values."""
    top: Any
    """float32 ``[lines, LANES]``: largest logit, the same in all lanes."""
    total: Any
    """float32 ``[lines, LANES]``: sum of weights."""
    arrived: Any
    """``[buffers]`` DMA semaphores."""
    packed: tuple[tpu_packed.Side | None, tpu_packed.Side | None]
    """Decoders of key blocks and of the window."""


class Part(NamedTuple):
    """Rows to join: a key block, or the window."""

    lines: jax.Array
    """``[lines, width]``, the queries."""
    rows: jax.Array
    """``[k, width]``, in the same dtype; zero where no row is."""
    seen: list[jax.Array]
    """bool ``[1, k]`` for each query."""


def kernel(*refs: Any, plan: Plan) -> None:
    """One task. A task of an idle sequence writes zeros."""
    scalars = Scalars(*refs[: len(Scalars._fields)])
    rest = refs[len(Scalars._fields) :]
    own = len(Refs._fields) - 1
    arrays = Refs(*(*rest[:own], tpu_packed.sides(plan, rest[own:])))
    place, chunk = pl.program_id(0), pl.program_id(1)

    @pl.when((place == 0) & (chunk == 0))
    def _() -> None:
        for item in range(plan.ahead):
            _start(item, scalars, arrays, plan)
        for side in arrays.packed:
            if side is not None:
                side.decoder.prepare(side.scratch)

    @pl.when(place >= scalars.count[0])
    def _() -> None:
        arrays.out[...] = jnp.zeros_like(arrays.out)

    @pl.when(place < scalars.count[0])
    def _() -> None:
        _task(place, chunk, scalars, arrays, plan)
        _finish(arrays, plan)


def _task(place: Any, chunk: Any, scalars: Scalars, refs: Refs, plan: Plan) -> None:
    """The window and all key blocks of a task, one after the other."""
    lines = refs.q[...].reshape(plan.lines, refs.q.shape[-1]) * plan.scale
    refs.queries[...] = lines.astype(refs.queries.dtype)
    task = place * plan.tasks + chunk
    sequence, length = scalars.order[place], scalars.length[task]
    base, end = scalars.offset[task], scalars.offset[task + 1]
    query = sequence * plan.t + chunk * plan.queries
    size, paired = plan.rows.size, plan.rows.paired

    def window() -> Part:
        """The window rows."""
        return _window(lines, scalars.first[sequence] + chunk * plan.queries, chunk, refs, plan)

    def arrive(number: Any) -> None:
        """Waits for an item, and clears what is past its rows."""
        item = base + number
        _wait(item, scalars, refs, plan)
        for j in range(2 if paired else 1):
            block = first_block(number, plan.rows) + j
            _clear(refs.keys, plan.slot(item), j, plan, length - block * size)

    def part(number: Any, j: int, rows: jax.Array) -> Part:
        """A key block of an item, with these rows, and which of them each query sees."""
        row = lax.broadcasted_iota(jnp.int32, (1, size), 1)
        row = row + (first_block(number, plan.rows) + j) * size
        seen = [row < scalars.visible[query + k] for k in range(plan.queries)]
        return Part(refs.queries[...], rows, seen)

    if plan.rows.packed is not None:
        stream = Stream(base, end - base, arrive, part, window)
        _packed_task(stream, length, scalars, refs, plan)
        return

    def join(number: Any, many: int, *, first: bool = False) -> None:
        """Sums the key blocks of an item, behind the window where it is the ``first``."""
        item = base + number
        parts = [[part(number, j, _key_block(item, j, refs, plan))] for j in range(many)]
        if first:
            parts[0].insert(0, window())
        # Between the products, so that the scalar work of the copies runs beside them.
        _sum(parts, refs, plan, first, lambda: _start(item + plan.ahead, scalars, refs, plan))

    def one(number: jax.Array, _: None) -> None:
        """An item of one key block."""
        arrive(number)
        join(number, 1)

    def two(number: jax.Array, _: None) -> None:
        """An item of two key blocks, or of one at the end."""
        arrive(number)
        pair = 2 * number * size < length
        pl.when(pair)(lambda: join(number, 2))
        pl.when(jnp.logical_not(pair))(lambda: join(number, 1))

    if not paired:
        _sum([[window()]], refs, plan, True)
        lax.fori_loop(0, end - base, one, None)
        return

    @pl.when(base == end)
    def _() -> None:
        _sum([[window()]], refs, plan, True)

    @pl.when(base < end)
    def _() -> None:
        arrive(0)
        join(0, 1, first=True)

    lax.fori_loop(1, end - base, two, None)


class Stream(NamedTuple):
    """The items of one task."""

    base: Any
    """Its first one."""
    items: Any
    """How many."""
    arrive: Callable[[Any], None]
    """Waits for an item, by its number in the task, and clears what is past its rows."""
    part: Callable[[Any, int, jax.Array], Part]
    """Key block ``j`` of an item, with these rows."""
    window: Callable[[], Part]


class PackedTask(NamedTuple):
    """What the items of a task with packed rows have in common."""

    stream: Stream
    scalars: Scalars
    refs: Refs
    plan: Plan

    def start(self, number: Any) -> None:
        """Starts the copies of the item that is ``plan.ahead`` after this one."""
        _start(self.stream.base + number + self.plan.ahead, self.scalars, self.refs, self.plan)

    def decode(self, number: Any, j: int, place: int) -> None:
        """Decodes key block ``j`` of an item into one of the two places."""
        _decode(self.stream.base + number, j, place, self.refs, self.plan)

    def part(self, number: Any, j: int, place: int) -> Part:
        """Key block ``j`` of an item, from where it was decoded to."""
        side = self.refs.packed[0]
        assert side is not None
        return self.stream.part(number, j, side.get(self.plan.rows.size, place))

    def join(self, number: Any, j: int, place: int, beside: Callable[[], None]) -> None:
        """Sums a decoded key block, and does ``beside`` at the same time."""
        _sum([[self.part(number, j, place)]], self.refs, self.plan, False, beside)

    def begin(self) -> None:
        """Sums the window alone."""
        _sum([[self.stream.window()]], self.refs, self.plan, True)


def _packed_task(stream: Stream, length: Any, scalars: Scalars, refs: Refs, plan: Plan) -> None:
    """As ``_task``, of packed rows."""
    task = PackedTask(stream, scalars, refs, plan)
    pl.when(stream.items == 0)(task.begin)
    if plan.rows.paired:
        _packed_pairs(task, length)
    else:
        pl.when(stream.items > 0)(task.begin)
        lax.fori_loop(0, stream.items, lambda number, _: _packed_block(task, number), None)


def _packed_block(task: PackedTask, number: Any) -> None:
    """An item of one key block."""
    task.stream.arrive(number)
    task.decode(number, 0, 0)
    task.join(number, 0, 0, lambda: task.start(number))


def _packed_pairs(task: PackedTask, length: Any) -> None:
    """All items of two key blocks, of which the first is the window and one block.

    Decoding keeps the vector units busy, summing mostly waits for itself: while a key block is
    summed the next one is decoded, in the other of two places.
    """
    stream, size = task.stream, task.plan.rows.size

    def begin(more: bool) -> None:
        """The window and the first block."""

        def beside() -> None:
            if more:
                task.decode(1, 0, 0)
            task.start(0)

        part = task.part(0, 0, 1)
        _sum([[stream.window(), part]], task.refs, task.plan, True, beside)

    def pair(number: Any, more: bool) -> None:
        """Both blocks of an item, of which the first one is decoded."""

        def beside() -> None:
            task.decode(number, 1, 1)
            task.start(number)

        task.join(number, 0, 0, beside)
        task.join(number, 1, 1, lambda: task.decode(number + 1, 0, 0) if more else None)

    def item(number: jax.Array, _: None) -> None:
        """An item but the first, which may lack its second block where it is the last."""
        more, both = number + 1 < stream.items, 2 * number * size < length
        pl.when(more)(lambda: stream.arrive(number + 1))
        pl.when(both & more)(lambda: pair(number, True))
        pl.when(both & jnp.logical_not(more))(lambda: pair(number, False))
        pl.when(jnp.logical_not(both))(lambda: task.join(number, 0, 0, lambda: task.start(number)))

    @pl.when(stream.items > 0)
    def _() -> None:
        more = stream.items > 1
        stream.arrive(0)
        task.decode(0, 0, 1)
        pl.when(more)(lambda: stream.arrive(1))
        pl.when(more)(lambda: begin(True))
        pl.when(jnp.logical_not(more))(lambda: begin(False))

    lax.fori_loop(1, stream.items, item, None)


def _window(lines: jax.Array, start: Any, chunk: Any, refs: Refs, plan: Plan) -> Part:
    """The window rows of a task; ``start`` is the first query's position."""
    group, offset = _window_start(chunk, plan)
    side = refs.packed[1]
    if side is not None:
        side.put(refs.local.at[0], group, plan.window_rows)
        rows = side.get(plan.window_rows)
    else:
        stored = refs.local[0, pl.ds(group, plan.window_rows // plan.window_group)]
        rows = _multiplied(stored.reshape(plan.window_rows, stored.shape[-1]), plan.local_dtype)
    # Positions relative to the first query, along sublanes for rows and along lanes for logits.
    before = offset + plan.window - 1
    row = lax.broadcasted_iota(jnp.int32, rows.shape, 0) - before
    rows = jnp.where(row + start >= 0, rows, jnp.zeros_like(rows))
    key = lax.broadcasted_iota(jnp.int32, (1, plan.window_rows), 1) - before
    exists = key + start >= 0
    seen = [exists & (key <= j) & (key > j - plan.window) for j in range(plan.queries)]
    return Part(lines.astype(rows.dtype), rows, seen)


def _window_start(chunk: Any, plan: Plan) -> tuple[Any, Any]:
    """The group of rows in which a task's window begins, and the row within it."""
    group = plan.window_group
    if plan.tasks == 1:
        return 0, 0
    if plan.queries % group == 0:
        return chunk * (plan.queries // group), 0
    row = chunk * plan.queries
    return lax.shift_right_logical(row, group.bit_length() - 1), row & (group - 1)


def _start(item: Any, scalars: Scalars, refs: Refs, plan: Plan) -> None:
    """Starts the copies of an item's cache blocks; past the last item there are none."""
    begin, many, slot = scalars.begin[item], scalars.many[item], plan.slot(item)
    groups = refs.pool.shape[1]

    def some(first: Any, most: int) -> None:
        """Starts up to ``most`` copies, as far as the item has blocks."""
        for j in range(most):
            # Read whether there is such a block or not (the table goes on past its end): under a
            # condition a read takes three more scalar instructions.
            at = begin + first + j
            block = scalars.table[at] if plan.rows.tabled else at

            @pl.when(first + j < many)
            def _(j: int = j, block: Any = block) -> None:
                to = refs.keys.at[slot, pl.ds((first + j) * groups, groups)]
                pltpu.make_async_copy(refs.pool.at[block], to, refs.arrived.at[slot]).start()

    if plan.rows.copies <= _UNROLLED:
        some(0, plan.rows.copies)
    else:
        steps = lax.div(many + STEP - 1, jnp.int32(STEP))
        lax.fori_loop(0, steps, lambda i, _: some(i * STEP, STEP), None)


def _wait(item: Any, scalars: Scalars, refs: Refs, plan: Plan) -> None:
    """Waits for what ``_start`` started: as many bytes, in one go."""
    slot = plan.slot(item)
    part = refs.keys.at[slot, pl.ds(0, scalars.many[item] * refs.pool.shape[1])]
    pltpu.make_async_copy(part, part, refs.arrived.at[slot]).wait()


def _key_block(item: Any, j: int, refs: Refs, plan: Plan) -> jax.Array:
    """Rows ``[size, width]`` of key block ``j`` of an item that has arrived."""
    size, groups = plan.rows.size, plan.rows.size // refs.keys.shape[2]
    stored = refs.keys[plan.slot(item), j * groups : (j + 1) * groups]
    return _multiplied(stored.reshape(size, stored.shape[-1]), plan.rows.dtype)


def _decode(item: Any, j: int, place: int, refs: Refs, plan: Plan) -> None:
    """Decodes key block ``j`` of an item that has arrived."""
    side, size = refs.packed[0], plan.rows.size
    assert side is not None
    groups = size // refs.keys.shape[2]
    side.put(refs.keys.at[plan.slot(item)], j * groups, size, place)


def _clear(keys: Any, slot: Any, j: int, plan: Plan, length: Any) -> None:
    """Zeroes rows from ``length`` on in key block ``j`` of a buffer, by selection: they may be NaN.

    Nothing to do in a full block, nor in one that the item does not have.
    """
    size, group = plan.rows.size, keys.shape[2]
    step = _CLEARED if size % _CLEARED == 0 else size

    def some(i: jax.Array, _: None) -> None:
        """Some rows."""
        part = keys.at[slot, pl.ds(j * (size // group) + i * (step // group), step // group)]
        stored = part[...]
        groups, within = (lax.broadcasted_iota(jnp.int32, stored.shape, axis) for axis in (0, 1))
        inside = i * step + groups * group + within < length
        part[...] = jnp.where(inside, stored, jnp.zeros_like(stored))

    @pl.when((length > 0) & (length < size))
    def _() -> None:
        if plan.rows.packed is not None:
            tpu_packed.clear_block(keys.at[slot], j * (size // group), size, length)
            return
        lax.fori_loop(lax.div(length, jnp.int32(step)), size // step, some, None)


def _sum(
    groups: list[list[Part]],
    refs: Refs,
    plan: Plan,
    new: bool,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Joins groups of parts to the softmax one after the other, or begins it with them (``new``).

    The parts of a group are summed at once. A fully masked group leaves every bit of the state.
    All logits come first, then ``between``.
    """
    logits = [[_dot(p.lines, p.rows, transposed=True) for p in parts] for parts in groups]
    between()
    state = None if new else (refs.top[...], refs.total[...], refs.acc[...])
    for parts, each in zip(groups, logits, strict=True):
        seen = [_masked(x, p.seen, plan) for x, p in zip(each, parts, strict=True)]
        state = _join(state, seen, [p.rows for p in parts])
    assert state is not None
    refs.top[...], refs.total[...], refs.acc[...] = state


def _join(
    state: tuple[jax.Array, jax.Array, jax.Array] | None,
    logits: list[jax.Array],
    rows: list[jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    largest = reduce(jnp.maximum, [jnp.max(x, axis=1, keepdims=True) for x in logits])
    if state is None:
        # The lowest number instead of -inf keeps a query that sees nothing from NaN.
        top = jnp.broadcast_to(jnp.maximum(largest, _LOWEST), (largest.shape[0], LANES))
    else:
        top = jnp.maximum(state[0], largest)
    weights = [jnp.exp(x - _widened(top, x.shape[1])) for x in logits]
    total = reduce(jnp.add, [jnp.sum(x, axis=1, keepdims=True) for x in weights])
    products = [_dot(x.astype(r.dtype), r) for x, r in zip(weights, rows, strict=True)]
    values = reduce(jnp.add, products)
    if state is None:
        return top, jnp.broadcast_to(total, top.shape), values
    keep = jnp.exp(state[0] - top)
    return top, state[1] * keep + total, state[2] * _widened(keep, values.shape[1]) + values


def _finish(refs: Refs, plan: Plan) -> None:
    """The sink joins the denominator only."""
    sinks = jnp.concatenate([refs.sink[...]] * plan.queries, axis=0)
    top = jnp.maximum(refs.top[...], sinks)
    keep = jnp.exp(refs.top[...] - top)
    factor = keep / (refs.total[...] * keep + jnp.exp(sinks - top))
    out = refs.acc[...] * _widened(factor, refs.acc.shape[1])
    refs.out[...] = out.reshape(refs.out.shape)


def _masked(logits: jax.Array, seen: list[jax.Array], plan: Plan) -> jax.Array:
    """``logits [lines, k]`` where each query sees the row, else -inf."""
    parts = [
        jnp.where(mask, logits[j * plan.heads : (j + 1) * plan.heads], -jnp.inf)
        for j, mask in enumerate(seen)
    ]
    return jnp.concatenate(parts, axis=0)


def _widened(x: jax.Array, width: int) -> jax.Array:
    """``x [lines, LANES]``, whose lanes are equal, as ``[lines, width]``: no data moves."""
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def _multiplied(stored: jax.Array, dtype: Any) -> jax.Array:
    """Stored rows as what the matrix unit reads; bit patterns become bfloat16."""
    if stored.dtype == jnp.uint32:  # two channels a word: the halves of a row
        halves = [stored << 16, stored & jnp.uint32(0xFFFF0000)]
        return jnp.concatenate([pltpu.bitcast(x, jnp.float32) for x in halves], axis=1).astype(
            dtype
        )
    return stored if stored.dtype == dtype else pltpu.bitcast(stored, dtype)


def _dot(a: jax.Array, b: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Matrix product in float32; float32 operands are multiplied in full precision."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
