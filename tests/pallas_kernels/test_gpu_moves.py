"""The GPU programs of moves, interpreted, against XLA's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_bounds import watch
from moves_cases import check_gather, check_in_place, check_nan_bits, check_scatter

from pallas_kernels.interpreting import interpreted
from pallas_kernels.moves import gpu
from pallas_kernels.tuning.table import trying

SHAPES = [((4, 30), np.float32), ((1, 512), np.uint16), ((3, 72), np.uint8)]


@pytest.fixture(autouse=True)
def bounded(monkeypatch):
    watch(monkeypatch, gpu)


def interpret(move, *arrays):
    """Several programs a block, the last of them not full."""
    with interpreted(True), trying("moves/gpu", part_bytes=128):
        return np.asarray(jax.jit(lambda *a: move(*a, implementation="gpu"))(*arrays))


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize("places", [[], [3, 0, 3, 9, 2**31 - 1, 8]])
def test_a_gather_is_that_of_the_reference(shape, dtype, places):
    check_gather(interpret, shape, dtype, places)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize("places", [[], [9], [3, 2**31 - 1, 0, 9, 8]])
def test_a_scatter_is_that_of_the_reference(shape, dtype, places):
    check_scatter(interpret, shape, dtype, places)


def test_nan_bits_move_unchanged():
    check_nan_bits(interpret, (4, 30))


def test_the_scatter_writes_into_the_pool_it_is_given():
    check_in_place("gpu")


def test_a_pool_that_cannot_be_addressed_is_refused_with_the_reason():
    places = jax.ShapeDtypeStruct((2,), jnp.int32)
    for blocks, reason in ((0, "without blocks"), (2**21, "2 to 4 GiB")):
        pool = jax.ShapeDtypeStruct((blocks, 2, 512), jnp.uint8)
        with pytest.raises(NotImplementedError, match=reason):
            jax.eval_shape(gpu.gather_blocks, pool, places)
