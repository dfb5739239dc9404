"""TPU implementation of ``attend`` (Pallas Mosaic): dense, or over gathered picks.

Rows are multiplied in bfloat16 or, if they are stored so, in float32; sums are float32, weights are
rounded to the rows' type before they meet the values, as the release of the model does.

Picks are gathered by XLA first and then attended as rows that each query has for itself: a single
row of a 16-bit pool shares its 32-bit words with a neighbour, so no copy engine can move it alone.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.attention.tpu_kernel import kernel
from pallas_kernels.attention.tpu_plan import (
    BUFFERS,
    LANES,
    SUBLANES,
    KeyBlocks,
    Plan,
    Scalars,
    cdiv,
    scalar_bytes,
    scalars,
)
from pallas_kernels.blocks import BlockRows, key_block_rows
from pallas_kernels.interpreting import interpret_params
from pallas_kernels.sequences import Active

SCALARS_LIMIT = 768 * 1024
"""Bytes of block table and work list that are put into scalar memory, which has 1 MiB."""
VECTORS_LIMIT = 48 * 1024 * 1024
"""Bytes of vector memory that the kernel may use: chips of today have 64 MiB or more."""
_DTYPES = {"float32": (jnp.float32, jnp.float32), "bfloat16": (jnp.uint16, jnp.bfloat16)}
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
    format: str = "float32",
    local_format: str = "float32",
    tuning: Tuning = Tuning(),
) -> Float[Array, "n t heads width"]:
    """See ``api.attend``. Rows summed at once are at least ``tuning.keys``.

    Raises:
      NotImplementedError: not for these shapes or formats; says what would do.
    """
    _check(q, rows, format, local_format)
    n, t, _, width = q.shape
    if rows is None:
        rows, visible = _no_rows(n, width, local.dtype), jnp.zeros((n, t), jnp.int32)
        picks, format = None, local_format
        key_block, tuning = SUBLANES, tuning._replace(keys=SUBLANES)
    assert visible is not None
    one = functools.partial(
        _attend,
        sink=sink,
        active=active,
        window=window,
        scale=scale,
        rows=rows,
        size=max(key_block, tuning.keys),
        most_queries=tuning.queries,
        dtype=_DTYPES[format][1],
        local_dtype=_DTYPES[local_format][1],
    )
    if picks is None:
        return one(q, local, first, visible, None)
    row = width * rows.pool.dtype.itemsize
    part = _chunk(t, max(_GATHERED_BYTES // (n * picks.shape[2] * row), 1))
    if part == t:
        return one(q, local, first, visible, picks)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        start = i * part

        def cut(x: jax.Array, size: int) -> jax.Array:
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
    dtype: Any,
    local_dtype: Any,
) -> jax.Array:
    """One call of the kernel. A query with picks is a task of its own."""
    n, t, heads, _ = q.shape
    chunk = _chunk(t, most_queries) if picks is None else 1
    if picks is None:
        pool, table = rows.pool, rows.table
        blocks = _tabled(rows, size, dtype, chunk == 1)
    else:
        (pool, visible), table = _gathered(rows, picks, visible), jnp.zeros((1, 1), jnp.int32)
        blocks = _listed(pool, visible.size, size, dtype)
    plan = Plan(
        t=t,
        queries=chunk,
        heads=heads,
        window=window,
        window_rows=_window_rows(t, chunk, window),
        scale=scale,
        local_dtype=local_dtype,
        rows=blocks,
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
        return task(i, j, *refs)[0], 0, 0, 0

    if not interpret_params():
        # XLA would keep gathered rows in vector memory; vector instructions would then copy them.
        pool = pltpu.with_memory_space_constraint(pool, pltpu.HBM)
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
            pltpu.VMEM((BUFFERS, plan.rows.item // pool.shape[2], *pool.shape[2:]), pool.dtype),
            pltpu.VMEM((plan.lines, width), plan.rows.dtype),
            pltpu.VMEM((plan.lines, width), jnp.float32),
            statistics,
            statistics,
            pltpu.SemaphoreType.DMA((BUFFERS,)),
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
    )(*lists, q, local, jnp.broadcast_to(sink[:, None], (heads, LANES)), pool)


def _no_rows(n: int, width: int, dtype: Any) -> BlockRows:
    """Rows that no query sees."""
    return BlockRows(jnp.zeros((1, SUBLANES, width), dtype), jnp.zeros((n, 1), jnp.int32))


def _check(q: jax.Array, rows: BlockRows | None, format: str, local_format: str) -> None:
    _, _, heads, width = q.shape
    for each in (format, local_format) if rows is not None else (local_format,):
        if each not in _DTYPES:
            raise NotImplementedError(f"rows of format {each!r}: use {' or '.join(_DTYPES)}")
    if heads % SUBLANES or width % LANES:
        raise NotImplementedError(
            f"{heads} heads of width {width}: heads must be a multiple of {SUBLANES}, "
            f"the width one of {LANES}"
        )
    if rows is None:
        return
    per = rows.rows_per_block
    halves = per == 1 and rows.pool.dtype.itemsize < 4
    if halves or (per % SUBLANES and per not in (1, 2, 4)):
        raise NotImplementedError(
            f"blocks of {per} rows do not fill 32-bit words and registers: rows a block must be "
            "2, 4 or a multiple of 8 (more cells in a block)"
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
    width = pool.shape[-1]
    # Both sides of a task are buffered twice; its sums, logits and weights are there once.
    vectors = 2 * local.nbytes // n + BUFFERS * plan.rows.item * width * pool.dtype.itemsize
    vectors += plan.lines * (6 * width + 3 * plan.rows.item) * 4
    if vectors > VECTORS_LIMIT:
        raise NotImplementedError(
            f"a task needs {vectors} bytes of vector memory, of which {VECTORS_LIMIT} are used: "
            "shorten the tile, or sum fewer rows at once"
        )


def _tabled(rows: BlockRows, size: int, dtype: Any, paired: bool) -> KeyBlocks:
    return KeyBlocks(
        size=key_block_rows(rows.rows_per_block, size),
        per_block=rows.rows_per_block,
        blocks=rows.table.shape[1],
        tabled=True,
        dtype=dtype,
        paired=paired,
    )


def _listed(pool: jax.Array, queries: int, size: int, dtype: Any) -> KeyBlocks:
    """Gathered rows: each of ``queries`` queries has the same number of blocks, in order."""
    blocks, per, _ = pool.shape
    return KeyBlocks(
        size=key_block_rows(per, min(size, blocks // queries * per)),
        per_block=per,
        blocks=blocks // queries,
        tabled=False,
        dtype=dtype,
        paired=True,
    )


def _gathered(
    rows: BlockRows, picks: Int[Array, "n t k"], visible: Int[Array, "n t"]
) -> tuple[Shaped[Array, "blocks per stored"], Int[Array, "n t"]]:
    """The picked rows in blocks of their own, query by query, and how many each query has.

    Picks are ascending, so those that count stand first; the places after them hold any row.
    """
    n, _, k = picks.shape
    per_block = min(_GATHERED_BLOCK, cdiv(k, SUBLANES) * SUBLANES)
    places = cdiv(k, per_block) * per_block
    picks = jnp.pad(picks, ((0, 0), (0, 0), (0, places - k)))
    per = rows.rows_per_block
    sequence = jnp.arange(n, dtype=jnp.int32)[:, None, None]
    block = rows.table.at[sequence, picks // per].get(mode="clip")
    stored = rows.pool.at[block, picks % per].get(mode="clip")
    count = jnp.sum(picks[..., :k] < visible[..., None], axis=-1, dtype=jnp.int32)
    return stored.reshape(-1, per_block, stored.shape[-1]), count


def _grouped(
    pool: Shaped[Array, "blocks per stored"],
) -> Shaped[Array, "blocks groups group stored"]:
    """Rows in groups of one register's sublanes: the form in which a copy is one stretch of bytes
    on every chip. Moves no data.
    """
    blocks, per, stored = pool.shape
    group = min(per, SUBLANES)
    return pool.reshape(blocks, per // group, group, stored)


def _chunk(t: int, limit: int) -> int:
    """The largest divisor of ``t`` not above ``limit``."""
    return next(size for size in range(min(t, limit), 0, -1) if t % size == 0)


def _window_rows(t: int, chunk: int, window: int) -> int:
    """Rows that hold any task's window, from a multiple of 8 on; whole registers of logits."""
    before = 0 if chunk == t or chunk % SUBLANES == 0 else SUBLANES - 1
    return cdiv(before + window - 1 + chunk, LANES) * LANES


def _padded(
    local: Shaped[Array, "n buffer stored"], plan: Plan
) -> Shaped[Array, "n groups 8 stored"]:
    """Window rows in groups of 8, as many as the last task reads. A decode step moves no data."""
    n, buffer, stored = local.shape
    last = (plan.tasks - 1) * plan.queries // SUBLANES * SUBLANES
    local = jnp.pad(local, ((0, 0), (0, last + plan.window_rows - buffer), (0, 0)))
    return local.reshape(n, -1, SUBLANES, stored)
