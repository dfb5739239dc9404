"""Pallas TPU implementation of ``pick_rows``: scores in VMEM, then an exact selection.

The work list is (active sequence, group of queries). For each entry the rows of the sequence stream
once from HBM, all queries of the group are scored against them, and each query is ranked by
``tpu_topk``. Scores never leave VMEM; nothing is read past a sequence's length.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import BlockRows, in_hbm, refuse_copied
from pallas_kernels.index_scores import tpu_topk
from pallas_kernels.index_scores.tpu_packed import Packed, refusal
from pallas_kernels.index_scores.tpu_scores import (
    PRODUCT_ROWS,
    Item,
    RowStream,
    as_floats,
    down_sublanes,
    part_of,
    score_chunk,
)
from pallas_kernels.index_scores.tpu_topk import CHUNK, LANES, NO_ROW, TILE, cdiv, divide
from pallas_kernels.interpreting import interpret_params
from pallas_kernels.packing.layout import Format, RowLayout
from pallas_kernels.sequences import Active
from pallas_kernels.tuning.table import tuned

Ref = Any
_STORED = {"float32": jnp.float32, "bfloat16": jnp.uint16}
_QUERIES = 8
"""Queries of one sequence that share the rows that stream in."""
_TABLES = 3
"""Table rows in SMEM: of the item at work, the next, and the one on its way."""
_VMEM_BYTES, _VMEM_REST = 48 * 2**20, 8 * 2**20
"""What rows and scores may take of VMEM, and what is left for queries, picks and registers."""
_SMEM_BYTES = 2**19


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staging:
    """How much is under way at once. Decides speed, and no bit."""

    depth: int = 6
    """Chunks of rows in fast memory: one is scored, the others are on their way."""

    def __post_init__(self) -> None:
        if self.depth < 2:
            raise ValueError("a depth of 1: nothing would be on its way while rows are scored")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a call."""

    sequences: int
    tokens: int
    group: int
    heads: int
    width: int
    per: int
    chunk_blocks: int
    capacity: int
    """Rows that a table can name, up to a whole ``CHUNK``."""
    topk: int
    parts: int
    """Summands that float32 queries are taken apart into."""
    row_bytes: int
    """Of a buffered row, which fills whole lanes."""
    packed: Packed | None
    staging: Staging

    @property
    def decoded(self) -> tuple[int, int]:
        """Packed rows of a chunk that several queries share are decoded once, into this shape."""
        if self.packed is None or self.group == 1:
            return 16, LANES
        return self.chunk_blocks * self.per, self.packed.lanes

    @property
    def vmem_bytes(self) -> int:
        """Of buffered and decoded rows, scores and keys."""
        buffers = self.staging.depth * self.chunk_blocks * self.per * self.row_bytes
        decoded = 2 * self.decoded[0] * self.decoded[1]
        return buffers + decoded + 4 * self.capacity * (self.group + 1)

    @property
    def smem_bytes(self) -> int:
        """Of table rows, which fill whole lanes."""
        chunks = cdiv(self.capacity, self.chunk_blocks * self.per)
        return 4 * _TABLES * chunks * cdiv(self.chunk_blocks, LANES) * LANES

    @property
    def groups(self) -> int:
        """Query groups of a sequence."""
        return self.tokens // self.group

    @property
    def places(self) -> int:
        """Picks of a query, up to whole lanes."""
        return cdiv(self.topk, LANES) * LANES


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
    """See ``api.pick_rows``. Sequences that are not active give zeros.

    Up to eight key blocks are copied and scored at a time, which changes no pick. Rows are used as
    they are stored; float32 queries of bfloat16 rows are taken apart into three bfloat16 summands,
    so that products are those of float32, unless all their values are bfloat16 already. Packed rows
    are copied as bytes and decoded beside the products (see ``tpu_packed``).

    Raises:
      NotImplementedError: rows that cannot be copied in whole registers, or more of them than fit.
    """
    sizes = _sizes(queries, rows, topk, key_block, format)
    refuse_copied(rows.pool)
    n, t = sizes.sequences, sizes.tokens
    split, whole = _split(queries, sizes, format)
    blocks = rows.pool.shape[0]
    spare = -rows.table.shape[1] % sizes.chunk_blocks
    table = jnp.pad(jnp.clip(rows.table, 0, blocks - 1), ((0, 0), (0, spare)))
    table = table.reshape(n, -1, 1, sizes.chunk_blocks)
    lanes = cdiv(sizes.heads, LANES) * LANES
    wide = weights.astype(jnp.float32)
    wide = jnp.pad(wide, ((0, 0), (0, 0), (0, lanes - weights.shape[2])))
    seen = jnp.clip(visible, 0, rows.table.shape[1] * sizes.per)  # copies are not checked
    scalars = (active.order, active.count.reshape(1), seen, whole)
    out = pl.pallas_call(
        lambda *refs: _kernel(sizes, *refs),
        out_shape=jax.ShapeDtypeStruct((n, t, 1, sizes.places), jnp.int32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(n * sizes.groups,),
            in_specs=[
                _of_item(sizes, *split.shape[2:]),
                _of_item(sizes, 1, wide.shape[2]),
                pl.BlockSpec(memory_space=pltpu.HBM),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=_of_item(sizes, 1, sizes.places),
            scratch_shapes=_scratch(sizes, rows.pool, table.shape[1:]),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=sizes.vmem_bytes + _VMEM_REST,
            disable_bounds_checks=True,  # of every copy, as many instructions as the copy
        ),
        interpret=interpret_params(),
        name="pick_rows",
    )(*scalars, split, wide[:, :, None], table, in_hbm(rows.pool))
    return out[:, :, 0, :topk]


def _of_item(sizes: Sizes, *shape: int) -> pl.BlockSpec:
    """An item's part of an array ``[sequences, tokens, *shape]``."""

    def place(item: jax.Array, order: Ref, *_: Ref) -> tuple[Any, ...]:
        """The first query of an item: its sequence, and its group of queries."""
        which, group = divide(item, sizes.groups)
        return (order[which], group, *(0 for _ in shape))

    return pl.BlockSpec((1, sizes.group, *shape), place)


def _sizes(queries: jax.Array, rows: BlockRows, topk: int, key_block: int, format: Format) -> Sizes:
    """The sizes of a call, or why it is not supported."""
    n, t, heads, width = queries.shape
    _, per, stored = rows.pool.shape
    packed = _packed(rows, width, format)
    if packed is None and (stored % LANES or stored != width):
        raise NotImplementedError(f"rows of {stored} channels, not a multiple of {LANES}")
    least = 8 if format == "float32" else 16 if packed is None else 32
    if per % least or TILE % per:
        raise NotImplementedError(
            f"blocks of {per} rows: not a multiple of {least} or not in {TILE}"
        )
    # A power of two, so that chunks divide into steps of tiles and memory into chunks.
    chunk = TILE << (cdiv(8 * key_block, TILE).bit_length() - 1)
    sizes = Sizes(
        sequences=n,
        tokens=t,
        group=next(g for g in range(min(t, _QUERIES), 0, -1) if t % g == 0),
        heads=cdiv(heads, 16) * 16,
        width=width,
        per=per,
        chunk_blocks=chunk // per,
        capacity=cdiv(rows.table.shape[1] * per, max(chunk, CHUNK)) * max(chunk, CHUNK),
        topk=topk,
        parts=1 if format == "float32" else 3,
        row_bytes=cdiv(stored, LANES) * LANES * rows.pool.dtype.itemsize,
        packed=packed,
        staging=tuned("index_scores/tpu", Staging(), format=_name(format), width=width),
    )
    if sizes.vmem_bytes > _VMEM_BYTES:
        raise NotImplementedError(f"scores of {sizes.capacity} rows do not fit in VMEM")
    if sizes.smem_bytes > _SMEM_BYTES:
        raise NotImplementedError(f"the blocks of {sizes.capacity} rows do not fit in SMEM")
    return sizes


def _name(format: Format) -> str:
    return format.name if isinstance(format, RowLayout) else format


def _packed(rows: BlockRows, width: int, format: Format) -> Packed | None:
    """How rows are packed, if they are.

    Raises:
      NotImplementedError: rows that are not scored here.
    """
    if not isinstance(format, RowLayout):
        if format not in _STORED or rows.pool.dtype != _STORED[format]:
            raise NotImplementedError(f"rows of format {format!r} as {rows.pool.dtype}")
        return None
    reason = refusal(format)
    pool = rows.pool  # rows may be filled up to a register's lanes
    narrow = pool.dtype != jnp.uint8 or pool.shape[-1] < format.row_bytes
    if reason is None and (narrow or width != format.width):
        reason = f"queries of width {width}, rows as {pool.dtype}{list(pool.shape)} for {format}"
    if reason is not None:
        raise NotImplementedError(reason)
    return Packed(format)


def _split(queries: jax.Array, sizes: Sizes, format: Format) -> tuple[jax.Array, jax.Array]:
    """Queries as the products take them ``[n, t, parts * heads, width]``; per sequence, int32 1
    where the first part says it all.
    """
    exact = queries.astype(jnp.float32)
    missing = sizes.heads - exact.shape[2]
    exact = jnp.pad(exact, ((0, 0), (0, 0), (0, missing), (0, 0)))
    if format == "float32":
        return exact, jnp.ones((sizes.sequences,), jnp.int32)
    parts = []
    rest = exact
    for _ in range(sizes.parts):
        # By bits: a compiler may take a cast to bfloat16 and back for nothing.
        part = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    whole = jnp.all(parts[1] == 0, axis=(1, 2, 3)).astype(jnp.int32)
    every = jnp.concatenate(parts, axis=2)
    return (every if sizes.packed is None else sizes.packed.queries(every)), whole


def _scratch(sizes: Sizes, pool: Any, table: tuple[int, ...]) -> list[Any]:
    tiles = sizes.capacity // TILE
    return [
        pltpu.SMEM((_TABLES, *table), jnp.int32),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.VMEM((sizes.staging.depth, sizes.chunk_blocks, *pool.shape[1:]), pool.dtype),
        pltpu.VMEM((sizes.group, tiles, 8, LANES), jnp.float32),
        pltpu.VMEM((sizes.group, sizes.heads, PRODUCT_ROWS), jnp.float32),
        pltpu.VMEM((tiles * 8, LANES), jnp.int32),
        pltpu.VMEM((LANES, sizes.places), jnp.float32),
        pltpu.VMEM(sizes.decoded, jnp.bfloat16),
        pltpu.SemaphoreType.DMA((_TABLES,)),
        pltpu.SemaphoreType.DMA((sizes.staging.depth,)),
    ]


class Refs(NamedTuple):
    """Operands, result and scratch of the kernel."""

    order: Ref
    count: Ref
    visible: Ref
    whole: Ref
    queries: Ref
    weights: Ref
    table: Ref
    pool: Ref
    out: Ref
    tables: Ref
    base: Ref
    """The number, in the whole stream, of the item's first chunk."""
    buffers: Ref
    scores: Ref
    wide: Ref
    """Weights down sublanes, the same in all lanes."""
    keys: Ref
    gathered: Ref
    decoded: Ref
    """bfloat16, see ``Sizes.decoded``."""
    table_arrived: Ref
    arrived: Ref


def _kernel(sizes: Sizes, *every: Ref) -> None:
    refs = Refs(*every)
    step = pl.program_id(0)
    items = refs.count[0] * sizes.groups

    def sequence(item: jax.Array) -> jax.Array:
        """The sequence of an item; past the last item, some sequence."""
        return refs.order[jnp.minimum(divide(item, sizes.groups)[0], sizes.sequences - 1)]

    def entry(item: jax.Array) -> Item:
        """What is to be read of an item; no rows where all that is seen is picked."""
        last = divide(item, sizes.groups)[1] * sizes.group + sizes.group - 1
        rows = refs.visible[sequence(item), last]
        scored = (item < items) & (rows > sizes.topk)
        return Item(divide(item, _TABLES)[1], jnp.where(scored, rows, 0))

    def table_copy(item: jax.Array) -> Any:
        """The copy of the block table of an item's sequence."""
        slot = divide(item, _TABLES)[1]
        return pltpu.make_async_copy(
            refs.table.at[sequence(item)], refs.tables.at[slot], refs.table_arrived.at[slot]
        )

    @pl.when((step == 0) & (items > 0))
    def _() -> None:
        refs.base[0] = 0
        table_copy(step).start()
        table_copy(step).wait()
        pl.when(items > 1)(lambda: table_copy(step + 1).start())

    @pl.when(step < items)
    def _() -> None:
        pl.when(step + 2 < items)(lambda: table_copy(step + 2).start())
        pl.when(step + 1 < items)(lambda: table_copy(step + 1).wait())
        whole = refs.whole[sequence(step)] != 0
        _stream_scores(sizes, refs, entry(step), entry(step + 1), whole)

        def rank(number: jax.Array, _: None) -> None:
            """Writes the picks of one query of the item."""
            token = divide(step, sizes.groups)[1] * sizes.group + number
            seen = refs.visible[sequence(step), token]
            picks = _ranked(sizes, refs.scores.at[number], refs.keys, refs.gathered, seen)
            refs.out[0, number] = picks

        jax.lax.fori_loop(0, sizes.group, rank, None)

    @pl.when(step >= items)
    def _() -> None:
        refs.out[...] = jnp.zeros_like(refs.out)


def _stream_scores(sizes: Sizes, refs: Refs, own: Item, after: Item, whole: jax.Array) -> None:
    """Scores of all queries of an item; leaves the first chunks of the next one on their way."""
    stream = RowStream(refs.pool, refs.tables, refs.buffers, refs.arrived)
    start, chunks = refs.base[0], stream.chunks(own)

    def prepare(number: jax.Array, _: None) -> None:
        """Lays the weights of a query down sublanes."""
        refs.wide[number] = down_sublanes(refs.weights[0, number], sizes.heads)

    def begin(position: jax.Array, _: None) -> None:
        """Starts the copies of one chunk."""
        stream.start(stream.target(own, after, start, position))

    jax.lax.fori_loop(0, jnp.where(chunks > 0, sizes.group, 0), prepare, None)
    # The item before has started the chunks of this one that it could see.
    already = jnp.where(pl.program_id(0) == 0, 0, jnp.minimum(chunks, stream.depth - 1))
    jax.lax.fori_loop(already, stream.depth - 1, begin, None)

    def chunk_scores(chunk: jax.Array, parts: int) -> None:
        """Scores of a chunk that has arrived, while a later one is copied."""
        buffer = divide(start + chunk, stream.depth)[1]
        stream.wait(own, chunk, buffer)
        # The buffer before this one is free: its scores are done.
        target = stream.target(own, after, start, chunk + stream.depth - 1)
        first_tile = chunk * (stream.chunk_rows // TILE)

        def query_scores(
            number: Any, copy_blocks: Callable[[Any, int], None] | None = None, first: bool = False
        ) -> None:
            """Scores of the chunk's rows for one query."""
            lead = 0 if sizes.packed is None else sizes.packed.lead
            q = refs.queries[0, number, : lead + parts * sizes.heads, :]
            w, scores = refs.wide.at[number], refs.scores.at[number]
            read = functools.partial(_read, sizes, refs.buffers.at[buffer], refs.decoded, first)
            shape = sizes.chunk_blocks, sizes.per
            score_chunk(read, shape, q, w, scores, first_tile, copy_blocks, sizes.packed)

        # A whole chunk is copied beside the first query's scores.
        beside = target.count == sizes.chunk_blocks
        copy_blocks = functools.partial(stream.copy_blocks, target)
        pl.when(beside)(lambda: query_scores(0, copy_blocks, True))
        pl.when(jnp.logical_not(beside))(lambda: stream.start(target))
        rest = beside.astype(jnp.int32)
        if sizes.packed is not None:  # the first query decodes for the others
            pl.when(jnp.logical_not(beside))(lambda: query_scores(0, None, True))
            rest = jnp.int32(1)
            if sizes.group == 1:
                return
        jax.lax.fori_loop(rest, sizes.group, lambda number, _: query_scores(number), None)

    def run(parts: int) -> None:
        """Scores of all chunks, with so many summands of each query."""
        jax.lax.fori_loop(0, chunks, lambda chunk, _: chunk_scores(chunk, parts), None)

    if sizes.parts == 1:
        run(1)
    else:
        pl.when(whole)(lambda: run(1))
        pl.when(jnp.logical_not(whole))(lambda: run(sizes.parts))
    refs.base[0] = start + chunks


def _read(
    sizes: Sizes, rows: Ref, decoded: Ref, first: bool, tile: jax.Array, part: int
) -> jax.Array:
    """Rows of a part of a tile as they are multiplied. The first query leaves them decoded."""
    if sizes.packed is None:
        return as_floats(part_of(rows, tile, part))
    place = pl.ds(pl.multiple_of(tile * TILE + part * PRODUCT_ROWS, PRODUCT_ROWS), PRODUCT_ROWS)
    if not first:
        return decoded[place, :]
    keys = sizes.packed.decode(part_of(rows, tile, part))
    if sizes.group > 1:
        decoded[place, :] = keys
    return keys


def _ranked(sizes: Sizes, scores: Ref, keys: Ref, gathered: Ref, visible: jax.Array) -> jax.Array:
    def best() -> jax.Array:
        """The picks, of more rows than there are places."""
        top = tpu_topk.order_keys(scores, keys, visible)
        cut = tpu_topk.kth_largest(keys, top, visible, sizes.topk)
        return tpu_topk.compact(keys, cut, visible, gathered, sizes.places)

    def every() -> jax.Array:
        """All rows that are seen, then none."""
        row = jax.lax.broadcasted_iota(jnp.int32, (1, sizes.places), 1)
        return jnp.where(row < visible, row, NO_ROW)

    return jax.lax.cond(visible > sizes.topk, best, every)
