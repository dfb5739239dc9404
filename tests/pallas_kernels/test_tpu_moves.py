"""The TPU kernels of moves, interpreted, against XLA's, with no two copies that race."""

import jax
import numpy as np
import pytest
from moves_cases import check_gather, check_in_place, check_nan_bits, check_scatter

from pallas_kernels.interpreting import checked

QUICK = {"xla_backend_optimization_level": 0}
"""Compiling the interpreter is most of the time."""
SHAPES = [((4, 128), np.float32), ((1, 512), np.uint16), ((3, 72), np.uint8)]


def interpret(move, *arrays):
    with checked():
        got = np.asarray(
            jax.jit(lambda *a: move(*a, implementation="tpu"), compiler_options=QUICK)(*arrays)
        )
    return got


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize("places", [[], [8], [3, 0, 3, 7], [9, 2**31 - 1, 5]])
def test_a_gather_is_that_of_the_reference(shape, dtype, places):
    check_gather(interpret, shape, dtype, places)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize("places", [[], [8], [9], [3, 2**31 - 1, 0, 9, 7]])
def test_a_scatter_is_that_of_the_reference(shape, dtype, places):
    check_scatter(interpret, shape, dtype, places)


def test_nan_bits_move_unchanged():
    check_nan_bits(interpret, (4, 128))


def test_the_scatter_writes_into_the_pool_it_is_given():
    check_in_place("tpu")
