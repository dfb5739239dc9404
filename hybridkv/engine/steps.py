"""The jitted executables, each compiled once.

    params, batch, cache --tile-->   logits, cache'      (cache is DONATED: use cache')
    params, batch, cache --decode--> logits, cache'
    cache, snapshots, slot, table, length, place --admit--> cache'
    snapshots, cache, slot, place --write_snapshot--> snapshots'    (snapshots are DONATED)
    cache, places --read_blocks--> words of each block
    cache, words, places --write_blocks--> cache'
    snapshots, place --read_snapshot--> words
    snapshots, words, place --store_snapshot--> snapshots'
    cache, slot --read_state--> state
    cache, state, slot, table, length --write_state--> cache'

Whoever calls a step owns the cache; nothing else may hold on to it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybridkv.arithmetic import cdiv
from hybridkv.engine.protocol import StepModel
from hybridkv.errors import UserError
from hybridkv.geometry import Geometry
from hybridkv.state import leaf
from hybridkv.state.batch import DecodeBatch, StepOptions, TileBatch
from hybridkv.state.cache import Cache
from hybridkv.state.packing import put_blocks, put_snapshot, take_blocks, take_snapshot
from hybridkv.state.sequence import SequenceState
from hybridkv.state.snapshot import Snapshots, admit, write_snapshot
from hybridkv.state.transfer import gather_state, scatter_state

MOVED_BLOCKS = 8
"""Blocks that one read or write of blocks moves. More means fewer dispatches and more bytes moved
for nothing at the end of a sequence."""

NOWHERE = np.iinfo(np.int32).max
"""A place past every pool."""

BlockWords = tuple[jax.Array, ...]
"""``MOVED_BLOCKS`` arrays, uint32 ``[words]``, one a block."""


class DonatedCacheError(RuntimeError):
    """A cache was used after a step had taken it."""


def check_tile(geometry: Geometry, tile: int) -> None:
    """Refuses tiles that cannot be computed: see ``StepOptions.tile``.

    Raises:
      UserError: it is no multiple of the model's block.
    """
    block = geometry.block_tokens
    if tile % block:
        raise UserError(f"tile is {tile} tokens: use a multiple of the model's block, {block}")


class Steps:
    """Compiled steps of one model at one set of options."""

    def __init__(self, model: StepModel, options: StepOptions) -> None:
        check_tile(model.geometry, options.tile)
        self.model = model
        self.options = options

        def tile(params: Any, batch: TileBatch, cache: Cache) -> tuple[jax.Array, Cache]:
            return model.tile_step(params, batch, cache, options)

        def decode(params: Any, batch: DecodeBatch, cache: Cache) -> tuple[jax.Array, Cache]:
            return model.decode_step(params, batch, cache, options)

        self._tile = jax.jit(tile, donate_argnames="cache")
        self._decode = jax.jit(decode, donate_argnames="cache")
        self._admit = jax.jit(admit, donate_argnames="cache")
        self._write_snapshot = jax.jit(write_snapshot, donate_argnames="snapshots")
        self._read_blocks = jax.jit(take_blocks)
        self._write_blocks = jax.jit(put_blocks, donate_argnames="cache")
        self._read_snapshot = jax.jit(take_snapshot)
        self._store_snapshot = jax.jit(put_snapshot, donate_argnames="snapshots")
        self._read_state = jax.jit(gather_state)
        self._write_state = jax.jit(scatter_state, donate_argnames="cache")

    def tile(self, batch: TileBatch, cache: Cache) -> tuple[jax.Array, Cache]:
        """One tile of prompt tokens of each lane. DONATES cache.

        Raises:
          DonatedCacheError: ``cache`` went into an earlier step.
        """
        _check_alive(cache, "tile")
        return self._tile(self.model.params, batch, cache)

    def lower_tile(self, batch: TileBatch, cache: Any) -> str:
        """The tile step's lowered text for ``cache``, which may be abstract."""
        return self._tile.lower(self.model.params, batch, cache).as_text()

    def decode(self, batch: DecodeBatch, cache: Cache) -> tuple[jax.Array, Cache]:
        """One token of each active slot. DONATES cache.

        Raises:
          DonatedCacheError: ``cache`` went into an earlier step.
        """
        _check_alive(cache, "decode")
        return self._decode(self.model.params, batch, cache)

    def admit(
        self,
        cache: Cache,
        snapshots: Snapshots,
        *,
        slot: int,
        table: np.ndarray,
        length: int,
        place: int,
    ) -> Cache:
        """Seats a sequence; see ``hybridkv.state.snapshot.admit``. DONATES cache.

        Args:
          cache: the cache.
          snapshots: the pool to read from.
          slot: seat of the sequence.
          table: int32 ``[blocks_per_sequence]``, its block table.
          length: tokens that count as consumed.
          place: snapshot to read, or past the pool for none.

        Raises:
          DonatedCacheError: ``cache`` went into an earlier step.
          ValueError: ``slot`` or ``table`` do not fit the cache.
        """
        _check_alive(cache, "admit")
        slots, width = cache.block_table.shape
        if not 0 <= slot <= slots or table.shape != (width,):
            raise ValueError(f"slot {slot} of {slots}, table {table.shape} of ({width},)")
        return self._admit(
            cache, snapshots, _scalar(slot), jax.device_put(table), _scalar(length), _scalar(place)
        )

    def write_snapshot(
        self, snapshots: Snapshots, cache: Cache, *, slot: int, place: int
    ) -> Snapshots:
        """Stores a slot's state, which stands at a tile boundary. DONATES snapshots."""
        _check_alive(cache, "write_snapshot")
        return self._write_snapshot(snapshots, cache, _scalar(slot), _scalar(place))

    def read_blocks(self, cache: Cache, places: np.ndarray) -> BlockWords:
        """Copies blocks out of the cache.

        Args:
          cache: the cache.
          places: int32 ``[MOVED_BLOCKS]``; those past the pool give something finite.

        Returns:
          For each place uint32 ``[words]``; see ``hybridkv.state.packing``.
        """
        _check_alive(cache, "read_blocks")
        return self._read_blocks(cache, jax.device_put(_places(places)))

    def write_blocks(self, cache: Cache, blocks: BlockWords, places: np.ndarray) -> Cache:
        """Writes what ``read_blocks`` gave; places past the pool are skipped. DONATES cache."""
        _check_alive(cache, "write_blocks")
        return self._write_blocks(cache, tuple(blocks), jax.device_put(_places(places)))

    def read_snapshot(self, snapshots: Snapshots, place: int) -> jax.Array:
        """Copies a snapshot out of the pool: uint32 ``[words]``."""
        return self._read_snapshot(snapshots, _scalar(place))

    def store_snapshot(self, snapshots: Snapshots, words: jax.Array, place: int) -> Snapshots:
        """Writes what ``read_snapshot`` gave; past the pool to nowhere. DONATES snapshots."""
        return self._store_snapshot(snapshots, words, _scalar(place))

    def read_state(self, cache: Cache, slot: int) -> SequenceState:
        """Copies a slot's state, open cells included."""
        _check_alive(cache, "read_state")
        return self._read_state(cache, _scalar(slot))

    def write_state(
        self, cache: Cache, state: SequenceState, *, slot: int, table: np.ndarray, length: int
    ) -> Cache:
        """Seats a sequence with a state from ``read_state``. DONATES cache.

        Args:
          cache: the cache.
          state: of the sequence, at ``length`` tokens.
          slot: its seat.
          table: int32 ``[blocks_per_sequence]``.
          length: tokens that are consumed.
        """
        _check_alive(cache, "write_state")
        return self._write_state(
            cache, state, _scalar(slot), jax.device_put(table), _scalar(length)
        )

    def warm_up_moves(self, cache: Cache) -> Cache:
        """Compiles the moves of blocks and states by moving nothing. DONATES cache.

        What is written comes from the host, as it does when a parked sequence returns.
        """
        nowhere = np.full(MOVED_BLOCKS, NOWHERE, np.int32)
        blocks = jax.device_get(self.read_blocks(cache, nowhere))
        cache = self.write_blocks(cache, to_device(blocks), nowhere)
        state = jax.device_get(self.read_state(cache, cache.slots))
        table = np.zeros(cache.block_table.shape[1], np.int32)
        return self.write_state(cache, to_device(state), slot=cache.slots, table=table, length=0)

    def warm_up(self, cache: Cache) -> Cache:
        """Compiles both steps by running them idle; contents stay as they are. DONATES cache."""
        _, cache = self.tile(idle_tile(self.options, cache.slots), cache)
        _, cache = self.decode(idle_decode(cache.slots), cache)
        return cache

    def warm_up_snapshots(self, cache: Cache, snapshots: Snapshots) -> tuple[Cache, Snapshots]:
        """Compiles the moves of snapshots by moving nothing. DONATES both."""
        nowhere = np.zeros(cache.block_table.shape[1], np.int32)
        past = max((x.shape[0] for x in jax.tree.leaves(snapshots)), default=0)
        snapshots = self.write_snapshot(snapshots, cache, slot=0, place=past)
        words = jax.device_get(self.read_snapshot(snapshots, past))
        snapshots = self.store_snapshot(snapshots, to_device(words), past)
        cache = self.admit(cache, snapshots, slot=cache.slots, table=nowhere, length=0, place=past)
        return cache, snapshots


