"""The jitted executables: one tile step and one decode step, compiled once.

    params, batch, cache --tile-->   logits, cache'      (cache is DONATED: use cache')
    params, batch, cache --decode--> logits, cache'

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

    def tile(self, batch: TileBatch, cache: Cache) -> tuple[jax.Array, Cache]:
        """One tile of prompt tokens of each lane. DONATES cache.

        Raises:
          DonatedCacheError: ``cache`` went into an earlier step.
        """
        _check_alive(cache, "tile")
        return self._tile(self.model.params, batch, cache)

    def decode(self, batch: DecodeBatch, cache: Cache) -> tuple[jax.Array, Cache]:
        """One token of each active slot. DONATES cache.

        Raises:
          DonatedCacheError: ``cache`` went into an earlier step.
        """
        _check_alive(cache, "decode")
        return self._decode(self.model.params, batch, cache)

    def warm_up(self, cache: Cache) -> Cache:
        """Compiles both steps by running them idle; contents stay as they are. DONATES cache."""
        _, cache = self.tile(idle_tile(self.options, cache.slots), cache)
        _, cache = self.decode(idle_decode(cache.slots), cache)
        return cache


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
    )


def idle_decode(slots: int) -> DecodeBatch:
    """A decode batch without an active slot."""
    return DecodeBatch(tokens=jnp.zeros((slots,), jnp.int32), active=jnp.zeros((slots,), bool))


def prompt_tiles(
    tokens: np.ndarray, slot: int, options: StepOptions, slots: int, start: int = 0
) -> list[TileBatch]:
    """The tile batches that consume one prompt from ``start``, one lane each.

    Args:
      tokens: int32 ``[prompt]``, the whole prompt.
      slot: where its sequence lives, of ``slots``.
      options: lanes and tile.
      slots: number of slots, which marks the idle lanes.
      start: first position to compute, a multiple of the tile.
    """
    if start % options.tile:
        raise ValueError(f"start {start} is not a multiple of the tile, {options.tile}")
    batches = []
    for first in range(start, len(tokens), options.tile):
        part = tokens[first : first + options.tile]
        padded = np.zeros((options.lanes, options.tile), np.int32)
        padded[0, : len(part)] = part
        at = np.full((options.lanes,), slots, np.int32)
        starts, ends = np.zeros_like(at), np.zeros_like(at)
        at[0], starts[0], ends[0] = slot, first, first + len(part)
        batches.append(
            TileBatch(
                tokens=jax.device_put(padded),  # jnp.asarray compiles once a shape
                slots=jax.device_put(at),
                starts=jax.device_put(starts),
                ends=jax.device_put(ends),
            )
        )
    return batches
