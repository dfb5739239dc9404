"""Routing and the dropless grouped product, against a loop over tokens in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy import TOY

from models.deepseek_v4.experts import Experts, Gate, clipped_swiglu, group_rows

CONFIG = dataclasses.replace(TOY, experts=6, experts_per_token=3, swiglu_limit=0.8)
TOKENS = 13


@functools.cache
def experts(layer: int = 1, config=CONFIG) -> Experts:
    """Random weights, bias included; layer 0 is hashed, layer 1 is not."""
    module = Experts(config, layer, nnx.Rngs(7))
    rng = np.random.default_rng(layer)
    for _, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        parameter[...] = jnp.asarray(rng.normal(size=parameter.shape).astype(np.float32) * 0.4)
    return module


def inputs(seed: int = 0, count: int = TOKENS):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, CONFIG.hidden_size)).astype(np.float32)
    return x, rng.integers(0, CONFIG.vocab_size, count).astype(np.int32)


@functools.cache
def compiled(layer: int = 1, **options):
    module = experts(layer)
    graph, state = nnx.split(module)
    call = jax.jit(lambda s, x, t: nnx.merge(graph, s)(x, t, **options))
    return lambda x, t: np.asarray(call(state, jnp.asarray(x), jnp.asarray(t)))


def wide(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def swiglu(x: np.ndarray, limit: float) -> np.ndarray:
    gate, up = np.split(x, 2, axis=-1)
    gate = np.minimum(gate, limit)
    return gate / (1 + np.exp(-gate)) * np.clip(up, -limit, limit)


def routed(module: Experts, x, tokens) -> tuple[np.ndarray, np.ndarray]:
    """Picks and weights (reference section 8)."""
    scores = np.sqrt(np.log1p(np.exp(wide(x) @ wide(module.gate.score.weight[...]).T)))
    if module.gate.hashed:
        picks = np.asarray(module.gate.expert_of[...])[tokens]
    else:
        picks = np.argsort(-(scores + wide(module.gate.bias[...])), axis=1, kind="stable")
        picks = picks[:, : CONFIG.experts_per_token]
    weights = np.take_along_axis(scores, picks, axis=1)
    return picks, weights / weights.sum(axis=1, keepdims=True) * CONFIG.route_scale


def expected(module: Experts, x, tokens) -> np.ndarray:
    picks, weights = routed(module, x, tokens)
    up, down = wide(module.up[...]), wide(module.down[...])
    out = swiglu(wide(x) @ wide(module.shared_up.weight[...]).T, CONFIG.swiglu_limit)
    out = out @ wide(module.shared_down.weight[...]).T
    for t in range(len(x)):
        for expert, weight in zip(picks[t], weights[t], strict=True):
            out[t] += weight * (
                swiglu(wide(x[t]) @ up[expert].T, CONFIG.swiglu_limit) @ down[expert].T
            )
    return out


@pytest.mark.parametrize("layer", [0, 1], ids=["hashed", "scored"])
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_the_routed_sum_matches_float64(layer, rows):
    x, tokens = inputs()
    got = compiled(layer, rows=rows)(x, tokens)
    np.testing.assert_allclose(got, expected(experts(layer), x, tokens), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("layer", [0, 1], ids=["hashed", "scored"])
def test_the_gate_picks_by_biased_and_weighs_by_unbiased_scores(layer):
    x, tokens = inputs(1)
    module = experts(layer)
    picks, weights = module.gate(jnp.asarray(x), jnp.asarray(tokens))
    theirs, their_weights = routed(module, x, tokens)
    np.testing.assert_array_equal(picks, theirs)
    np.testing.assert_allclose(weights, their_weights, rtol=1e-5)
    np.testing.assert_allclose(np.sum(weights, axis=1), CONFIG.route_scale, rtol=1e-5)


def test_a_fresh_hashed_gate_spreads_tokens_over_all_experts():
    picks = Gate(CONFIG, 0, nnx.Rngs(0)).expert_of[...]
    assert picks.shape == (CONFIG.vocab_size, 3)
    assert all(len(set(row)) == 3 for row in np.asarray(picks).tolist())
    counts = np.bincount(np.asarray(picks).reshape(-1), minlength=CONFIG.experts)
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("layer", [0, 1], ids=["hashed", "scored"])
def test_a_token_gets_the_same_bits_beside_any_others(layer, rows):
    call = compiled(layer, rows=rows)
    x, tokens = inputs()
    base = call(x, tokens)
    for seed in range(1, 5):
        others, ids = inputs(seed)
        mine = np.random.default_rng(seed).permutation(TOKENS)[:3]
        others[mine], ids[mine] = x[mine], tokens[mine]
        np.testing.assert_array_equal(call(others, ids)[mine], base[mine])


def test_a_token_gets_the_same_bits_beside_copies_of_itself():
    """All in one expert's groups: nothing is dropped."""
    call = compiled(1, rows=4)
    x, tokens = inputs()
    base = call(x, tokens)
    crowd = call(np.tile(x[:1], (TOKENS, 1)), np.tile(tokens[:1], TOKENS))
    np.testing.assert_array_equal(crowd, np.tile(base[:1], (TOKENS, 1)))


