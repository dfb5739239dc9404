"""What every implementation of moves must do, against XLA's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.moves.api import gather_blocks, scatter_blocks

Interpret = Callable[..., np.ndarray]
"""Runs a move with its arrays by the implementation under test."""


def pool_of(shape: tuple[int, int], dtype: Any, blocks: int = 9, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (blocks, *shape)).astype(dtype)


def check_gather(
    interpret: Interpret, shape: tuple[int, int], dtype: Any, places: list[int]
) -> None:
    arrays = jnp.asarray(pool_of(shape, dtype)), jnp.asarray(places, jnp.int32)
    got = interpret(gather_blocks, *arrays)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, gather_blocks(*arrays, implementation="reference"))


def check_scatter(
    interpret: Interpret, shape: tuple[int, int], dtype: Any, places: list[int]
) -> None:
    blocks = pool_of(shape, dtype, len(places), seed=1)
    pool = jnp.asarray(pool_of(shape, dtype))
    arrays = pool, jnp.asarray(blocks), jnp.asarray(places, jnp.int32)
    got = interpret(scatter_blocks, *arrays)
    np.testing.assert_array_equal(got, scatter_blocks(*arrays, implementation="reference"))


def check_nan_bits(interpret: Interpret, shape: tuple[int, int]) -> None:
    bits = np.arange(9 * shape[0] * shape[1], dtype=np.uint32).reshape(9, *shape) | 0x7F800001
    pool = jnp.asarray(bits.view(np.float32))
    got = interpret(gather_blocks, pool, jnp.asarray([4, 2], jnp.int32))
    np.testing.assert_array_equal(got.view(np.uint32), bits[[4, 2]])


def check_in_place(implementation: str) -> None:
    """The pool is the operand that the result aliases; a copy of it would cost the whole pool."""
    pool, blocks = (jax.ShapeDtypeStruct((n, 4, 128), jnp.float32) for n in (9, 2))
    places = jax.ShapeDtypeStruct((2,), jnp.int32)
    traced = jax.make_jaxpr(lambda *a: scatter_blocks(*a, implementation=implementation))(
        pool, blocks, places
    )
    (call,) = (e for e in traced.eqns if e.primitive.name == "pallas_call")
    assert call.params["input_output_aliases"] == ((2, 0),)
