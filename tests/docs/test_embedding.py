"""The examples of docs/embedding.md run as they stand, and their models keep the laws."""

import dataclasses
import re
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import compilations

from hybridkv.engine.numerics import identify
from hybridkv.engine.runner import Runner, RunnerOptions
from hybridkv.engine.steps import Steps, prompt_tiles
from hybridkv.prefixes.plan import Outcome
from hybridkv.prefixes.policy import DENSE, NEVER
from hybridkv.state.batch import StepOptions
from hybridkv.state.cache import Cache, assign_in_order
from hybridkv.state.capacity import Capacity

OPTIONS = StepOptions(tile=32, key_block=32, sequential=True, all_logits=True)
TITLES = ("nnx", "linen")
MORE = "saving"
"""The example that goes on from either of them."""


@pytest.fixture(scope="module")
def blocks(repository):
    text = (repository / "docs" / "embedding.md").read_text()
    return dict(zip((*TITLES, MORE), re.findall(r"```python\n(.*?)```", text, re.S), strict=True))


@pytest.fixture(scope="module", params=TITLES)
def example(request, blocks):
    """The names that one example defines."""
    names = {"__name__": f"embedding_{request.param}"}
    exec(compile(blocks[request.param], f"docs/embedding.md: {request.param}", "exec"), names)
    return names


@pytest.fixture(scope="module")
def model(example):
    return example["model"]


@pytest.fixture(scope="module")
def runner(model):
    return make(model)


def make(model, *, tokens=256, slots=2, identity=None):
    capacity = Capacity.for_tokens(model.geometry, tokens=tokens, slots=slots)
    sizes = RunnerOptions(capacity=capacity, snapshots=12, debug=True)
    identity = identity or identify(model, OPTIONS)
    return Runner(model, OPTIONS, sizes, identity=identity)


def prompt(tokens, seed):
    return np.random.default_rng(seed).integers(0, 96, tokens).astype(np.int32)


def fork(ids, position, seed=99):
    """The prompt up to ``position`` and another end."""
    end = prompt(30, seed)
    end[0] = (ids[position] + 1) % 96
    return np.concatenate([ids[:position], end])


def run(runner, ids, *, decode=(), **more):
    """One prompt from start to end; its sequence, logits, and logits of what is decoded."""
    sequence = runner.start(ids, max_new_tokens=len(decode) + 1, **more)
    logits = runner.prefill(sequence)
    after = [runner.decode({sequence: int(token)})[sequence] for token in decode]
    runner.finish(sequence)
    return sequence, logits, np.asarray(after)


def windowed(model):
    return any(layer.window for layer in model.geometry.layers)


def test_each_example_is_under_100_lines_and_uses_its_own_flax(blocks):
    for text in blocks.values():
        assert len(text.splitlines()) < 100
    assert "flax" not in blocks[MORE]
    assert "from flax import nnx" in blocks["nnx"]
    assert "import flax.linen as nn" in blocks["linen"]


def test_the_examples_are_of_both_kinds(blocks, example, model):
    layers = model.geometry.layers
    assert windowed(model) == (example["__name__"] == "embedding_nnx")
    assert any(layer.ratio == 1 for layer in layers)


def test_the_second_of_the_examples_requests_reuses_the_first(example):
    first, second = example["results"]
    assert (first.reused, second.reused, second.replayed) == (0, 96, 0)
    assert first.exact
    assert second.exact
    assert first.tokens == second.tokens
    assert len(second.tokens) == 8


def test_a_prefix_that_is_kept_and_a_sequence_that_is_moved_give_the_same_tokens(
    example, blocks, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "mkdtemp", lambda: str(tmp_path))
    names = dict(example) | {"results": list(example["results"])}
    exec(compile(blocks[MORE], f"docs/embedding.md: {MORE}", "exec"), names)
    first, *_, again, moved = names["results"]
    assert names["restored"] == [96, 96]
    assert (again.reused, again.replayed) == (96, 0)
    assert (moved.taken_over, moved.exact) == (3, True)
    assert first.tokens == again.tokens == moved.tokens


def test_tokens_of_a_handle_come_one_by_one(example):
    """As many requests as the engine likes, alone and together."""
    prompts = [prompt(40, seed) for seed in range(3)]
    requests = [example["Request"](prompt=ids, max_new_tokens=5) for ids in prompts]
    together = [output.tokens for output in example["engine"].run(requests)]
    assert [list(example["engine"].submit(request)) for request in requests] == together


@pytest.mark.parametrize("policy", [DENSE, NEVER], ids=["copy", "replay"])
@pytest.mark.parametrize("position", [96, 107, 128, 160, 176, 192])
def test_warm_is_cold_bit_for_bit_wherever_a_prompt_forks(runner, model, position, policy):
    ids = prompt(200, seed=1)
    name = "dense" if policy is DENSE else "bare"
    run(runner, ids, namespace=name, policy=policy)
    other = fork(ids, position)
    warm, got, after = run(runner, other, namespace=name, decode=(3, 4, 5), policy=NEVER)
    cold, expected, expected_after = run(
        runner, other, namespace=f"cold {name} {position}", decode=(3, 4, 5), policy=NEVER
    )
    assert warm.shared_tokens == position // 32 * 32
    assert cold.start == 0
    replays = windowed(model) and policy is NEVER
    assert warm.plan.outcome == (Outcome.REBUILD if replays else Outcome.REUSE)
    assert (warm.start < warm.exact_from) == replays
    assert warm.exact_from == warm.shared_tokens
    np.testing.assert_array_equal(got, expected[warm.exact_from :])
    np.testing.assert_array_equal(after, expected_after)