def test_order_of_tokens_changes_no_bit():
    call = compiled(1, rows=4)
    x, tokens = inputs()
    order = np.random.default_rng(0).permutation(TOKENS)
    np.testing.assert_array_equal(call(x[order], tokens[order]), call(x, tokens)[order])


@pytest.mark.parametrize("layer", [0, 1], ids=["hashed", "scored"])
def test_the_differentiable_path_gives_the_serving_bits(layer):
    x, tokens = inputs()
    training = compiled(layer, rows=4, differentiable=True)(x, tokens)
    np.testing.assert_array_equal(training, compiled(layer, rows=4)(x, tokens))


def test_the_dense_path_computes_the_same_function():
    x, tokens = inputs()
    dense = compiled(1, rows=4, dense=True)(x, tokens)
    np.testing.assert_allclose(dense, compiled(1, rows=4)(x, tokens), atol=2e-5, rtol=1e-5)


def test_gradients_of_the_grouped_and_the_dense_path_agree():
    graph, state = nnx.split(experts(1))
    x, tokens = inputs()

    def gradient(**options):
        def loss(state):
            out = nnx.merge(graph, state)(jnp.asarray(x), jnp.asarray(tokens), rows=4, **options)
            return jnp.sum(out * out)

        return jax.tree.leaves(jax.jit(jax.grad(loss))(state))

    grouped, dense = gradient(differentiable=True), gradient(dense=True)
    assert any((np.asarray(g) != 0).any() for g in grouped)
    for ours, theirs in zip(grouped, dense, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-3, rtol=1e-3)


def test_leading_axes_are_kept_and_loads_are_shares():
    x, tokens = inputs(count=12)
    module = experts(1)

    @nnx.jit
    def call(module, x, tokens):
        loads: list[jax.Array] = []
        return module(x, tokens, rows=4, loads=loads), loads

    shaped, loads = call(
        module, jnp.asarray(x).reshape(3, 4, -1), jnp.asarray(tokens).reshape(3, 4)
    )
    assert shaped.shape == (3, 4, CONFIG.hidden_size)
    np.testing.assert_allclose(
        shaped.reshape(12, -1), expected(module, x, tokens), atol=2e-5, rtol=1e-5
    )
    counts = np.bincount(routed(module, x, tokens)[0].reshape(-1), minlength=CONFIG.experts)
    np.testing.assert_allclose(loads[0], counts / 36, rtol=1e-6)


GROUPED = {
    "spread": [0, 1, 2, 3, 4, 5, 0, 1],
    "one expert": [3] * 11,
    "the last expert": [5, 5],
    "one pair": [2],
    "none in the middle": [0, 5, 0, 5, 0],
    "random": np.random.default_rng(0).integers(0, 6, 40).tolist(),
}


@pytest.mark.parametrize("rows", [1, 3, 4, 50])
@pytest.mark.parametrize("picks", GROUPED.values(), ids=GROUPED)
def test_groups_hold_every_pair_once_and_one_expert_each(picks, rows):
    place, owner, source, used = (
        np.asarray(x) for x in group_rows(jnp.asarray(picks, jnp.int32), 6, rows)
    )
    pairs, groups = len(picks), len(owner)
    assert source.shape == (groups * rows,)
    assert len(set(place.tolist())) == pairs
    np.testing.assert_array_equal(source[place], np.arange(pairs))
    np.testing.assert_array_equal(owner[place // rows], picks)
    assert (np.delete(source, place) >= pairs).all()
    assert used == sum(-(-picks.count(e) // rows) for e in range(6)) <= groups
    assert place.max() < used * rows
    # Within an expert, pairs keep their order and fill groups from the front.
    for expert in set(picks) if rows > 1 else ():
        mine = place[np.asarray(picks) == expert]
        np.testing.assert_array_equal(mine, mine[0] + np.arange(len(mine)))
        assert mine[0] % rows == 0


def test_swiglu_clips_the_gate_from_above_and_the_value_on_both_sides():
    x = np.array([[-9, -1, 0.5, 9, 1, 1, 1, -9, 9, 0.5]], np.float32)
    got = clipped_swiglu(jnp.asarray(x), 2.0)
    np.testing.assert_allclose(got, swiglu(wide(x), 2.0), rtol=1e-5)
    assert got[0, 3] == pytest.approx(2 / (1 + np.exp(-2)) * 2, rel=1e-6)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("layer", [0, 1])
def test_idle_tokens_get_no_routed_expert_and_active_ones_keep_their_bits(rows, layer):
    module = experts(layer)
    graph, state = nnx.split(module)
    call = jax.jit(lambda s, x, t, on: nnx.merge(graph, s)(x, t, rows=rows, active=on))
    x, tokens = inputs(3)
    everyone = compiled(layer, rows=rows)(x, tokens)
    on = np.zeros(TOKENS, bool)
    on[[2, 5, 6, 11]] = True  # not the first ones
    some = np.asarray(call(state, jnp.asarray(x), jnp.asarray(tokens), jnp.asarray(on)))
    assert some[on].tobytes() == everyone[on].tobytes()
    nobody = np.asarray(call(state, jnp.asarray(x), jnp.asarray(tokens), jnp.zeros(TOKENS, bool)))
    np.testing.assert_array_equal(some[~on], nobody[~on])
    assert not np.array_equal(everyone[~on], nobody[~on])
