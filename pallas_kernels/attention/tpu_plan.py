"""What the TPU attention kernel does, in which order: fixed sizes, and the list of its copies.

    task   a chunk of one sequence's queries: one grid step
    item   the key blocks of a task that are copied and summed together

Items of all tasks stand in one list, in the order in which they are summed. The kernel copies them
ahead by position in that list, across the borders of tasks and past those that have none.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.packing.layout import RowLayout
from pallas_kernels.packing.tpu_rows import UNIT
from pallas_kernels.sequences import Active

LANES = 128
"""Width of a vector register."""
SUBLANES = 8
STEP = 8
"""Copies started at once where an item has too many to write them all out."""


@dataclass(frozen=True, kw_only=True)
class Staging:
    """How much is under way at once. Decides speed, and no bit."""

    buffers: int = 4
    """Items in fast memory: one is summed, the others are on their way. A power of two."""

    def __post_init__(self) -> None:
        if self.buffers < 2 or self.buffers & (self.buffers - 1):
            raise ValueError(f"{self.buffers} buffers: give 2, 4 or another power of two")


@dataclass(frozen=True, kw_only=True)
class KeyBlocks:
    """How compressed rows are laid out and read."""

    size: int
    """Rows summed at once: whole cache blocks."""
    per_block: int
    blocks: int
    """Cache blocks of a sequence or, without a table, of a query."""
    tabled: bool
    """Whether a block table says where rows are. Otherwise each query has its own, in order."""
    dtype: Any
    """What rows are multiplied in."""
    paired: bool
    """Whether an item has two key blocks. The first then has one: it is summed with the window."""
    packed: RowLayout | None = None
    """How rows are packed, if they are: then they are decoded where they have arrived."""

    @property
    def item(self) -> int:
        """Most rows of an item."""
        return 2 * self.size if self.paired else self.size

    @property
    def copies(self) -> int:
        """Most cache blocks of an item."""
        return self.item // self.per_block

    @property
    def spare(self) -> int:
        """Entries behind the block table that may be read, and are not used."""
        return cdiv(self.copies, STEP) * STEP if self.tabled else 0

    @property
    def most_items(self) -> int:
        """Most items of a task."""
        blocks = cdiv(self.blocks * self.per_block, self.size)
        return blocks // 2 + 1 if self.paired else blocks


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is fixed when the kernel is traced."""

    t: int
    """Queries of a sequence."""
    queries: int
    """Queries of a task; divides ``t``."""
    heads: int
    window: int
    window_rows: int
    """Rows read for the window part of a task, from a whole group on."""
    scale: float
    local_dtype: Any
    """What window rows are multiplied in."""
    rows: KeyBlocks
    local_packed: RowLayout | None = None
    """As ``rows.packed``, of window rows."""
    staging: Staging = Staging()

    @property
    def ahead(self) -> int:
        """How many items before its sum an item is copied."""
        return self.staging.buffers - 1

    def slot(self, item: Any) -> Any:
        """Which buffer an item is in."""
        return item & (self.staging.buffers - 1)

    @property
    def window_group(self) -> int:
        """Window rows that stand together; a task reads whole groups."""
        return window_group(self.local_packed)

    @property
    def tasks(self) -> int:
        """Tasks of one sequence."""
        return self.t // self.queries

    @property
    def lines(self) -> int:
        """Rows of every matrix on the query side."""
        return self.queries * self.heads


class Scalars(NamedTuple):
    """What the kernel keeps in scalar memory, int32. Tasks count in the order of the grid."""

    order: Any
    """``[n]``: the sequence of each place."""
    count: Any
    """``[1]``: places that have work."""
    first: Any
    """``[n]``"""
    visible: Any
    """``[n * t]``: compressed rows that each query sees."""
    table: Any
    """``[n * blocks + spare]``, in range; ``[1]`` without a table."""
    length: Any
    """``[tasks]``: rows that a task reads, what its last query sees."""
    offset: Any
    """``[tasks + 1]``: a task's first item, and how many there are in all."""
    begin: Any
    """``[items + ahead]``: an item's first cache block: its place in ``table`` or in the pool."""
    many: Any
    """``[items + ahead]``: an item's cache blocks; 0 past the last item."""


def scalars(
    plan: Plan,
    active: Active,
    first: Int[Array, " n"],
    visible: Int[Array, "n t"],
    table: Int[Array, "n blocks"],
    pool_blocks: int,
) -> Scalars:
    """The work list of one call. Tasks of idle sequences read nothing."""
    rows, n = plan.rows, first.shape[0]
    place = jnp.arange(n, dtype=jnp.int32)[:, None]
    chunk = jnp.arange(plan.tasks, dtype=jnp.int32)[None, :]
    sequence = active.order[:, None]
    length = jnp.clip(visible, 0, rows.blocks * rows.per_block)
    length = length[sequence, (chunk + 1) * plan.queries - 1]
    length = jnp.where(place < active.count, length, 0).reshape(-1)
    owner = sequence + 0 * chunk if rows.tabled else sequence * plan.t + chunk
    end = jnp.cumsum(_items(length, rows), dtype=jnp.int32)
    offset = jnp.concatenate([jnp.zeros((1,), jnp.int32), end])
    # Of every item: the task it belongs to (those that end before it are counted), its number.
    item = jnp.arange(length.size * rows.most_items + plan.ahead, dtype=jnp.int32)
    task = jnp.searchsorted(end, item, side="right", method="compare_all").astype(jnp.int32)
    there = task < length.size
    task = jnp.minimum(task, length.size - 1)
    number = item - offset[task]
    per_key_block = rows.size // rows.per_block
    start, stop = (first_block(number + more, rows) * per_key_block for more in (0, 1))
    stop = jnp.minimum(stop, cdiv(length[task], rows.per_block))
    return Scalars(
        active.order,
        active.count.reshape(1),
        first,
        visible.reshape(-1),
        jnp.pad(jnp.clip(table.reshape(-1), 0, pool_blocks - 1), (0, rows.spare)),
        length,
        offset,
        jnp.where(there, owner.reshape(-1)[task] * rows.blocks + start, 0),
        jnp.where(there, stop - start, 0),
    )


def scalar_bytes(plan: Plan, n: int, table_entries: int) -> int:
    """Bytes of ``scalars``."""
    tasks = n * plan.tasks
    items = tasks * plan.rows.most_items + plan.ahead
    table = table_entries + plan.rows.spare
    return 4 * (2 * n + 1 + n * plan.t + table + 2 * tasks + 1 + 2 * items)


def window_group(packed: RowLayout | None) -> int:
    """See ``Plan.window_group``."""
    return SUBLANES if packed is None else UNIT


def first_block(item: Any, rows: KeyBlocks) -> Any:
    """The first key block of a task's item."""
    return jnp.maximum(2 * item - 1, 0) if rows.paired else item


def _items(length: jax.Array, rows: KeyBlocks) -> jax.Array:
    blocks = cdiv(length, rows.size)
    return jnp.where(blocks > 0, blocks // 2 + 1, 0) if rows.paired else blocks


def cdiv(a: Any, b: int) -> Any:
    """``a / b`` rounded up, for ints and int32 arrays."""
    return -(-a // b)