def test_an_exact_repetition_resumes_at_its_last_tile(runner):
    ids = prompt(140, seed=2)
    _, cold, _ = run(runner, ids, namespace="again")
    warm, got, _ = run(runner, ids, namespace="again")
    assert warm.start == 128
    np.testing.assert_array_equal(got, cold[128:])


def test_neighbours_change_no_bit(runner):
    ids, other = prompt(100, seed=3), prompt(120, seed=4)
    _, alone, after = run(runner, ids, namespace="alone", decode=(7, 8))
    one = runner.start(ids, max_new_tokens=3, namespace="one")
    two = runner.start(other, max_new_tokens=9, namespace="two")
    runner.tile(two)
    logits = []
    for _ in range(4):
        logits.append(np.asarray(runner.tile(one))[0])
        if two.computed < len(other):
            runner.tile(two)
    np.testing.assert_array_equal(np.concatenate(logits)[:100], alone)
    for token, expected in zip((7, 8), after, strict=True):
        both = runner.decode({one: token, two: 5})
        np.testing.assert_array_equal(both[one], expected)
    runner.finish(one)
    runner.finish(two)


def test_the_capacity_changes_no_bit(runner, model):
    ids = prompt(90, seed=5)
    _, expected, after = run(runner, ids, namespace="capacity", decode=(7, 8))
    larger = make(model, tokens=480, slots=2, identity=runner.identity)
    run(larger, prompt(200, seed=6))
    _, got, got_after = run(larger, ids, decode=(7, 8))
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(got_after, after)


@pytest.mark.parametrize("sequential", [True, False])
def test_lanes_change_no_bit(model, sequential):
    """Two prompts in the lanes of one tile step, and each beside an idle lane."""
    options = dataclasses.replace(OPTIONS, lanes=2, sequential=sequential)
    steps = Steps(model, options)
    capacity = Capacity.for_tokens(model.geometry, tokens=64, slots=2)

    def logits(*ids):
        cache = assign_in_order(Cache.init(model.geometry, capacity))
        tiles = [prompt_tiles(x, slot, options, 2) for slot, x in enumerate(ids)]
        out = []
        for parts in zip(*tiles, strict=True):
            # Each part has its sequence in the first lane; the second is idle.
            batch = parts[0]
            if len(parts) == 2:
                batch = jax.tree.map(lambda a, b: jnp.stack([a[0], b[0]]), *parts)
            got, cache = steps.tile(batch, cache)
            out.append(np.asarray(got)[: len(parts)])
        return np.concatenate(out, axis=1)

    one, two = prompt(64, seed=7), prompt(64, seed=8)
    both = logits(one, two)
    np.testing.assert_array_equal(both[:1], logits(one))
    np.testing.assert_array_equal(both[1:], logits(two))


def test_decoding_gives_the_logits_of_a_prompt(runner):
    ids = prompt(150, seed=9)
    _, whole, _ = run(runner, ids, namespace="whole")
    _, _, after = run(runner, ids[:90], namespace="part", decode=ids[90:])
    np.testing.assert_allclose(after, whole[90:], atol=2e-5, rtol=2e-4)


def test_logits_are_those_of_the_same_model_without_a_cache(runner, example, model):
    def dense(layer, q, k, v):
        """Every query against every key, with a mask."""
        t, (heads, width), kv_heads = q.shape[1], q.shape[2:], k.shape[2]
        k, v = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
        distance = np.arange(t)[:, None] - np.arange(t)[None, :]
        window = model.geometry.layers[layer].window or t
        seen = jnp.asarray((distance >= 0) & (distance < window))[None, None]
        logits = jnp.einsum("nqhc,nkhc->nhqk", q, k) / np.float32(np.sqrt(width))
        return jnp.einsum("nhqk,nkhc->nqhc", jax.nn.softmax(logits, where=seen, axis=-1), v)

    ids = prompt(150, seed=10)
    params = example["state" if windowed(model) else "params"]
    positions = jnp.arange(len(ids), dtype=jnp.int32)[None]
    hidden = model.forward(params, jnp.asarray(ids)[None], positions, dense)
    expected = np.asarray(model.logits(params, hidden))[0]
    _, got, _ = run(runner, ids, namespace="plain")
    np.testing.assert_allclose(got, expected, atol=2e-5, rtol=2e-4)
    assert np.ptp(expected) > 0.5


def test_nothing_compiles_after_warm_up(runner):
    with compilations() as compiled:
        for policy in (NEVER, DENSE):
            ids = prompt(200, seed=11)
            for position in (199, 107, 192):
                run(runner, fork(ids, position), namespace="compile", decode=(1, 2), policy=policy)
        runner.allocator.evict(blocks=4)
        run(runner, ids, namespace="compile")
    assert compiled == []
