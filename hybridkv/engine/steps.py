"""The jitted executables, each compiled once.

    params, batch, cache --tile-->   logits, cache'      (cache is DONATED: use cache')
    params, batch, cache --decode--> logits, cache'
    cache, snapshots, slot, table, length, place --admit--> cache'
    snapshots, cache, slot, place --write_snapshot--> snapshots'    (snapshots are DONATED)

Whoever calls a step owns the cache; nothing else may hold on to it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybridkv.engine.protocol import StepModel
from hybridkv.errors import UserError
from hybridkv.state.batch import DecodeBatch, StepOptions, TileBatch
from hybridkv.state.cache import Cache
from hybridkv.state.snapshot import Snapshots, admit, write_snapshot


class DonatedCacheError(RuntimeError):
    """A cache was used after a step had taken it."""


class Steps:
    """Compiled steps of one model at one set of options."""

    def __init__(self, model: StepModel, options: StepOptions) -> None:
        block = model.geometry.block_tokens
        if options.tile % block:
            raise UserError(
                f"tile is {options.tile} tokens: use a multiple of the model's block, {block}"
            )
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
        cache = self.admit(cache, snapshots, slot=cache.slots, table=nowhere, length=0, place=past)
        return cache, snapshots


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
    return [
        _one_lane(tokens, slot, options, slots, first, known_from, write_from)
        for first in range(start, len(tokens), options.tile)
    ]


def _one_lane(
    tokens: np.ndarray,
    slot: int,
    options: StepOptions,
    slots: int,
    first: int,
    known_from: int,
    write_from: int,
) -> TileBatch:
    part = tokens[first : first + options.tile]
    padded = np.zeros((options.lanes, options.tile), np.int32)
    padded[0, : len(part)] = part

    def lanes(active: int, idle: int = 0) -> jax.Array:
        values = np.full((options.lanes,), idle, np.int32)
        values[0] = active
        return jax.device_put(values)  # jnp.asarray compiles once a shape

    return TileBatch(
        tokens=jax.device_put(padded),
        slots=lanes(slot, idle=slots),
        starts=lanes(first),
        ends=lanes(first + len(part)),
        known_from=lanes(known_from),
        write_from=lanes(write_from),
    )