def to_device(tree: Any) -> Any:
    """Host arrays committed to the default device, as every write of a step takes them."""
    here = leaf.placement()
    return jax.tree.map(lambda x: jax.device_put(x, here), tree)


def in_moves(places: np.ndarray) -> np.ndarray:
    """Places by as many as move at once, int32 ``[moves, MOVED_BLOCKS]``.

    What fills up the last move is past every pool: it reads something finite and writes nothing.
    """
    padded = np.full(cdiv(len(places), MOVED_BLOCKS) * MOVED_BLOCKS, NOWHERE, np.int32)
    padded[: len(places)] = places
    return padded.reshape(-1, MOVED_BLOCKS)


def _places(places: np.ndarray) -> np.ndarray:
    if places.shape != (MOVED_BLOCKS,):
        raise ValueError(f"places have shape {places.shape}: {MOVED_BLOCKS} blocks move at once")
    return places.astype(np.int32)


def _scalar(value: int) -> jax.Array:
    return jax.device_put(np.int32(value))


def _check_alive(cache: Cache, step: str) -> None:
    if cache.lengths.is_deleted():
        raise DonatedCacheError(
            f"this cache was donated to an earlier step: write "
            f"`logits, cache = steps.{step}(batch, cache)` and use the cache that comes back"
        )


