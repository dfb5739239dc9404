"""TPU implementation of ``attend`` (Pallas Mosaic): dense, or over gathered picks.

Rows are multiplied in bfloat16 or, if they are stored so, in float32; sums are float32, weights are
rounded to the rows' type before they meet the values, as the release of the model does. Packed rows
are copied as bytes and decoded to bfloat16 in fast memory (see ``tpu_packed``).

Picks are gathered first and then attended as rows that each query has for itself: by SparseCores
where there are some and rows are words of 32 bits (see ``tpu_gather``), otherwise by XLA, since a
single row of a 16-bit pool shares its words with a neighbour and no copy engine can move it alone.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.attention import tpu_gather, tpu_packed
from pallas_kernels.attention.tpu_kernel import kernel
from pallas_kernels.attention.tpu_plan import (
    LANES,
    SUBLANES,
    KeyBlocks,
    Plan,
    Scalars,
    Staging,
    cdiv,
    scalar_bytes,
    scalars,
    window_group,
)
from pallas_kernels.blocks import BlockRows, in_hbm, key_block_rows, refuse_copied
from pallas_kernels.interpreting import interpret_params
from pallas_kernels.packing.layout import Format, RowLayout
from pallas_kernels.packing.tpu_rows import UNIT, refusal
from pallas_kernels.sequences import Active
from pallas_kernels.tuning.table import tuned

SCALARS_LIMIT = 768 * 1024
"""Bytes of block table and work list that are put into scalar memory, which has 1 MiB."""
VECTORS_LIMIT = 48 * 1024 * 1024
"""Bytes of vector memory that the kernel may use: chips of today have 64 MiB or more."""
_DTYPES = {
    "float32": (jnp.float32, jnp.float32),
    "bfloat16": (jnp.uint16, jnp.bfloat16),
    "bfloat16_words": (jnp.uint32, jnp.bfloat16),
}
"""By format: what rows are stored in, and multiplied in."""


_GATHERED_BLOCK = 64
"""Rows of a block of gathered rows: copies of those that a query has not are left out."""

_GATHERED_BYTES = 256 * 1024 * 1024
"""About the most bytes of rows that are gathered at once; the tile is cut for that."""


class Tuning(NamedTuple):
    """Sizes that decide speed. Both are part of the result's bits."""

    keys: int = 512
    """Rows summed at once, unless ``key_block`` asks for more."""
    queries: int = 8
    """Most queries of a task when all rows are attended."""


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
    tuning: Tuning = Tuning(),
) -> Float[Array, "n t heads width"]:
    """See ``api.attend``. Rows summed at once are at least ``tuning.keys``.

    Raises:
      NotImplementedError: not for these shapes or formats; says what would do.
    """
    _check(q, rows, format, local_format)
    _check_stored(local, local_format)
    n, t, _, width = q.shape
    if rows is None:
        plain = local_format in ("float32", "bfloat16")  # rows of others are not as wide as q
        dtype = local.dtype if plain else jnp.uint16
        rows, visible = _no_rows(n, width, dtype), jnp.zeros((n, t), jnp.int32)
        picks, format = None, local_format if plain else "bfloat16"
        key_block, tuning = SUBLANES, tuning._replace(keys=SUBLANES)
    assert visible is not None
    visible = jnp.where(active.mask[:, None], visible, 0)  # nothing is gathered for the others
    one = functools.partial(
        _attend,
        sink=sink,
        active=active,
        window=window,
        scale=scale,
        size=max(key_block, tuning.keys),
        most_queries=tuning.queries,
        format=format,
        local_format=local_format,
    )
    if picks is None:
        if rows.rows_per_block < SUBLANES and tpu_gather.can_gather(rows):
            rows = _regrouped(rows, visible)
        return one(q, local, first, visible, None, rows=rows)
    row = rows.pool.shape[-1] * rows.pool.dtype.itemsize
    part = _chunk(t, max(_GATHERED_BYTES // (n * picks.shape[2] * row), 1))
    one = functools.partial(one, rows=rows)
    if part == t:
        return one(q, local, first, visible, picks)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        """The outputs of some queries, whose picks are gathered at once."""
        start = i * part

        def cut(x: jax.Array, size: int) -> jax.Array:
            """Their part of an array."""
            return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)

        rest = cut(local, window - 1 + part), first + start, cut(visible, part), cut(picks, part)
        return jax.lax.dynamic_update_slice_in_dim(out, one(cut(q, part), *rest), start, axis=1)

    return jax.lax.fori_loop(0, t // part, body, jnp.zeros(q.shape, jnp.float32))


def _attend(
    q: jax.Array,
    local: jax.Array,
    first: jax.Array,
    visible: jax.Array,
    picks: jax.Array | None,
    *,
    sink: jax.Array,
    active: Active,
    window: int,
    scale: float,
    rows: BlockRows,
    size: int,
    most_queries: int,
    format: Format,
    local_format: Format,
) -> jax.Array:
    """One call of the kernel. A query with picks is a task of its own."""
    n, t, heads, _ = q.shape
    chunk = _chunk(t, most_queries) if picks is None else 1
    if picks is None:
        pool, table = rows.pool, rows.table
        blocks = _tabled(rows, size, format, chunk == 1)
    else:
        unit = SUBLANES if _packed(format) is None else UNIT
        pool, visible = _gathered(rows, picks, visible, unit)
        table = jnp.zeros((1, 1), jnp.int32)
        blocks = _listed(pool, visible.size, size, format)
    plan = Plan(
        t=t,
        queries=chunk,
        heads=heads,
        window=window,
        window_rows=_window_rows(t, chunk, window, window_group(_packed(local_format))),
        scale=scale,
        local_dtype=_multiplied_in(local_format),
        rows=blocks,
        local_packed=_packed(local_format),
        staging=_staging(format, q.shape[-1], blocks),
    )
    local, pool = _padded(local, plan), _grouped(pool)
    _check_memory(plan, n, table.size, local, pool)
    lists = scalars(plan, active, first, visible, table, pool.shape[0])
    return _call(plan, lists, q, local, sink, pool)


def _call(
    plan: Plan, lists: Scalars, q: jax.Array, local: jax.Array, sink: jax.Array, pool: jax.Array
) -> jax.Array:
    n, _, heads, width = q.shape

    def task(i: Any, j: Any, *refs: Any) -> tuple[Any, ...]:
        """An idle sequence's task asks for what is there already, so that nothing is copied."""
        order, count = Scalars(*refs).order, Scalars(*refs).count[0]
        idle = i >= count
        place = jnp.where(idle, jnp.maximum(count - 1, 0), i)
        return order[place], jnp.where(idle, plan.tasks - 1, j), 0, 0

    def sequence(i: Any, j: Any, *refs: Any) -> tuple[Any, ...]:
        """The sequence of a task."""
        return task(i, j, *refs)[0], 0, 0, 0

    queries = (1, plan.queries, heads, width)
    statistics = pltpu.VMEM((plan.lines, LANES), jnp.float32)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(lists),
        grid=(n, plan.tasks),
        in_specs=[
            pl.BlockSpec(queries, task),
            pl.BlockSpec((1, *local.shape[1:]), sequence),
            pl.BlockSpec((heads, LANES), lambda *_: (0, 0)),
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        out_specs=pl.BlockSpec(queries, lambda i, j, order, *_: (order[i], j, 0, 0)),
        scratch_shapes=[
            pltpu.VMEM(
                (plan.staging.buffers, plan.rows.item // pool.shape[2], *pool.shape[2:]), pool.dtype
            ),
            pltpu.VMEM((plan.lines, width), plan.rows.dtype),
            pltpu.VMEM((plan.lines, width), jnp.float32),
            statistics,
            statistics,
            pltpu.SemaphoreType.DMA((plan.staging.buffers,)),
            *tpu_packed.shapes(plan),
        ],
    )
    return pl.pallas_call(
        functools.partial(kernel, plan=plan),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=VECTORS_LIMIT,
            disable_bounds_checks=True,
        ),
        interpret=interpret_params(),
        name="attend",
    )(*lists, q, local, jnp.broadcast_to(sink[:, None], (heads, LANES)), in_hbm(pool))


def _staging(format: Format, width: int, rows: KeyBlocks) -> Staging:
    """The table's choice, but at least four buffers for pairs of packed blocks: those wait for the
    next item before they start the copies of one more.
    """
    staging = tuned("attention/tpu", Staging(), format=_name(format), width=width)
    if rows.packed is None or not rows.paired:
        return staging
    return dataclasses.replace(staging, buffers=max(staging.buffers, 4))


def _no_rows(n: int, width: int, dtype: Any) -> BlockRows:
    """Rows that no query sees."""
    return BlockRows(jnp.zeros((1, SUBLANES, width), dtype), jnp.zeros((n, 1), jnp.int32))


def _packed(format: Format) -> RowLayout | None:
    """The layout of rows that are decoded."""
    return format if isinstance(format, RowLayout) else None


def _name(format: Format) -> str:
    return format.name if isinstance(format, RowLayout) else format


def _multiplied_in(format: Format) -> Any:
    return jnp.bfloat16 if isinstance(format, RowLayout) else _DTYPES[format][1]


def _check(q: jax.Array, rows: BlockRows | None, format: Format, local_format: Format) -> None:
    _, _, heads, width = q.shape
    for each in (format, local_format) if rows is not None else (local_format,):
        if isinstance(each, RowLayout):
            reason = refusal(each)
            if reason is not None:
                raise NotImplementedError(reason)
        elif each not in _DTYPES:
            raise NotImplementedError(f"rows of format {each!r}: use {' or '.join(_DTYPES)}")
    if heads % SUBLANES or width % LANES:
        raise NotImplementedError(
            f"{heads} heads of width {width}: heads must be a multiple of {SUBLANES}, "
            f"the width one of {LANES}"
        )
    if rows is None:
        return
    if isinstance(format, RowLayout):
        _check_stored(rows.pool, format)
        _check_packed(rows)
        refuse_copied(rows.pool)
        return
    if rows.pool.shape[-1] % LANES:
        raise NotImplementedError(
            f"rows of {rows.pool.shape[-1]} numbers: must be a multiple of {LANES}"
        )
    per = rows.rows_per_block
    halves = per == 1 and rows.pool.dtype.itemsize < 4
    if halves or (per % SUBLANES and per not in (1, 2, 4)):
        raise NotImplementedError(
            f"blocks of {per} rows do not fill 32-bit words and registers: rows a block must be "
            "2, 4 or a multiple of 8 (more cells in a block)"
        )


def _check_stored(stored: jax.Array, format: Format) -> None:
    """Packed rows may be wider than their bytes: what fills up a register's lanes is not read."""
    if not isinstance(format, RowLayout):
        return
    if stored.dtype != jnp.uint8 or stored.shape[-1] < format.row_bytes:
        raise NotImplementedError(
            f"rows stored as {stored.dtype}{list(stored.shape)}: {format} has "
            f"{format.row_bytes} bytes a row"
        )


def _check_packed(rows: BlockRows) -> None:
    per = rows.rows_per_block
    if per % UNIT and per not in (4, 8, 16):
        raise NotImplementedError(
            f"blocks of {per} packed rows do not fill 32-bit words and registers: rows a block "
            f"must be 4, 8, 16 or a multiple of {UNIT} (more cells in a block)"
        )


def _check_memory(
    plan: Plan, n: int, table_entries: int, local: jax.Array, pool: jax.Array
) -> None:
    size = scalar_bytes(plan, n, table_entries)
    if size > SCALARS_LIMIT:
        raise NotImplementedError(
            f"block table and work list are {size} bytes, scalar memory takes {SCALARS_LIMIT}: "
            "put more cells in a block, or fewer sequences in a batch"
        )
    width = local.shape[-1]
    # Both sides of a task are buffered twice; its sums, logits and weights are there once.
    item = plan.rows.item * pool.shape[-1] * pool.dtype.itemsize
    vectors = 2 * local.nbytes // n + plan.staging.buffers * item
    vectors += plan.lines * (6 * width + 3 * plan.rows.item) * 4 + tpu_packed.memory(plan)
    if vectors > VECTORS_LIMIT:
        raise NotImplementedError(
            f"a task needs {vectors} bytes of vector memory, of which {VECTORS_LIMIT} are used: "
            "shorten the tile, or sum fewer rows at once"
        )


def _tabled(rows: BlockRows, size: int, format: Format, paired: bool) -> KeyBlocks:
    least = 1 if _packed(format) is None else cdiv(size, UNIT) * UNIT
    return KeyBlocks(
        size=key_block_rows(rows.rows_per_block, max(size, least)),
        per_block=rows.rows_per_block,
        blocks=rows.table.shape[1],
        tabled=True,
        dtype=_multiplied_in(format),
        paired=paired,
        packed=_packed(format),
    )


def _listed(pool: jax.Array, queries: int, size: int, format: Format) -> KeyBlocks:
    """Gathered rows: each of ``queries`` queries has the same number of blocks, in order."""
    blocks, per, _ = pool.shape
    return KeyBlocks(
        size=key_block_rows(per, min(size, blocks // queries * per)),
        per_block=per,
        blocks=blocks // queries,
        tabled=False,
        dtype=_multiplied_in(format),
        paired=True,
        packed=_packed(format),
    )


def _gathered(
    rows: BlockRows, picks: Int[Array, "n t k"], visible: Int[Array, "n t"], unit: int
) -> tuple[Shaped[Array, "blocks per stored"], Int[Array, "n t"]]:
    """The picked rows in blocks of their own, query by query, and how many each query has.

    Picks are ascending, so those that count stand first; the places after them hold any row. A
    block is a multiple of ``unit`` rows.
    """
    n, _, k = picks.shape
    per_block = min(_GATHERED_BLOCK, cdiv(k, unit) * unit)
    places = cdiv(k, per_block) * per_block
    count = jnp.sum(picks < visible[..., None], axis=-1, dtype=jnp.int32)
    picks = jnp.pad(picks, ((0, 0), (0, 0), (0, places - k)))
    if tpu_gather.can_gather(rows) and per_block % tpu_gather.UNIT == 0:
        there = lax.broadcasted_iota(jnp.int32, picks.shape, 2) < count[..., None]
        picks = jnp.where(there, picks, tpu_gather.NO_ROW)
        return tpu_gather.gather(rows, picks, per_block=per_block), count
    per = rows.rows_per_block
    sequence = jnp.arange(n, dtype=jnp.int32)[:, None, None]
    block = rows.table.at[sequence, picks // per].get(mode="clip")
    stored = rows.pool.at[block, picks % per].get(mode="clip")
    return stored.reshape(-1, per_block, stored.shape[-1]), count


def _regrouped(rows: BlockRows, visible: Int[Array, "n t"]) -> BlockRows:
    """The rows that are seen, in larger blocks: those of a few rows are not worth a copy each.

    The bytes move three times instead of once, by another engine, where each copy of a small block
    costs the kernel more instructions than its bytes take.
    """
    n, columns = rows.table.shape
    blocks = cdiv(columns * rows.rows_per_block, _GATHERED_BLOCK)
    row = lax.broadcasted_iota(jnp.int32, (n, 1, blocks * _GATHERED_BLOCK), 2)
    seen = row < jnp.max(visible, axis=1)[:, None, None]
    picks = jnp.where(seen, row, tpu_gather.NO_ROW)
    pool = tpu_gather.gather(rows, picks, per_block=_GATHERED_BLOCK)
    return BlockRows(pool, jnp.arange(n * blocks, dtype=jnp.int32).reshape(n, blocks))


def _grouped(
    pool: Shaped[Array, "blocks per stored"],
) -> Shaped[Array, "blocks groups group stored"]:
    """Rows in groups of one register's sublanes: the form in which a copy is one stretch of bytes
    on every chip. Moves no data.
    """
    blocks, per, stored = pool.shape
    bytes_ = pool.dtype == jnp.uint8 and per % UNIT == 0
    group = UNIT if bytes_ else min(per, SUBLANES)
    return pool.reshape(blocks, per // group, group, stored)


def _chunk(t: int, limit: int) -> int:
    """The largest divisor of ``t`` not above ``limit``."""
    return next(size for size in range(min(t, limit), 0, -1) if t % size == 0)


def _window_rows(t: int, chunk: int, window: int, group: int) -> int:
    """Rows that hold any task's window, from a whole group on; whole registers of logits."""
    before = 0 if chunk == t or chunk % group == 0 else group - 1
    return cdiv(before + window - 1 + chunk, LANES) * LANES


def _padded(
    local: Shaped[Array, "n buffer stored"], plan: Plan
) -> Shaped[Array, "n groups group stored"]:
    """Window rows in groups, as many as the last task reads. A decode step moves no data."""
    n, buffer, stored = local.shape
    group = plan.window_group
    last = (plan.tasks - 1) * plan.queries // group * group
    local = jnp.pad(local, ((0, 0), (0, last + plan.window_rows - buffer), (0, 0)))
    return local.reshape(n, -1, group, stored)
