"""Law 1 for one attention kind: warm equals cold, whatever stands beside, before or behind."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import decode, digest, empty_cache, prefill, prompt
from toy_llama import llama_options, llama_runtime

from hybridkv import formats
from hybridkv.engine.steps import Steps, prompt_tiles
from hybridkv.state.batch import DecodeBatch, TileBatch
from hybridkv.state.cache import Cache
from models.llama.toy import TOY_LLAMA

IDS = prompt(75)
NEW = prompt(30, seed=1)


@pytest.fixture(scope="module")
def runtime():
    return llama_runtime()


@pytest.fixture(scope="module")
def alone(runtime):
    return Steps(runtime, llama_options())


@pytest.fixture(scope="module")
def reference(alone):
    return run(alone, empty_cache(alone))


def run(steps: Steps, cache: Cache) -> tuple[str, str]:
    logits, cache = prefill(steps, cache, IDS)
    after, _ = decode(steps, cache, NEW)
    assert np.isfinite(logits).all()
    assert np.isfinite(after).all()
    return digest(logits), digest(after)


@pytest.mark.parametrize("tokens", [105, 512])
def test_capacity_and_order_of_blocks_change_no_bit(alone, reference, tokens):
    cache = empty_cache(alone, tokens=tokens)
    assert run(alone, cache) == reference
    cache = empty_cache(alone, tokens=tokens)
    shuffled = np.random.default_rng(0).permutation(cache.block_table.shape[1]).astype(np.int32)
    cache = dataclasses.replace(cache, block_table=jnp.asarray(shuffled[None]))
    assert run(alone, cache) == reference


def _poison(cache: Cache, length: int) -> Cache:
    """NaN in every row that a sequence of ``length`` tokens does not own; blocks in order."""

    def rows(pool: jax.Array) -> jax.Array:
        flat = pool.reshape(-1, pool.shape[-1])
        used = jnp.arange(flat.shape[0]) < length
        return jnp.where(used[:, None], flat, jnp.nan).reshape(pool.shape)

    return jax.tree.map(lambda x: rows(x) if x.ndim == 3 else x, cache)


def test_nan_in_every_unused_byte_changes_no_bit(alone, reference):
    logits, cache = prefill(alone, _poison(empty_cache(alone, tokens=256), 0), IDS)
    assert digest(logits) == reference[0]
    rows = []
    for i, token in enumerate(NEW):
        row, cache = decode(alone, _poison(cache, len(IDS) + i), np.asarray([token]))
        rows.append(row[0])
    assert digest(np.stack(rows)) == reference[1]


@pytest.mark.parametrize("end", [1, 15, 16, 17, 31, 32, 33, 64])
def test_where_a_prompt_ends_changes_no_earlier_bit(alone, reference, end):
    logits, cache = prefill(alone, empty_cache(alone), IDS[:end])
    start = end // alone.options.tile * alone.options.tile
    parts = [logits[:start]]
    for batch in prompt_tiles(IDS, 0, alone.options, 1, start=start):
        out, cache = alone.tile(batch, cache)
        parts.append(np.asarray(out[0]))
    assert digest(np.concatenate(parts)[: len(IDS)]) == reference[0]


def test_ids_past_the_end_of_a_prompt_are_not_read(alone, reference):
    """Places past the end compute fixed, finite values, whatever ids stand there."""
    runs = []
    for other in (1, 10**6):
        parts, cache = [], empty_cache(alone)
        for batch in prompt_tiles(IDS, 0, alone.options, 1):
            place = batch.starts[:, None] + jnp.arange(alone.options.tile, dtype=jnp.int32)[None, :]
            tokens = jnp.where(place < batch.ends[:, None], batch.tokens, other)
            out, cache = alone.tile(dataclasses.replace(batch, tokens=tokens), cache)
            parts.append(np.asarray(out[0]))
        runs.append(np.concatenate(parts))
    assert np.isfinite(runs[0]).all()
    assert digest(runs[0]) == digest(runs[1])
    assert digest(runs[0][: len(IDS)]) == reference[0]


@pytest.mark.parametrize("resume", [32, 64])
def test_a_hit_means_reuse(alone, resume):
    """Another slot over the same blocks goes on from ``resume`` with the bits of a cold run."""
    whole, cache = prefill(alone, empty_cache(alone, slots=2), IDS, slot=1)
    expected = digest(decode(alone, cache, NEW, slot=1)[0])
    cache = empty_cache(alone, slots=2)
    _, cache = prefill(alone, cache, IDS[:resume], slot=0)
    shared = resume // cache.geometry.block_tokens
    table = cache.block_table.at[1, :shared].set(cache.block_table[0, :shared])
    cache = dataclasses.replace(cache, block_table=table, lengths=cache.lengths.at[1].set(resume))
    parts = []
    for batch in prompt_tiles(IDS, 1, alone.options, 2, start=resume, write_from=resume):
        out, cache = alone.tile(batch, cache)
        parts.append(np.asarray(out[0]))
    np.testing.assert_array_equal(np.concatenate(parts)[: len(IDS) - resume], whole[resume:])
    assert digest(decode(alone, cache, NEW, slot=1)[0]) == expected


@pytest.mark.parametrize("stored", [0, 1, 16, 31, 32, 40, 75])
def test_rows_that_are_stored_already_are_never_written(alone, stored):
    """A different prompt, so that a write would show; it reads the stored rows."""
    _, cache = prefill(alone, empty_cache(alone), IDS)
    before = [np.asarray(pool).reshape(128, -1) for pool in cache.compressed.layers]
    other = (IDS + 1) % TOY_LLAMA.vocab_size
    for batch in prompt_tiles(other, 0, alone.options, 1, write_from=stored):
        _, cache = alone.tile(batch, cache)
    for old, pool in zip(before, cache.compressed.layers, strict=True):
        new = np.asarray(pool).reshape(128, -1)
        np.testing.assert_array_equal(new[:stored], old[:stored])
        assert (new[stored : len(IDS)] != old[stored : len(IDS)]).any(axis=1).all()
        np.testing.assert_array_equal(new[len(IDS) :], 0.0)


def _lane_batch(lanes: int, active: dict[int, tuple[np.ndarray, int]], tile: int) -> TileBatch:
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


@pytest.mark.parametrize("sequential", [True, False], ids=["sequential", "batched"])
def test_lane_and_neighbours_change_no_bit(runtime, sequential):
    lanes = 3
    steps = Steps(runtime, llama_options(lanes=lanes, sequential=sequential))
    tile = steps.options.tile

    def logits_of(lane: int, others: dict[int, np.ndarray]) -> str:
        cache = empty_cache(steps, slots=lanes)
        mine = []
        for number in range(3):
            active = {k: (ids, number) for k, ids in others.items() if len(ids) > number * tile}
            out, cache = steps.tile(_lane_batch(lanes, active | {lane: (IDS, number)}, tile), cache)
            mine.append(np.asarray(out[lane]))
        for i, token in enumerate(NEW):
            tokens = jnp.full((lanes,), i, jnp.int32).at[lane].set(int(token))
            active_slots = jnp.asarray([k == lane or k in others for k in range(lanes)])
            out, cache = steps.decode(DecodeBatch(tokens=tokens, active=active_slots), cache)
            mine.append(np.asarray(out[lane])[None])
        logits = np.concatenate(mine)
        assert np.isfinite(logits).all()
        return digest(logits[: len(IDS)]) + digest(logits[3 * tile :])

    expected = logits_of(0, {})
    assert logits_of(0, {1: prompt(96, 5), 2: prompt(90, 6)}) == expected
    assert logits_of(1, {0: prompt(96, 7), 2: prompt(70, 8)}) == expected
    assert logits_of(2, {0: prompt(70, 9), 1: prompt(95, 10)}) == expected


def test_idle_slots_keep_every_byte(alone):
    cache = empty_cache(alone, slots=2)
    _, cache = prefill(alone, cache, prompt(37, 3), slot=1)
    blocks = np.asarray(cache.block_table[1])
    before = [np.asarray(pool)[blocks] for pool in cache.compressed.layers]
    _, cache = prefill(alone, cache, IDS, slot=0)
    _, cache = decode(alone, cache, NEW, slot=0)
    for old, pool in zip(before, cache.compressed.layers, strict=True):
        np.testing.assert_array_equal(np.asarray(pool)[blocks], old)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bfloat16_rows_are_exact_too(dtype, reference):
    """A rounded cache is another model, but as exact a one."""
    config = dataclasses.replace(TOY_LLAMA, dtype=dtype)
    steps = Steps(llama_runtime(config, formats.BFLOAT16), llama_options())
    runs = [run(steps, empty_cache(steps, tokens=tokens)) for tokens in (105, 512)]
    assert runs[0] == runs[1] != reference
