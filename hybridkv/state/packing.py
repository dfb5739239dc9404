"""Blocks and snapshots as plain words: what leaves the device, in one array each.

    MovedBlocks [moved, rows, stored] a layer --pack--> uint32 [moved, words] --unpack--> the same
       words of a block      | COMPRESSED of layer 0, 1, ... | INDEXER of layer 0, 1, ... |
       words of a snapshot   | WINDOW of every layer         | TAIL of every layer        |

One transfer instead of one a layer, one digest a kind, and one format for host memory, disk and
hand-off. A layer starts on a whole word; what fills a word up is zero.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from hybridkv.arithmetic import cdiv
from hybridkv.geometry import Geometry
from hybridkv.kinds import Kind
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity
from hybridkv.state.snapshot import Snapshots
from hybridkv.state.transfer import MovedBlocks, gather_blocks, scatter_blocks

WORD_BYTES = 4


def block_spans(geometry: Geometry) -> Mapping[Kind, slice]:
    """Where each kind is in the words of a block; kinds that the model lacks are left out."""
    one = Cache.abstract(geometry, Capacity(blocks=1, slots=1, blocks_per_sequence=1))
    return _spans({Kind.COMPRESSED: one.compressed, Kind.INDEXER: one.indexer})


def snapshot_spans(geometry: Geometry) -> Mapping[Kind, slice]:
    """Where each kind is in the words of a snapshot; kinds that the model lacks are left out."""
    one = Snapshots.abstract(geometry, 1)
    return _spans({Kind.WINDOW: one.window, Kind.TAIL: (one.main, one.index)})


def state_spans(geometry: Geometry) -> Mapping[Kind, slice]:
    """Where each kind is in the words of a sequence state, open cells included, at any position.

    The words themselves are made and read by ``hybridkv.state.logical``.
    """
    capacity = Capacity(blocks=1, slots=1, blocks_per_sequence=1)
    one = Cache.abstract(geometry, capacity).sequence
    return _spans({Kind.WINDOW: one.window, Kind.TAIL: one.tails})


def words_of(spans: Mapping[Kind, slice]) -> int:
    """Words of all kinds together."""
    return max((span.stop for span in spans.values()), default=0)


def _spans(parts: Mapping[Kind, Any]) -> Mapping[Kind, slice]:
    spans, start = {}, 0
    for kind, part in parts.items():
        stop = start + sum(_words(x.shape[1:], x.dtype) for x in jax.tree.leaves(part))
        if stop > start:
            spans[kind] = slice(start, stop)
        start = stop
    return spans


def _words(shape: tuple[int, ...], dtype: Any) -> int:
    return cdiv(math.prod(shape) * np.dtype(dtype).itemsize, WORD_BYTES)


def pack(tree: Any, n: int) -> UInt32[Array, "n words"]:
    """The bytes of a tree whose leaves all lead with ``n``, in the order of its leaves."""
    nothing = jnp.zeros((n, 0), jnp.uint32)  # a model may lack all kinds
    return jnp.concatenate([nothing, *(_to_words(x) for x in jax.tree.leaves(tree))], axis=1)


def unpack(words: UInt32[Array, "n words"], like: Any) -> Any:
    """What ``pack`` took apart; ``like`` gives the tree, its shapes (but for ``n``) and dtypes."""
    leaves, structure = jax.tree.flatten(like)
    parts, start = [], 0
    for each in leaves:
        stop = start + _words(each.shape[1:], each.dtype)
        parts.append(_from_words(words[:, start:stop], each.shape[1:], each.dtype))
        start = stop
    return jax.tree.unflatten(structure, parts)


def _to_words(x: jax.Array) -> jax.Array:
    flat = x.reshape(x.shape[0], -1)
    each = WORD_BYTES // x.dtype.itemsize
    if each == 1:
        return jax.lax.bitcast_convert_type(flat, jnp.uint32)
    missing = -flat.shape[1] % each
    whole = jnp.pad(flat, ((0, 0), (0, missing))) if missing else flat
    return jax.lax.bitcast_convert_type(whole.reshape(x.shape[0], -1, each), jnp.uint32)


def _from_words(words: jax.Array, shape: Iterable[int], dtype: Any) -> jax.Array:
    shape = tuple(shape)
    parts = jax.lax.bitcast_convert_type(words, dtype).reshape(words.shape[0], -1)
    return parts[:, : math.prod(shape)].reshape(-1, *shape)


# What the steps compile.


def take_blocks(cache: Cache, places: Int[Array, " moved"]) -> tuple[UInt32[Array, " words"], ...]:
    """Copies of the blocks at ``places``, one array each."""
    words = pack(gather_blocks(cache, places), len(places))
    return tuple(words[number] for number in range(len(places)))


def put_blocks(
    cache: Cache, blocks: tuple[UInt32[Array, " words"], ...], places: Int[Array, " moved"]
) -> Cache:
    """Writes blocks to ``places``; past the pool to nowhere. DONATES cache when jitted."""
    pools = MovedBlocks(compressed=cache.compressed, indexer=cache.indexer)
    return scatter_blocks(cache, unpack(jnp.stack(blocks), pools), places)


def take_snapshot(snapshots: Snapshots, place: Int[Array, ""]) -> UInt32[Array, " words"]:
    """A copy of the snapshot at ``place``."""
    one = jax.tree.map(lambda pool: pool.at[place].get(mode="clip")[None], snapshots)
    return pack(one, 1)[0]


def put_snapshot(
    snapshots: Snapshots, words: UInt32[Array, " words"], place: Int[Array, ""]
) -> Snapshots:
    """Writes a snapshot to ``place``; past the pool to nowhere. DONATES snapshots when jitted."""
    one = unpack(words[None], snapshots)
    return jax.tree.map(lambda pool, x: pool.at[place].set(x[0], mode="drop"), snapshots, one)
