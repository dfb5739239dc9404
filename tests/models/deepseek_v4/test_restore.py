"""A sequence state copied or recomputed gives the bits of a run that never stopped."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import decode, digest, empty_cache, prompt, toy_options, toy_runtime

from hybridkv.engine.steps import Steps, prompt_tiles
from hybridkv.prefixes.needs import replay_start
from hybridkv.state.snapshot import Snapshots

TILE, TOKENS = 16, 150
IDS = prompt(TOKENS, seed=3)
AFTER = prompt(20, seed=4)
BOUNDARIES = range(TILE, TOKENS, TILE)
TABLE = np.arange(12, dtype=np.int32)


class Restoring:
    """One slot, a pool of snapshots, and the digests of a cold run."""

    def __init__(self) -> None:
        self.steps = Steps(toy_runtime(), toy_options(tile=TILE))
        geometry = self.steps.model.geometry
        cache = self.steps.warm_up(empty_cache(self.steps, tokens=192))
        snapshots = Snapshots.init(geometry, len(BOUNDARIES))
        self.cache, self.snapshots = self.steps.warm_up_snapshots(cache, snapshots)
        self.cold = self.run(0, stored=0, known_from=0)
        for place, position in enumerate(BOUNDARIES):
            self.seat(0, place=len(BOUNDARIES))
            self.tiles(0, position, known_from=0, stored=0)
            self.snapshots = self.steps.write_snapshot(
                self.snapshots, self.cache, slot=0, place=place
            )
        self.tiles(position, TOKENS, known_from=0, stored=position)

    def seat(self, length: int, place: int) -> None:
        self.cache = self.steps.admit(
            self.cache, self.snapshots, slot=0, table=TABLE, length=length, place=place
        )

    def tiles(self, start: int, end: int, *, known_from: int, stored: int) -> list[str]:
        digests = []
        for batch in prompt_tiles(
            IDS[:end],
            0,
            self.steps.options,
            1,
            start=start,
            known_from=known_from,
            write_from=stored,
        ):
            logits, self.cache = self.steps.tile(batch, self.cache)
            digests.append(digest(logits[0, : int(batch.ends[0] - batch.starts[0])]))
        return digests

    def run(self, start: int, *, stored: int, known_from: int, place: int | None = None):
        """Digests of every tile from ``start``, and of the tokens decoded after them."""
        self.seat(start, place=len(BOUNDARIES) if place is None else place)
        digests = self.tiles(start, TOKENS, known_from=known_from, stored=stored)
        logits, self.cache = decode(self.steps, self.cache, AFTER)
        return digests, digest(logits)

    def forget_the_slot(self) -> None:
        """NaN in everything that belongs to the slot alone."""
        state = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), self.cache.sequence)
        self.cache = dataclasses.replace(self.cache, sequence=state)


@pytest.fixture(scope="module")
def restoring():
    return Restoring()


@pytest.mark.parametrize("position", BOUNDARIES)
def test_a_copied_state_continues_with_the_same_bits(restoring, position):
    restoring.forget_the_slot()
    place = list(BOUNDARIES).index(position)
    tiles, after = restoring.run(position, stored=position, known_from=0, place=place)
    assert tiles == restoring.cold[0][position // TILE :]
    assert after == restoring.cold[1]


@pytest.mark.parametrize("position", BOUNDARIES)
def test_a_replayed_state_continues_with_the_same_bits(restoring, position):
    restoring.forget_the_slot()
    start = replay_start(restoring.steps.model.geometry, position, TILE)
    tiles, after = restoring.run(start, stored=position, known_from=start)
    assert tiles[(position - start) // TILE :] == restoring.cold[0][position // TILE :]
    assert after == restoring.cold[1]


def test_a_replay_that_starts_too_late_changes_the_bits(restoring):
    position = 96
    start = replay_start(restoring.steps.model.geometry, position, TILE) + TILE
    tiles, _ = restoring.run(start, stored=position, known_from=start)
    assert tiles[(position - start) // TILE :] != restoring.cold[0][position // TILE :]


def test_a_replay_writes_none_of_the_stored_rows(restoring):
    """Rows of other bytes would stay: not even the row that ends at ``write_from`` is written."""
    marked = jax.tree.map(
        lambda x: jnp.full_like(x, 0.125), (restoring.cache.compressed, restoring.cache.indexer)
    )
    restoring.cache = dataclasses.replace(restoring.cache, compressed=marked[0], indexer=marked[1])
    restoring.seat(48, place=len(BOUNDARIES))
    restoring.tiles(48, 112, known_from=48, stored=96)
    block = restoring.steps.model.geometry.block_tokens
    first = 96 // block
    for pool in jax.tree.leaves((restoring.cache.compressed, restoring.cache.indexer)):
        assert (np.asarray(pool[TABLE[:first]]) == 0.125).all()
        assert (np.asarray(pool[TABLE[first]]) != 0.125).all(axis=-1).all()
    restoring.run(0, stored=0, known_from=0)


def test_a_snapshot_past_the_pool_is_neither_written_nor_read(restoring):
    before = jax.tree.map(np.asarray, restoring.snapshots)
    restoring.snapshots = restoring.steps.write_snapshot(
        restoring.snapshots, restoring.cache, slot=0, place=len(BOUNDARIES)
    )
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), before, restoring.snapshots)
    assert all(jax.tree.leaves(same))
    state = jax.tree.map(np.asarray, restoring.cache.sequence)
    restoring.seat(0, place=len(BOUNDARIES))
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), state, restoring.cache.sequence)
    assert all(jax.tree.leaves(same))


def test_a_seat_that_does_not_exist_is_refused(restoring):
    with pytest.raises(ValueError, match="slot 2 of 1"):
        restoring.steps.admit(
            restoring.cache, restoring.snapshots, slot=2, table=TABLE, length=0, place=0
        )
