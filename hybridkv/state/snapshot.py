"""Stored sequence states: what a sequence needs at a tile boundary beside its blocks.

    slot    WINDOW ring ----write_snapshot----> [snapshots, window, stored]       a layer
            TAIL overlap ---------------------> [snapshots, ratio, width] x (kv, gate)
            TAIL open cell: empty at a tile boundary, so it is neither stored nor restored

A tile is a multiple of every ratio, which makes the open cells empty; at ratio 128 they would
be most of a snapshot's bytes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hybridkv.geometry import Geometry
from hybridkv.kinds import Kind
from hybridkv.state import leaf
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity
from hybridkv.state.tail import CompressorTail, Tails
from hybridkv.state.window import WindowRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """The half of the last complete cell that the next row pools too, float32."""

    kv: Float[Array, "snapshots ratio width"]
    gate: Float[Array, "snapshots ratio width"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshots:
    """A pool of snapshots. Every leaf leads with snapshots."""

    window: WindowRows
    main: tuple[Overlap | None, ...]
    index: tuple[Overlap | None, ...]

    @classmethod
    def declare(cls, geometry: Geometry, snapshots: int) -> "Snapshots":
        """Declarations of all arrays."""
        capacity = Capacity(blocks=1, slots=snapshots, blocks_per_sequence=1)
        tails = Tails.declare(geometry, capacity)
        return cls(
            window=WindowRows.declare(geometry, capacity),
            main=tuple(_overlap(tail) for tail in tails.main),
            index=tuple(_overlap(tail) for tail in tails.index),
        )

    @classmethod
    def abstract(cls, geometry: Geometry, snapshots: int) -> "Snapshots":
        """The pool as ``ShapeDtypeStruct``; allocates nothing."""
        return leaf.abstract(cls.declare(geometry, snapshots))

    @classmethod
    def shardings(
        cls,
        geometry: Geometry,
        snapshots: int,
        mesh: jax.sharding.Mesh,
        rules: Mapping[str, str] = leaf.DEFAULT_RULES,
    ) -> "Snapshots":
        """The pool as ``NamedSharding``; allocates nothing."""
        return leaf.shardings(cls.declare(geometry, snapshots), mesh, rules)

    @classmethod
    def init(cls, geometry: Geometry, snapshots: int, placement: Any | None = None) -> "Snapshots":
        """An empty pool; ``placement`` as in ``leaf.init``."""
        return leaf.init(cls.declare(geometry, snapshots), placement)


def _overlap(tail: CompressorTail | None) -> Overlap | None:
    if tail is None or tail.earlier_kv is None or tail.earlier_gate is None:
        return None
    return Overlap(kv=tail.earlier_kv, gate=tail.earlier_gate)


def snapshot_bytes(geometry: Geometry) -> Mapping[Kind, int]:
    """Bytes of one snapshot by kind."""
    declared = Snapshots.declare(geometry, 1)
    return {
        Kind.WINDOW: leaf.tree_bytes(declared.window),
        Kind.TAIL: leaf.tree_bytes((declared.main, declared.index)),
    }


def write_snapshot(
    snapshots: Snapshots, cache: Cache, slot: Int[Array, ""], place: Int[Array, ""]
) -> Snapshots:
    """Copies the state of ``slot``, which stands at a tile boundary, to ``place``.

    A place past the pool writes nothing. DONATES snapshots when jitted by a caller.
    """
    state = cache.sequence
    live = Snapshots(
        window=state.window,
        main=tuple(_overlap(tail) for tail in state.tails.main),
        index=tuple(_overlap(tail) for tail in state.tails.index),
    )
    return jax.tree.map(
        lambda pool, rows: pool.at[place].set(rows[slot], mode="drop"), snapshots, live
    )


def read_snapshot(
    cache: Cache, snapshots: Snapshots, slot: Int[Array, ""], place: Int[Array, ""]
) -> Cache:
    """Copies the snapshot at ``place`` into ``slot``; open cells stay as they are, being empty.

    A slot past the cache's writes nothing. DONATES cache when jitted by a caller.
    """

    def copy(rows: jax.Array, pool: jax.Array) -> jax.Array:
        return rows.at[slot].set(pool.at[place].get(mode="clip"), mode="drop")

    def tail(live: CompressorTail | None, stored: Overlap | None) -> CompressorTail | None:
        if live is None or stored is None:
            return live
        assert live.earlier_kv is not None
        assert live.earlier_gate is not None
        return dataclasses.replace(
            live,
            earlier_kv=copy(live.earlier_kv, stored.kv),
            earlier_gate=copy(live.earlier_gate, stored.gate),
        )

    state = cache.sequence
    tails = Tails(
        main=tuple(map(tail, state.tails.main, snapshots.main)),
        index=tuple(map(tail, state.tails.index, snapshots.index)),
    )
    window = jax.tree.map(copy, state.window, snapshots.window)
    return dataclasses.replace(
        cache, sequence=dataclasses.replace(state, window=window, tails=tails)
    )


def admit(
    cache: Cache,
    snapshots: Snapshots,
    slot: Int[Array, ""],
    table: Int[Array, " blocks_per_sequence"],
    length: Int[Array, ""],
    place: Int[Array, ""],
) -> Cache:
    """Seats a sequence of ``length`` tokens: its block table, its length, its snapshot.

    ``place`` past the pool reads no snapshot: the sequence starts from nothing, as a replay or a
    cold run does. DONATES cache when jitted by a caller.
    """
    pool = jax.tree.leaves(snapshots)
    count = pool[0].shape[0] if pool else 0
    reader = jnp.where(place < count, slot, cache.slots)
    copied = read_snapshot(cache, snapshots, reader, place)
    return dataclasses.replace(
        copied,
        block_table=cache.block_table.at[slot].set(table, mode="drop"),
        lengths=cache.lengths.at[slot].set(length, mode="drop"),
    )
