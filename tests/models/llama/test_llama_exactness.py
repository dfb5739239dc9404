"""Law 1 for one attention kind: warm equals cold, whatever stands beside, before or behind."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exactness import check_idle_slot, check_neighbours, check_stored_rows, run, shuffled
from toy import decode, digest, empty_cache, prefill, prompt
from toy_llama import llama_options, llama_runtime

from hybridkv import formats
from hybridkv.engine.steps import Steps, prompt_tiles
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
    return run(alone, empty_cache(alone), IDS, NEW)


@pytest.mark.parametrize("tokens", [105, 512])
def test_capacity_and_order_of_blocks_change_no_bit(alone, reference, tokens):
    for cache in (empty_cache(alone, tokens=tokens), shuffled(empty_cache(alone, tokens=tokens))):
        assert run(alone, cache, IDS, NEW) == reference


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
    check_stored_rows(alone, IDS, stored, TOY_LLAMA.vocab_size)


@pytest.mark.parametrize("sequential", [True, False], ids=["sequential", "batched"])
def test_lane_and_neighbours_change_no_bit(runtime, sequential):
    steps = Steps(runtime, llama_options(lanes=3, sequential=sequential))
    check_neighbours(steps, IDS, NEW)


def test_idle_slots_keep_every_byte(alone):
    check_idle_slot(alone, IDS, NEW)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bfloat16_rows_are_exact_too(dtype, reference):
    """A rounded cache is another model, but as exact a one."""
    config = dataclasses.replace(TOY_LLAMA, dtype=dtype)
    steps = Steps(llama_runtime(config, formats.BFLOAT16), llama_options())
    runs = [run(steps, empty_cache(steps, tokens=tokens), IDS, NEW) for tokens in (105, 512)]
    assert runs[0] == runs[1] != reference
