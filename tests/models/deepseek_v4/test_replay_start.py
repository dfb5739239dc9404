"""What a tile step is told of a replay holds for every row, also where no restored logit shows it.

The cone of a replay hides much of this: its first tokens are inexact anyway. Here single steps are
looked at, so that each of the defences is seen to work alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import TOY, digest, empty_cache, prompt, toy_options, toy_runtime

from hybridkv.engine.steps import Steps, prompt_tiles
from hybridkv.state.cache import Cache

TILE, START = 16, 48
IDS = prompt(START + TILE, seed=6)


@pytest.fixture(scope="module")
def steps():
    return Steps(toy_runtime(), toy_options(tile=TILE))


def filled(steps: Steps, *, state: float = 0.0, rows: float = 0.0) -> Cache:
    """A cache that holds ``state`` in everything of its slot and ``rows`` in every block."""
    cache = empty_cache(steps, tokens=96)

    def fill(tree, value):
        return jax.tree.map(lambda x: jnp.full_like(x, value), tree)

    return dataclasses.replace(
        cache,
        sequence=fill(cache.sequence, state),
        compressed=fill(cache.compressed, rows),
        indexer=fill(cache.indexer, rows),
    )


def step(steps, cache, ids, *, start, **told):
    """Logits and cache after the one tile of ``ids`` that begins at ``start``."""
    (batch,) = prompt_tiles(ids, 0, steps.options, 1, start=start, **told)
    logits, cache = steps.tile(batch, cache)
    return np.asarray(logits[0, : len(ids) - start]), cache


def bits(tree) -> list[str]:
    return [digest(leaf) for leaf in jax.tree.leaves(tree)]


def test_what_the_slot_held_before_a_replay_leaves_no_trace(steps):
    """Neither in logits nor in rows, nor in what the tile adds to the rings. (Rings keep what they
    held from before, which nobody sees, and the first cell's row is not written.)
    """
    told = {"start": START, "known_from": START, "write_from": START + 4}
    (one, cache_one), (two, cache_two) = (
        step(steps, filled(steps, state=held), IDS[: START + 4], **told) for held in (0.0, 3.0)
    )
    assert digest(one) == digest(two)
    assert bits(cache_one.compressed) == bits(cache_two.compressed)
    assert bits(cache_one.indexer) == bits(cache_two.indexer)
    new = np.arange(START, START + 4) % TOY.window
    for ours, theirs in zip(
        jax.tree.leaves(cache_one.sequence.window),
        jax.tree.leaves(cache_two.sequence.window),
        strict=True,
    ):
        assert digest(np.asarray(ours)[0, new]) == digest(np.asarray(theirs)[0, new])


@pytest.mark.parametrize(("write_from", "written"), [(64, 0), (60, 1), (56, 2), (48, 4)])
def test_a_cell_that_ends_at_write_from_keeps_bytes_that_no_step_would_make(
    steps, write_from, written
):
    """A replay that wrote what is stored already would write the same bits: here they differ."""
    _, cache = step(
        steps,
        filled(steps, rows=7.0),
        IDS,
        start=START,
        known_from=START,
        write_from=write_from,
    )
    for pool in jax.tree.leaves((cache.compressed, cache.indexer)):
        rows = np.asarray(pool)
        changed = int((rows.reshape(-1, rows.shape[-1]) != 7.0).any(axis=-1).sum())
        fine = rows.shape[1] == TILE // 4
        assert changed == (written if fine else int(write_from < START + TILE))
