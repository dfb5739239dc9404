"""The exact selection of the TPU index kernel alone, on scores as they may be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_scores import tpu_topk
from pallas_kernels.index_scores.api import NO_ROW

K, CAPACITY = 130, 4 * tpu_topk.CHUNK


@functools.cache
def compiled():
    places = tpu_topk.cdiv(K, 128) * 128

    def kernel(visible, scores, out, keys, gathered):
        top = tpu_topk.order_keys(scores, keys, visible[0])
        cut = tpu_topk.kth_largest(keys, top, visible[0], K)
        out[...] = tpu_topk.compact(keys, cut, visible[0], gathered, places)

    return jax.jit(
        pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((1, places), jnp.int32),
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec()],
            scratch_shapes=[
                pltpu.VMEM((CAPACITY // 128, 128), jnp.int32),
                pltpu.VMEM((128, places), jnp.float32),
            ],
            interpret=pltpu.InterpretParams(),
        )
    )


def picked(scores):
    padded = np.full(CAPACITY, np.nan, np.float32)
    padded[: len(scores)] = scores
    visible = jnp.asarray([len(scores)], jnp.int32)
    got = compiled()(visible, jnp.asarray(padded.reshape(-1, 8, 128)))
    got = np.asarray(got)[0]
    assert (got[K:] == NO_ROW).all()
    return got[:K]


def best(scores):
    return np.sort(np.argsort(-scores.astype(np.float64), kind="stable")[:K])


SPREADS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "far apart": lambda rng, n: rng.normal(size=n) * 10.0 ** rng.integers(-38, 38, n),
    "tiny": lambda rng, n: rng.normal(size=n) * 1e-30,
    "few values": lambda rng, n: rng.integers(-2, 3, n),
    "negative": lambda rng, n: -rng.random(n) - 1,
    "one value": lambda rng, n: np.full(n, -7.5),
    "neighbours": lambda rng, n: 1 + rng.integers(0, 3, n) * 2.0**-23,
    "one large": lambda rng, n: np.where(np.arange(n) == n - 1, 1e30, -rng.random(n)),
}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("length", [131, 16384, 16385])
def test_the_k_largest_are_picked_with_ties_to_the_lowest(spread, length):
    rng = np.random.default_rng(length)
    scores = SPREADS[spread](rng, length).astype(np.float32)
    np.testing.assert_array_equal(picked(scores), best(scores))


def test_infinite_scores_are_ranked():
    scores = np.array([np.inf, 1, -np.inf, np.inf, 2] * 40, np.float32)
    np.testing.assert_array_equal(picked(scores), best(scores))


def test_negative_zero_is_zero():
    scores = np.where(np.arange(300) % 2 == 0, np.float32(-0.0), np.float32(0.0))
    np.testing.assert_array_equal(picked(scores), np.arange(K))


def test_many_rows_are_searched_in_fewer_bits_a_pass():
    length = tpu_topk.LONG + 5000
    scores = np.random.default_rng(1).normal(size=length).astype(np.float32)
    got = picked(scores)
    np.testing.assert_array_equal(got, best(scores))
    tied = np.round(scores * 2)
    np.testing.assert_array_equal(picked(tied), best(tied))
