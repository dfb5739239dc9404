"""The tokens of one step, the same for a tile step and a decode step."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from hybridkv.state.batch import DecodeBatch, TileBatch
from hybridkv.state.cache import Cache
from pallas_kernels.sequences import Active


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Consecutive tokens of ``n`` sequences, ``t`` each, as every layer sees them.

    A tile step has a sequence a lane and ``t = tile``; a decode step one a slot and ``t = 1``.
    A sequence may have fewer tokens than ``t``, none when it is idle: the rest is padding, of which
    nothing is stored and nothing is attended.
    """

    tokens: Int[Array, "n t"]
    """Token ids; 0 for padding."""
    positions: Int[Array, "n t"]
    """Position of each token; padding stands at its sequence's last one, so that a table of
    learned positions is never read past its end."""
    real: Bool[Array, "n t"]
    """Which tokens are not padding."""
    starts: Int[Array, " n"]
    """Position of the first token."""
    ends: Int[Array, " n"]
    """Position after the last token; ``starts`` for an idle sequence."""
    slots: Int[Array, " n"]
    """Where each sequence's state is written; the number of slots, and so nowhere, when idle."""
    table: Int[Array, "n blocks_per_sequence"]
    """Its block table."""
    known_from: Int[Array, " n"]
    """First position whose window rows exist; see ``TileBatch``."""
    write_from: Int[Array, " n"]
    """Rows of tokens before it are stored already and only read; see ``TileBatch``."""
    order: Int[Array, " n"]
    """Active sequences first."""
    every_slot: bool
    """Whether sequence ``i`` is that of slot ``i``, as in a decode step."""

    @classmethod
    def of_tile(cls, batch: TileBatch, cache: Cache) -> "Tokens":
        """The tokens of a tile step."""
        lanes, tile = batch.tokens.shape
        positions = batch.starts[:, None] + jnp.arange(tile, dtype=jnp.int32)[None, :]
        real = positions < batch.ends[:, None]
        return cls(
            tokens=jnp.where(real, batch.tokens, 0),
            positions=jnp.minimum(positions, jnp.maximum(batch.ends - 1, 0)[:, None]),
            real=real,
            starts=batch.starts,
            ends=batch.ends,
            slots=batch.slots,
            table=cache.block_table[jnp.minimum(batch.slots, cache.slots - 1)],
            known_from=batch.known_from,
            write_from=batch.write_from,
            order=jnp.arange(lanes, dtype=jnp.int32),
            every_slot=False,
        )

    @classmethod
    def of_decode(cls, batch: DecodeBatch, cache: Cache) -> "Tokens":
        """The tokens of a decode step: one after the last of every active slot."""
        numbers = jnp.arange(cache.slots, dtype=jnp.int32)
        nothing = jnp.zeros_like(cache.lengths)
        return cls(
            tokens=jnp.where(batch.active, batch.tokens, 0)[:, None],
            positions=jnp.where(batch.active, cache.lengths, 0)[:, None],
            real=batch.active[:, None],
            starts=cache.lengths,
            ends=cache.lengths + batch.active.astype(jnp.int32),
            slots=jnp.where(batch.active, numbers, cache.slots),
            table=cache.block_table,
            known_from=nothing,
            write_from=nothing,
            order=jnp.argsort(jnp.logical_not(batch.active), stable=True).astype(jnp.int32),
            every_slot=True,
        )

    @property
    def active(self) -> Active:
        """The sequences that have tokens."""
        return Active(self.order, jnp.sum((self.ends > self.starts).astype(jnp.int32)))

    @property
    def numbers(self) -> Int[Array, "n t"]:
        """Row of each token in its sequence; of padding too, which is past the last."""
        t = self.tokens.shape[1]
        return self.starts[:, None] + jnp.arange(t, dtype=jnp.int32)[None, :]

    def last(self, x: jax.Array) -> jax.Array:
        """Of ``x`` ``[n, t, channels]`` each sequence's last token, ``[n, channels]``."""
        at = jnp.maximum(self.ends - self.starts - 1, 0)[:, None, None]
        return jnp.take_along_axis(x, at, axis=1)[:, 0]

    def lengths(self, before: Int[Array, " slots"]) -> Int[Array, " slots"]:
        """The slots' lengths after this step."""
        return before.at[self.slots].set(self.ends, mode="drop")
