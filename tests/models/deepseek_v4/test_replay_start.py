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
    """Of four tokens: rings keep rows from before the start, and the first cell is written."""
    seen = []
    for held in (0.0, 3.0):
        logits, cache = step(
            steps,
            filled(steps, state=held),
            IDS[: START + 4],
            start=START,
            known_from=START,
            write_from=START,
        )
        seen.append((logits, cache))
    (one, cache_one), (two, cache_two) = seen
    assert bits(cache_one.sequence.window) == bits(cache_two.sequence.window)
    assert bits(cache_one.compressed) == bits(cache_two.compressed)
    assert bits(cache_one.indexer) == bits(cache_two.indexer)
    assert digest(one) == digest(two)


def test_attention_does_not_see_rows_from_before_a_replay(steps):
    """The lowest layer has windows only, and what it sees depends on distances: a replay that
    starts at 48 feeds the layer above as a prompt that starts at 0 does. A row of zeros that is
    seen in an unknown one's place takes a share of the softmax.
    """
    ids, plain = IDS[START : START + 4], TOY.head_dim - TOY.rope_dim
    padded = np.concatenate([np.zeros(START, np.int32), ids])
    _, replayed = step(
        steps, filled(steps), padded, start=START, known_from=START, write_from=START
    )
    _, fresh = step(steps, filled(steps), ids, start=0, known_from=0, write_from=0)
    assert START % TOY.window == 0
    ours, theirs = (
        np.asarray(cache.sequence.window.layers[1])[0, : len(ids), :plain]
        for cache in (replayed, fresh)
    )
    assert np.abs(theirs).min() > 0
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


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
