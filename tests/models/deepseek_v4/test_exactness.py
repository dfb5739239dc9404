"""Law 1: a token's logits are the same bits whatever stands beside, before or behind it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import decode, digest, empty_cache, prefill, prompt, toy_options, toy_runtime

from hybridkv import formats
from hybridkv.engine.steps import Steps
from hybridkv.state.batch import DecodeBatch, TileBatch
from hybridkv.state.cache import Cache

IDS = prompt(75)
NEW = prompt(40, seed=1)


@pytest.fixture(scope="module")
def runtime():
    return toy_runtime()


@pytest.fixture(scope="module")
def alone(runtime):
    return Steps(runtime, toy_options())


@pytest.fixture(scope="module")
def reference(alone):
    """Digests of prompt and decode logits of one sequence alone in a small cache."""
    logits, cache = prefill(alone, empty_cache(alone), IDS)
    after, _ = decode(alone, cache, NEW)
    assert np.isfinite(logits).all()
    assert np.isfinite(after).all()
    return digest(logits), digest(after)


def run(steps: Steps, cache: Cache) -> tuple[str, str]:
    logits, cache = prefill(steps, cache, IDS)
    return digest(logits), digest(decode(steps, cache, NEW)[0])


def test_a_second_run_gives_the_same_bits(alone, reference):
    assert run(alone, empty_cache(alone)) == reference


@pytest.mark.parametrize("tokens", [115, 2048])
def test_capacity_changes_no_bit(alone, reference, tokens):
    assert run(alone, empty_cache(alone, tokens=tokens)) == reference


def test_order_of_blocks_changes_no_bit(alone, reference):
    cache = empty_cache(alone, tokens=256)
    shuffled = np.random.default_rng(0).permutation(cache.block_table.shape[1]).astype(np.int32)
    cache = dataclasses.replace(cache, block_table=jnp.asarray(shuffled[None]))
    assert run(alone, cache) == reference


def _poison(cache: Cache, length: int) -> Cache:
    """NaN in every byte that a sequence of ``length`` tokens in slot 0 does not own."""
    geometry = cache.geometry

    def rows(pool: jax.Array, ratio: int) -> jax.Array:
        flat = pool.reshape(-1, pool.shape[-1])  # blocks stand in order
        used = jnp.arange(flat.shape[0]) < length // ratio
        return jnp.where(used[:, None], flat, jnp.nan).reshape(pool.shape)

    def ring(window: jax.Array) -> jax.Array:
        size = window.shape[1]
        kept = {p % size for p in range(max(length - size + 1, 0), length)}
        used = jnp.asarray([place in kept for place in range(size)])
        mine = jnp.arange(window.shape[0]) == 0
        return jnp.where((mine[:, None] & used[None, :])[..., None], window, jnp.nan)

    def tail(state, ratio):
        if state is None:
            return None
        open_rows = (jnp.arange(ratio) < length % ratio)[None, :, None]
        changes = {n: jnp.where(open_rows, getattr(state, n), jnp.nan) for n in ("kv", "gate")}
        if state.earlier_kv is not None and length < ratio:
            for name in ("earlier_kv", "earlier_gate"):
                changes[name] = jnp.full_like(getattr(state, name), jnp.nan)
        return dataclasses.replace(state, **changes)

    layers = []
    for number, layer in enumerate(geometry.layers):
        own = cache.layer(number)
        layers.append(
            dataclasses.replace(
                own,
                rows=None if own.rows is None else rows(own.rows, layer.ratio),
                index=None if own.index is None else rows(own.index, layer.ratio),
                window=ring(own.window),
                tail=tail(own.tail, layer.ratio),
                index_tail=tail(own.index_tail, layer.ratio),
            )
        )
    return cache.with_layers(tuple(layers), cache.lengths)


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 7, 16, 31, 32])
def test_nan_in_every_unused_byte_changes_no_bit(alone, reference, cut):
    """Poisoned before the prompt, inside it (tile boundaries) and before each decode step."""
    cache = _poison(empty_cache(alone, tokens=256), 0)
    logits, cache = prefill(alone, cache, IDS)
    assert digest(logits) == reference[0]
    rows, length = [], len(IDS)
    for i, token in enumerate(NEW):
        if i >= cut:
            cache = _poison(cache, length + i)
        row, cache = decode(alone, cache, np.asarray([token]))
        rows.append(row[0])
    assert digest(np.stack(rows)) == reference[1]


def test_where_a_prompt_ends_changes_no_earlier_bit(alone):
    whole, _ = prefill(alone, empty_cache(alone), IDS)
    for end in (1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 47, 64, 74):
        part, _ = prefill(alone, empty_cache(alone), IDS[:end])
        assert digest(part) == digest(whole[:end]), end


def test_decoding_tokens_then_prompting_the_rest_stays_close(alone):
    """Two executables need not give the same bits, but must compute the same function."""
    whole, _ = prefill(alone, empty_cache(alone), IDS)
    for start in (1, 15, 16, 17, 40):
        logits, cache = prefill(alone, empty_cache(alone), IDS[:start])
        after, _ = decode(alone, cache, IDS[start:])
        np.testing.assert_allclose(
            np.concatenate([logits, after]), whole, atol=2e-5, rtol=1e-5, err_msg=str(start)
        )


def _lane_batch(lanes: int, slots: int, active: dict[int, tuple[np.ndarray, int]], tile: int):
    """One tile for each lane: lane -> (its prompt, its tile number)."""
    tokens = np.full((lanes, tile), 7, np.int32)
    at = np.full((lanes,), slots, np.int32)
    starts, ends = np.zeros(lanes, np.int32), np.zeros(lanes, np.int32)
    for lane, (ids, number) in active.items():
        part = ids[number * tile : (number + 1) * tile]
        tokens[lane, : len(part)] = part
        at[lane], starts[lane], ends[lane] = lane, number * tile, number * tile + len(part)
    names = ("tokens", "slots", "starts", "ends", "known_from", "write_from")
    zeros = np.zeros_like(starts)
    arrays = (jnp.asarray(x) for x in (tokens, at, starts, ends, zeros, zeros))
    return TileBatch(**dict(zip(names, arrays, strict=True)))


@pytest.mark.parametrize("sequential", [True, False], ids=["sequential", "batched"])
def test_lane_and_neighbours_change_no_bit(runtime, sequential):
    lanes = 3
    steps = Steps(runtime, toy_options(lanes=lanes, sequential=sequential))
    tile = steps.options.tile

    def logits_of(lane: int, others: dict[int, np.ndarray]) -> str:
        cache = empty_cache(steps, slots=lanes)
        mine = []
        for number in range(3):
            active = {k: (ids, number) for k, ids in others.items() if len(ids) > number * tile}
            batch = _lane_batch(lanes, lanes, active | {lane: (IDS, number)}, tile)
            out, cache = steps.tile(batch, cache)
            mine.append(np.asarray(out[lane]))
        after = []
        for i, token in enumerate(NEW[:20]):
            tokens = jnp.full((lanes,), i, jnp.int32).at[lane].set(int(token))
            active_slots = jnp.asarray([k == lane or k in others for k in range(lanes)])
            out, cache = steps.decode(DecodeBatch(tokens=tokens, active=active_slots), cache)
            after.append(np.asarray(out[lane]))
        return digest(np.concatenate(mine)[: len(IDS)]) + digest(np.stack(after))

    expected = logits_of(0, {})
    assert logits_of(0, {1: prompt(96, 5), 2: prompt(90, 6)}) == expected
    assert logits_of(1, {0: prompt(96, 7), 2: prompt(70, 8)}) == expected
    assert logits_of(2, {0: prompt(70, 9), 1: prompt(95, 10)}) == expected


def test_idle_slots_keep_every_byte(runtime):
    steps = Steps(runtime, toy_options())
    cache = empty_cache(steps, slots=2)
    _, cache = prefill(steps, cache, prompt(37, 3), slot=1)
    before = jax.tree.map(np.asarray, cache.sequence)
    blocks = np.asarray(cache.block_table[1])
    pools = [np.asarray(x)[blocks] for x in cache.compressed.layers if x is not None]
    _, cache = prefill(steps, cache, IDS, slot=0)
    _, cache = decode(steps, cache, NEW, slot=0)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(cache.sequence), strict=True):
        np.testing.assert_array_equal(old[1], np.asarray(new)[1])
    for old, new in zip(pools, (x for x in cache.compressed.layers if x is not None), strict=True):
        np.testing.assert_array_equal(old, np.asarray(new)[blocks])


def test_bfloat16_rows_are_exact_too():
    """A rounded cache is another model, but as exact a one."""
    steps = Steps(toy_runtime(formats.BFLOAT16), toy_options())
    runs = [run(steps, empty_cache(steps, tokens=tokens)) for tokens in (115, 512)]
    assert runs[0] == runs[1]
