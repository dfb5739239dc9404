"""The GPU programs of moves, interpreted, against XLA's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_bounds import watch

from pallas_kernels.interpreting import interpreted
from pallas_kernels.moves import gpu
from pallas_kernels.moves.api import gather_blocks, scatter_blocks
from pallas_kernels.tuning.table import trying

SHAPES = [((4, 30), np.float32), ((1, 512), np.uint16), ((3, 72), np.uint8)]


@pytest.fixture(autouse=True)
def bounded(monkeypatch):
    watch(monkeypatch, gpu)


def interpret(move, *arrays):
    """Several programs a block, the last of them not full."""
    with interpreted(True), trying("moves/gpu", part_bytes=128):
        return np.asarray(jax.jit(lambda *a: move(*a, implementation="gpu"))(*arrays))


def pool_of(shape, dtype, blocks=9, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (blocks, *shape)).astype(dtype)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize("places", [[], [3, 0, 3, 9, 2**31 - 1, 8]])
def test_a_gather_is_that_of_the_reference(shape, dtype, places):
    arrays = jnp.asarray(pool_of(shape, dtype)), jnp.asarray(places, jnp.int32)
    got = interpret(gather_blocks, *arrays)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, gather_blocks(*arrays, implementation="reference"))


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize("places", [[], [9], [3, 2**31 - 1, 0, 9, 8]])
def test_a_scatter_is_that_of_the_reference(shape, dtype, places):
    blocks = pool_of(shape, dtype, len(places), seed=1)
    pool = jnp.asarray(pool_of(shape, dtype))
    arrays = pool, jnp.asarray(blocks), jnp.asarray(places, jnp.int32)
    got = interpret(scatter_blocks, *arrays)
    np.testing.assert_array_equal(got, scatter_blocks(*arrays, implementation="reference"))


def test_nan_bits_move_unchanged():
    bits = np.arange(9 * 4 * 30, dtype=np.uint32).reshape(9, 4, 30) | 0x7F800001
    pool = jnp.asarray(bits.view(np.float32))
    got = interpret(gather_blocks, pool, jnp.asarray([4, 2], jnp.int32))
    np.testing.assert_array_equal(got.view(np.uint32), bits[[4, 2]])


def test_the_scatter_writes_into_the_pool_it_is_given():
    """The pool is the operand that the result aliases; a copy of it would cost the whole pool."""
    pool, blocks = (jax.ShapeDtypeStruct((n, 4, 128), jnp.float32) for n in (9, 2))
    places = jax.ShapeDtypeStruct((2,), jnp.int32)
    traced = jax.make_jaxpr(lambda *a: scatter_blocks(*a, implementation="gpu"))(
        pool, blocks, places
    )
    (call,) = (e for e in traced.eqns if e.primitive.name == "pallas_call")
    assert call.params["input_output_aliases"] == ((2, 0),)


def test_a_pool_that_cannot_be_addressed_is_refused_with_the_reason():
    places = jax.ShapeDtypeStruct((2,), jnp.int32)
    for blocks, reason in ((0, "without blocks"), (2**21, "2 to 4 GiB")):
        pool = jax.ShapeDtypeStruct((blocks, 2, 512), jnp.uint8)
        with pytest.raises(NotImplementedError, match=reason):
            jax.eval_shape(gpu.gather_blocks, pool, places)
