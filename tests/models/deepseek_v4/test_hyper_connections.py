"""Streams against numpy in float64, index by index (reference section 2)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy import TOY

from models.deepseek_v4.hyper_connections import HyperConnection, Mix, StreamHead, sinkhorn

CONFIG = dataclasses.replace(TOY, streams=3, hidden_size=5, sinkhorn_steps=6, stream_eps=1e-3)
EPS, STREAMS = CONFIG.stream_eps, CONFIG.streams


def randomised(module, seed: int = 0):
    rng = np.random.default_rng(seed)
    for _, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        parameter[...] = jnp.asarray(rng.normal(size=parameter.shape).astype(np.float32))
    return module


def streams(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(9)
    return rng.normal(size=(*shape, STREAMS, CONFIG.hidden_size)).astype(np.float32)


def numpy_sinkhorn(logits: np.ndarray, steps: int, eps: float) -> np.ndarray:
    """One matrix: row softmax, columns, then (rows, columns) ``steps - 1`` times."""
    c = np.exp(logits - logits.max(axis=1, keepdims=True))
    c = c / c.sum(axis=1, keepdims=True) + eps
    c = c / (c.sum(axis=0, keepdims=True) + eps)
    for _ in range(steps - 1):
        c = c / (c.sum(axis=1, keepdims=True) + eps)
        c = c / (c.sum(axis=0, keepdims=True) + eps)
    return c


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_sinkhorn_matches_numpy(steps, eps):
    logits = np.random.default_rng(steps).normal(size=(7, 4, 4)) * 2
    got = jax.jit(functools.partial(sinkhorn, steps=steps, eps=eps))(
        jnp.asarray(logits, jnp.float32)
    )
    expected = [numpy_sinkhorn(one.astype(np.float64), steps, eps) for one in logits]
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-7)


def test_sinkhorn_is_nearly_doubly_stochastic_and_ends_on_columns():
    logits = np.random.default_rng(0).normal(size=(50, 4, 4)).astype(np.float32) * 2
    call = jax.jit(sinkhorn, static_argnums=(1, 2))
    few, many = (np.asarray(call(jnp.asarray(logits), n, 1e-6)) for n in (2, 20))
    assert (many > 0).all()
    np.testing.assert_allclose(few.sum(axis=-2), 1, atol=1e-5)
    np.testing.assert_allclose(many.sum(axis=-2), 1, atol=1e-5)
    np.testing.assert_allclose(many.sum(axis=-1), 1, atol=2e-2)
    assert np.abs(many.sum(axis=-1) - 1).max() < np.abs(few.sum(axis=-1) - 1).max() / 10


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def mixes(x: np.ndarray, fn) -> np.ndarray:
    flat = x.astype(np.float64).reshape(-1)
    return flat / np.sqrt((flat**2).mean() + CONFIG.norm_eps) @ np.asarray(fn, np.float64)


@nnx.jit
def both(module, x, y):
    collapsed, mix = module(x)
    return collapsed, mix, module.leave(x, y, mix)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_a_connection_collapses_and_leaves_as_the_release_does(shape):
    module = randomised(HyperConnection(CONFIG, nnx.Rngs(0)))
    fn, base, scale = (
        np.asarray(p[...], np.float64) for p in (module.fn, module.base, module.scale)
    )
    x = streams(*shape)
    y = np.random.default_rng(3).normal(size=(*shape, CONFIG.hidden_size)).astype(np.float32)
    collapsed, mix, left = both(module, jnp.asarray(x), jnp.asarray(y))
    assert collapsed.shape == y.shape
    assert left.shape == x.shape
    for at in np.ndindex(*shape):
        z, k = mixes(x[at], fn), STREAMS
        pre = sigmoid(z[:k] * scale[0] + base[:k]) + EPS
        post = 2 * sigmoid(z[k : 2 * k] * scale[1] + base[k : 2 * k])
        comb = numpy_sinkhorn(
            (z[2 * k :] * scale[2] + base[2 * k :]).reshape(k, k), CONFIG.sinkhorn_steps, EPS
        )
        np.testing.assert_allclose(collapsed[at], pre @ x[at], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(mix.post[at], post, atol=1e-5)
        np.testing.assert_allclose(mix.comb[at], comb, atol=1e-5)
        out = [
            post[new] * y[at] + sum(comb[old, new] * x[at][old] for old in range(k))
            for new in range(k)
        ]
        np.testing.assert_allclose(left[at], out, atol=1e-5, rtol=1e-5)


def test_comb_sends_its_first_index_to_its_second():
    module = HyperConnection(CONFIG, nnx.Rngs(0))
    comb = np.zeros((STREAMS, STREAMS), np.float32)
    comb[0, 2] = 1
    x, y = streams(), np.zeros(CONFIG.hidden_size, np.float32)
    left = module.leave(
        jnp.asarray(x), jnp.asarray(y), Mix(jnp.zeros((STREAMS,)), jnp.asarray(comb))
    )
    np.testing.assert_array_equal(left, [y, y, x[0]])


def test_the_head_weighs_streams_by_a_sigmoid():
    module = randomised(StreamHead(CONFIG, nnx.Rngs(0)), 1)
    x = streams(4)
    got = module(jnp.asarray(x))
    for i in range(4):
        z = mixes(x[i], module.fn[...])
        weights = sigmoid(z * float(module.scale[...][0]) + np.asarray(module.base[...])) + EPS
        np.testing.assert_allclose(got[i], weights @ x[i], atol=1e-5, rtol=1e-5)


def test_bfloat16_streams_are_mixed_in_float32():
    module = randomised(HyperConnection(CONFIG, nnx.Rngs(0)))
    x = jnp.asarray(streams(4)).astype(jnp.bfloat16)
    collapsed, mix = module(x)
    exact, exact_mix = module(x.astype(jnp.float32))
    assert collapsed.dtype == jnp.bfloat16
    assert mix.comb.dtype == mix.post.dtype == jnp.float32
    np.testing.assert_array_equal(collapsed, exact.astype(jnp.bfloat16))
    np.testing.assert_array_equal(mix.comb, exact_mix.comb)
    y = collapsed * 2
    left = module.leave(x, y, mix)
    wide = module.leave(x.astype(jnp.float32), y.astype(jnp.float32), mix)
    np.testing.assert_array_equal(left, wide.astype(jnp.bfloat16))
