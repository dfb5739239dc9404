"""Law 1 in the tests' hands: one sequence in other surroundings, as digests of its logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from toy import decode, digest, empty_cache, prefill, prompt

from hybridkv.engine.steps import Steps, prompt_tiles
from hybridkv.state.batch import DecodeBatch, TileBatch
from hybridkv.state.cache import Cache


def run(steps: Steps, cache: Cache, ids: np.ndarray, new: np.ndarray) -> tuple[str, str]:
    """Digests of a prompt's logits and of those of the tokens decoded after it."""
    logits, cache = prefill(steps, cache, ids)
    after, _ = decode(steps, cache, new)
    assert np.isfinite(logits).all()
    assert np.isfinite(after).all()
    return digest(logits), digest(after)


def shuffled(cache: Cache) -> Cache:
    """The cache of one sequence, whose blocks stand in another order."""
    order = np.random.default_rng(0).permutation(cache.block_table.shape[1]).astype(np.int32)
    return dataclasses.replace(cache, block_table=jnp.asarray(order[None]))


def lane_batch(lanes: int, active: dict[int, tuple[np.ndarray, int]], tile: int) -> TileBatch:
    """One tile for each lane: lane -> (its prompt, its tile number); lane and slot are the same."""
    arrays = {name: np.zeros(lanes, np.int32) for name in ("starts", "ends", "known_from")}
    arrays |= {"slots": np.full(lanes, lanes, np.int32), "write_from": np.zeros(lanes, np.int32)}
    tokens = np.full((lanes, tile), 7, np.int32)
    for lane, (ids, number) in active.items():
        part = ids[number * tile : (number + 1) * tile]
        tokens[lane, : len(part)] = part
        arrays["slots"][lane], arrays["starts"][lane] = lane, number * tile
        arrays["ends"][lane] = number * tile + len(part)
    return TileBatch(tokens=jnp.asarray(tokens), **jax.tree.map(jnp.asarray, arrays))


def beside(
    steps: Steps, lane: int, others: dict[int, np.ndarray], ids: np.ndarray, new: np.ndarray
) -> str:
    """A digest of a sequence's logits in ``lane``, while ``others`` are computed in theirs."""
    lanes, tile = steps.options.lanes, steps.options.tile
    cache, mine = empty_cache(steps, slots=lanes), []
    tiles = -(-len(ids) // tile)
    for number in range(tiles):
        active = {k: (other, number) for k, other in others.items() if len(other) > number * tile}
        out, cache = steps.tile(lane_batch(lanes, active | {lane: (ids, number)}, tile), cache)
        mine.append(np.asarray(out[lane]))
    for i, token in enumerate(new):
        tokens = jnp.full((lanes,), i, jnp.int32).at[lane].set(int(token))
        active_slots = jnp.asarray([k == lane or k in others for k in range(lanes)])
        out, cache = steps.decode(DecodeBatch(tokens=tokens, active=active_slots), cache)
        mine.append(np.asarray(out[lane])[None])
    logits = np.concatenate(mine)
    assert np.isfinite(logits).all()
    return digest(logits[: len(ids)]) + digest(logits[tiles * tile :])


def check_neighbours(steps: Steps, ids: np.ndarray, new: np.ndarray) -> None:
    """Neither the lane, of three, nor what others compute changes a bit."""
    expected = beside(steps, 0, {}, ids, new)
    assert beside(steps, 0, {1: prompt(96, 5), 2: prompt(90, 6)}, ids, new) == expected
    assert beside(steps, 1, {0: prompt(96, 7), 2: prompt(3, 8)}, ids, new) == expected
    assert beside(steps, 2, {0: prompt(70, 9), 1: prompt(95, 10)}, ids, new) == expected


def check_idle_slot(steps: Steps, ids: np.ndarray, new: np.ndarray) -> None:
    """Slot 1 of two keeps every byte of its blocks and of its state while slot 0 computes."""
    _, cache = prefill(steps, empty_cache(steps, slots=2), prompt(37, 3), slot=1)
    blocks = np.asarray(cache.block_table[1])

    def held(cache: Cache) -> list[np.ndarray]:
        pools = [np.asarray(pool)[blocks] for pool in jax.tree.leaves(cache.compressed)]
        return pools + [np.asarray(state)[1] for state in jax.tree.leaves(cache.sequence)]

    before = held(cache)
    assert before
    _, cache = prefill(steps, cache, ids, slot=0)
    _, cache = decode(steps, cache, new, slot=0)
    for old, now in zip(before, held(cache), strict=True):
        np.testing.assert_array_equal(now, old)


def check_stored_rows(steps: Steps, ids: np.ndarray, stored: int, vocab: int) -> None:
    """A different prompt, so that a write would show; it reads the ``stored`` rows."""
    _, cache = prefill(steps, empty_cache(steps), ids)
    before = [np.asarray(pool).reshape(128, -1) for pool in cache.compressed.layers]
    other = (ids + 1) % vocab
    for batch in prompt_tiles(other, 0, steps.options, 1, write_from=stored):
        _, cache = steps.tile(batch, cache)
    for old, pool in zip(before, cache.compressed.layers, strict=True):
        new = np.asarray(pool).reshape(128, -1)
        np.testing.assert_array_equal(new[:stored], old[:stored])
        assert (new[stored : len(ids)] != old[stored : len(ids)]).any(axis=1).all()
        np.testing.assert_array_equal(new[len(ids) :], 0.0)
