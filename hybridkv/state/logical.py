"""A sequence's bytes by logical position, on the host: what its slot and its past left is zero.

    ring   [ row 8 | row 9 | row 6 | row 7 ]  of position 10 --> [ 0 | row 7 | row 8 | row 9 ]
    cell   [ row 8 | row 9 | old   | old   ]  of ratio 4     --> [ row 8 | row 9 | 0 | 0 ]
    block  rows of whole cells | rows of whoever had the block before --> the same | 0

So the words are a function of the tokens alone: they hold no bytes of other sequences, and whoever
gets them puts each row where its own slot wants it. Numpy only; any thread.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt32

from hybridkv.geometry import Geometry
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity
from hybridkv.state.packing import WORD_BYTES
from hybridkv.state.sequence import SequenceState
from hybridkv.state.tail import CompressorTail, Tails
from hybridkv.state.window import WindowRows

_ONE = Capacity(blocks=1, slots=1, blocks_per_sequence=1)


def state_words(state: SequenceState, position: int) -> UInt32[np.ndarray, " words"]:
    """The words of a state as ``Steps.read_state`` gave it, on the host.

    Args:
      state: leaves without an axis of slots.
      position: tokens that it has consumed.

    Returns:
      Kinds where ``packing.state_spans`` says. Window rows oldest first, the first of ``window``
      being zero; the open cell's rows that are there; the overlap where a cell is complete.
    """
    window = _each_ring(state.window, lambda ring: _oldest_first(ring, position))
    tails = Tails(
        main=tuple(_known(tail, position) for tail in state.tails.main),
        index=tuple(_known(tail, position) for tail in state.tails.index),
    )
    leaves = jax.tree.leaves(SequenceState(window=window, tails=tails))
    return np.concatenate([np.empty(0, np.uint32), *(_to_words(x) for x in leaves)])


def state_of(
    geometry: Geometry, words: UInt32[np.ndarray, " words"], position: int
) -> SequenceState:
    """The inverse: a state as ``Steps.write_state`` takes it, each row at its place in the ring."""
    like = Cache.abstract(geometry, _ONE).sequence
    leaves, start = [], 0
    for leaf in jax.tree.leaves(like):
        shape, dtype = leaf.shape[1:], np.dtype(leaf.dtype)
        stop = start + _words(shape, dtype)
        raw = words[start:stop].view(np.uint8)[: math.prod(shape) * dtype.itemsize]
        leaves.append(raw.view(dtype).reshape(shape))
        start = stop
    state: SequenceState = jax.tree.unflatten(jax.tree.structure(like), leaves)
    window = _each_ring(state.window, lambda rows: _as_ring(rows, position))
    return SequenceState(window=window, tails=state.tails)


def whole_cells(
    geometry: Geometry, words: UInt32[np.ndarray, " words"], position: int
) -> UInt32[np.ndarray, " words"]:
    """A copy of the words of the block that ``position`` is in; rows of no whole cell are zero.

    Args:
      geometry: of the model.
      words: of the block, as ``Steps.read_blocks`` gives them.
      position: tokens of the sequence; at a block's end the block is whole and comes back as it is.
    """
    copy, rest = words.copy(), position % geometry.block_tokens
    if not rest:
        return copy
    start = 0
    for ratio, shape, dtype in _pools(geometry):
        stop = start + _words(shape, dtype)
        row = math.prod(shape[1:]) * dtype.itemsize
        copy[start:stop].view(np.uint8)[rest // ratio * row :] = 0
        start = stop
    return copy


def _pools(geometry: Geometry) -> Iterator[tuple[int, tuple[int, ...], np.dtype[Any]]]:
    """(ratio, shape of one block, dtype) of each pool, in the order of a block's words."""
    cache = Cache.abstract(geometry, _ONE)
    for pools in (cache.compressed, cache.indexer):
        for layer, pool in zip(geometry.layers, pools.layers, strict=True):
            if pool is not None:
                yield layer.ratio, pool.shape[1:], np.dtype(pool.dtype)


def _each_ring(window: WindowRows, change: Callable[[Any], Any]) -> WindowRows:
    return WindowRows(layers=tuple(x if x is None else change(x) for x in window.layers))


def _oldest_first(ring: np.ndarray, position: int) -> np.ndarray:
    window = ring.shape[0]
    positions = position - window + np.arange(window)
    rows = ring[positions % window].copy()
    rows[positions < max(position - window + 1, 0)] = 0
    return rows


def _as_ring(rows: np.ndarray, position: int) -> np.ndarray:
    window = rows.shape[0]
    ring = np.empty_like(rows)
    ring[(position - window + np.arange(window)) % window] = rows
    return ring


def _known(tail: CompressorTail | None, position: int) -> CompressorTail | None:
    """A tail in which only what its position defines is left."""
    if tail is None:
        return None
    ratio = tail.kv.shape[0]
    there = np.arange(ratio) < position % ratio
    overlaps = np.full(ratio, position >= ratio)
    return CompressorTail(
        kv=_select(there, tail.kv),
        gate=_select(there, tail.gate),
        earlier_kv=None if tail.earlier_kv is None else _select(overlaps, tail.earlier_kv),
        earlier_gate=None if tail.earlier_gate is None else _select(overlaps, tail.earlier_gate),
    )


def _select(rows: np.ndarray, x: Any) -> Any:
    return np.where(rows[:, None], x, np.zeros((), x.dtype))


def _to_words(x: np.ndarray) -> UInt32[np.ndarray, " words"]:
    raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return np.pad(raw, (0, -raw.size % WORD_BYTES)).view(np.uint32)


def _words(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return -(-math.prod(shape) * dtype.itemsize // WORD_BYTES)
