"""Blocks and sequence states on their way out of a cache and back, a fixed number at a time.

    places [moved] --gather_blocks--> BlockRows [moved, rows, stored] a layer --scatter_blocks-->
    slot           --gather_state---> SequenceState of one sequence          --scatter_state-->

Unlike a snapshot, a state taken here may stand at any position: its open cells come along. A place
or a slot past the end reads something finite and writes nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from hybridkv.state.cache import Cache
from hybridkv.state.compressed import CompressedRows
from hybridkv.state.indexer import IndexRows
from hybridkv.state.sequence import SequenceState
from pallas_kernels.moves import api as moves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MovedBlocks:
    """All bytes of some blocks. Every leaf leads with them: ``[moved, rows, stored]``."""

    compressed: CompressedRows
    indexer: IndexRows


def gather_blocks(cache: Cache, places: Int[Array, " moved"]) -> MovedBlocks:
    """Copies of the blocks at ``places``."""
    pools = MovedBlocks(compressed=cache.compressed, indexer=cache.indexer)
    return jax.tree.map(lambda pool: moves.gather_blocks(pool, places), pools)


def scatter_blocks(cache: Cache, blocks: MovedBlocks, places: Int[Array, " moved"]) -> Cache:
    """Writes blocks to ``places``, none of which comes twice but those past the pool.

    DONATES cache when jitted by a caller.
    """
    pools = MovedBlocks(compressed=cache.compressed, indexer=cache.indexer)
    after = jax.tree.map(lambda pool, x: moves.scatter_blocks(pool, x, places), pools, blocks)
    return dataclasses.replace(cache, compressed=after.compressed, indexer=after.indexer)


def gather_state(cache: Cache, slot: Int[Array, ""]) -> SequenceState:
    """A copy of one slot's state; leaves have no axis of slots."""
    return jax.tree.map(lambda rows: rows.at[slot].get(mode="clip"), cache.sequence)


def scatter_state(
    cache: Cache,
    state: SequenceState,
    slot: Int[Array, ""],
    table: Int[Array, " blocks_per_sequence"],
    length: Int[Array, ""],
) -> Cache:
    """Seats a sequence of ``length`` tokens with its state and its block table.

    DONATES cache when jitted by a caller.
    """
    sequence = jax.tree.map(
        lambda rows, x: rows.at[slot].set(jnp.asarray(x), mode="drop"), cache.sequence, state
    )
    return dataclasses.replace(
        cache,
        sequence=sequence,
        block_table=cache.block_table.at[slot].set(table, mode="drop"),
        lengths=cache.lengths.at[slot].set(length, mode="drop"),
    )
