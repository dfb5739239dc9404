"""The TPU kernels of moves, interpreted, against XLA's, with no two copies that race."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.interpreting import checked
from pallas_kernels.moves.api import gather_blocks, scatter_blocks

QUICK = {"xla_backend_optimization_level": 0}
"""Compiling the interpreter is most of the time."""
SHAPES = [((4, 128), np.float32), ((1, 512), np.uint16), ((3, 72), np.uint8)]


def interpret(move, *arrays):
    with checked():
        got = np.asarray(
            jax.jit(lambda *a: move(*a, implementation="tpu"), compiler_options=QUICK)(*arrays)
        )
    return got


def pool_of(shape, dtype, blocks=9, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (blocks, *shape)).astype(dtype)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize("places", [[], [8], [3, 0, 3, 7], [9, 2**31 - 1, 5]])
def test_a_gather_is_that_of_the_reference(shape, dtype, places):
    arrays = jnp.asarray(pool_of(shape, dtype)), jnp.asarray(places, jnp.int32)
    got = interpret(gather_blocks, *arrays)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, gather_blocks(*arrays, implementation="reference"))


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize("places", [[], [8], [9], [3, 2**31 - 1, 0, 9, 7]])
def test_a_scatter_is_that_of_the_reference(shape, dtype, places):
    blocks = pool_of(shape, dtype, len(places), seed=1)
    pool = jnp.asarray(pool_of(shape, dtype))
    arrays = pool, jnp.asarray(blocks), jnp.asarray(places, jnp.int32)
    got = interpret(scatter_blocks, *arrays)
    np.testing.assert_array_equal(got, scatter_blocks(*arrays, implementation="reference"))


def test_nan_bits_move_unchanged():
    bits = np.arange(9 * 4 * 128, dtype=np.uint32).reshape(9, 4, 128) | 0x7F800001
    pool = jnp.asarray(bits.view(np.float32))
    got = interpret(gather_blocks, pool, jnp.asarray([4, 2], jnp.int32))
    np.testing.assert_array_equal(got.view(np.uint32), bits[[4, 2]])


def test_the_scatter_writes_into_the_pool_it_is_given():
    """The pool is the operand that the result aliases; a copy of it would cost the whole pool."""
    shapes = ((9, 4, 128), (2, 4, 128))
    pool, blocks = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    places = jax.ShapeDtypeStruct((2,), jnp.int32)
    traced = jax.make_jaxpr(lambda *a: scatter_blocks(*a, implementation="tpu"))(
        pool, blocks, places
    )
    (call,) = (e for e in traced.eqns if e.primitive.name == "pallas_call")
    assert call.params["input_output_aliases"] == ((2, 0),)