def idle_tile(options: StepOptions, slots: int) -> TileBatch:
    """A tile batch without an active lane."""
    zeros = jnp.zeros((options.lanes,), jnp.int32)
    return TileBatch(
        tokens=jnp.zeros((options.lanes, options.tile), jnp.int32),
        slots=jnp.full((options.lanes,), slots, jnp.int32),
        starts=zeros,
        ends=zeros,
        known_from=zeros,
        write_from=zeros,
    )


def idle_decode(slots: int) -> DecodeBatch:
    """A decode batch without an active slot."""
    return DecodeBatch(tokens=jnp.zeros((slots,), jnp.int32), active=jnp.zeros((slots,), bool))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaneTile:
    """What one lane of a tile step computes."""

    tokens: np.ndarray
    """Integer ``[n]``, at most a tile."""
    slot: int
    start: int
    """Position of the first of them."""
    known_from: int = 0
    """See ``TileBatch.known_from``."""
    write_from: int = 0
    """See ``TileBatch.write_from``."""


def tile_batch(lanes: Sequence[LaneTile], options: StepOptions, slots: int) -> TileBatch:
    """The batch of one tile step; lanes beyond those given are idle.

    Args:
      lanes: of different slots, at most ``options.lanes``.
      options: lanes and tile.
      slots: number of slots, which marks the idle lanes.

    Raises:
      ValueError: too many lanes or tokens, or a start that is not a tile boundary.
    """
    if len(lanes) > options.lanes:
        raise ValueError(f"{len(lanes)} lanes do not fit {options.lanes}")
    tokens = np.zeros((options.lanes, options.tile), np.int32)
    columns = np.zeros((5, options.lanes), np.int32)
    columns[0] = slots
    for number, lane in enumerate(lanes):
        if lane.start % options.tile:
            raise ValueError(f"start {lane.start} is not a multiple of the tile, {options.tile}")
        tokens[number, : len(lane.tokens)] = lane.tokens
        end = lane.start + len(lane.tokens)
        columns[:, number] = (lane.slot, lane.start, end, lane.known_from, lane.write_from)
    names = ("slots", "starts", "ends", "known_from", "write_from")
    # device_put, because jnp.asarray compiles once a shape.
    parts = {name: jax.device_put(column) for name, column in zip(names, columns, strict=True)}
    return TileBatch(tokens=jax.device_put(tokens), **parts)


def prompt_tiles(
    tokens: np.ndarray,
    slot: int,
    options: StepOptions,
    slots: int,
    *,
    start: int = 0,
    known_from: int = 0,
    write_from: int = 0,
) -> list[TileBatch]:
    """The tile batches that consume one prompt from ``start``, one lane each.

    Args:
      tokens: int32 ``[prompt]``, the whole prompt.
      slot: where its sequence lives, of ``slots``.
      options: lanes and tile.
      slots: number of slots, which marks the idle lanes.
      start: first position to compute, a multiple of the tile.
      known_from: ``start`` for a replay, which knows no earlier window rows; else 0.
      write_from: rows of cells that end at or before it are stored already.
    """
    if start % options.tile:
        raise ValueError(f"start {start} is not a multiple of the tile, {options.tile}")
    lanes = (
        LaneTile(
            tokens=tokens[first : first + options.tile],
            slot=slot,
            start=first,
            known_from=known_from,
            write_from=write_from,
        )
        for first in range(start, len(tokens), options.tile)
    )
    return [tile_batch((lane,), options, slots) for lane in lanes]
