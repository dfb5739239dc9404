"""Tile steps and decode steps against the same function in float64, and transformers' logits."""

import jax
import numpy as np
import pytest
from toy import decode, empty_cache, prefill, prompt
from toy_llama import dense_logits, llama_options, llama_runtime

from hybridkv.engine.generate import Generator
from hybridkv.engine.steps import Steps, idle_decode, idle_tile
from hybridkv.kinds import Kind
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity
from models.llama.checkpoint import load_model
from models.llama.runtime import LlamaRuntime
from models.llama.toy import TIED, TOY_LLAMA, toy_llama

TOLERANCE = 1e-4
IDS = prompt(83)


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def dense():
    """Causal, so one pass serves every shorter prompt."""
    return dense_logits(toy_llama(), IDS)


@pytest.fixture(scope="module", params=[16, 32, 48])
def steps(request):
    return Steps(llama_runtime(), llama_options(tile=request.param))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 83])
def test_prompt_and_decoded_tokens_have_the_dense_logits(steps, dense, length):
    logits, cache = prefill(steps, empty_cache(steps), IDS[:length])
    close(logits, dense[:length])
    end = min(length + 17, len(IDS))
    if end > length:
        after, cache = decode(steps, cache, IDS[length:end])
        close(after, dense[length:end])
    assert cache.lengths.tolist() == [end]


def test_one_key_head_and_tied_embeddings():
    steps = Steps(llama_runtime(TIED), llama_options())
    dense = dense_logits(toy_llama(TIED), IDS[:53])
    logits, cache = prefill(steps, empty_cache(steps), IDS[:33])
    close(logits, dense[:33])
    close(decode(steps, cache, IDS[33:53])[0], dense[33:])


def test_a_cache_is_rows_in_blocks_and_nothing_else():
    """The degenerate geometry: what is left of the five kinds is one."""
    runtime = llama_runtime()
    geometry = runtime.geometry
    assert geometry.ratios == (1,)
    assert geometry.block_tokens == 16
    assert LlamaRuntime(toy_llama(), cells_per_block=4).geometry.block_tokens == 4
    row = 2 * TOY_LLAMA.kv_heads * TOY_LLAMA.head_dim * 4
    assert geometry.cache_bytes(17) == {
        Kind.COMPRESSED: TOY_LLAMA.layers * 32 * row,
        Kind.INDEXER: 0,
        Kind.WINDOW: 0,
        Kind.TAIL: 0,
    }
    cache = Cache.init(geometry, Capacity.for_tokens(geometry, tokens=64))
    assert jax.tree.leaves(cache.sequence) == []
    assert {geometry.replay_tokens(position) for position in range(200)} == {0}


@pytest.fixture(scope="module")
def oracle(oracles):
    """transformers 5.24.0: ``tests/data/make_llama_oracle.py``."""
    with np.load(oracles / "llama_tiny" / "oracle.npz") as arrays:
        return dict(arrays)


def test_logits_are_those_of_transformers(oracles, oracle):
    model = load_model(oracles / "llama_tiny")
    ids, logits = oracle["full_ids"][0], oracle["logits"]
    close(dense_logits(model, ids), logits)
    steps = Steps(LlamaRuntime(model), llama_options())
    whole, _ = prefill(steps, empty_cache(steps), ids)
    close(whole, logits)
    length = oracle["input_ids"].shape[1]
    _, cache = prefill(steps, empty_cache(steps), ids[:length])
    close(decode(steps, cache, ids[length:])[0], logits[length:])


def test_the_engine_generates_the_tokens_of_transformers(oracles, oracle):
    """Nothing in the engine asks how many kinds a model has."""
    runtime = LlamaRuntime(load_model(oracles / "llama_tiny"))
    generator = Generator(runtime, llama_options(), capacity_tokens=96)
    greedy = oracle["greedy_tokens"]
    tokens = generator.stream(oracle["input_ids"][0], max_new_tokens=len(greedy))
    assert list(tokens) == greedy.tolist()


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_both_steps_lower_for_accelerators(platform):
    """A weak check (lowering is not compiling): no operation is missing there."""
    runtime = llama_runtime()
    options = llama_options(lanes=2, sequential=False, all_logits=False)
    cache = Cache.abstract(
        runtime.geometry, Capacity.for_tokens(runtime.geometry, tokens=64, slots=2)
    )
    for step, batch in (
        (runtime.tile_step, idle_tile(options, 2)),
        (runtime.decode_step, idle_decode(2)),
    ):
        traced = jax.jit(step, static_argnums=3).trace(runtime.params, batch, cache, options)
        assert "stablehlo.while" in traced.lower(lowering_platforms=(platform,)).as_text()
