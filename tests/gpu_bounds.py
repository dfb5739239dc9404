"""Interpreted GPU programs that go outside of an array spoil their result, as they do on a GPU.

The interpreter drops such stores and clamps such loads, so that a mask or a guard that is missing
would not be seen.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


class Bounded:
    """In place of ``plt`` in a module of programs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(plt, name)

    def load(self, ref: Any, *, mask: Any = None, other: Any = None) -> Any:
        value = plt.load(ref, mask=mask, other=other)
        return jnp.where(_outside(ref, mask), _other(value), value)

    def store(self, ref: Any, value: Any, *, mask: Any = None) -> None:
        plt.store(ref, value, mask=mask)
        whole, first = ref.ref, (0,) * len(ref.ref.shape)

        @pl.when(_outside(ref, mask))
        def _spoil() -> None:
            whole[first] = _other(whole[first])


def _outside(ref: Any, mask: Any) -> jax.Array:
    """Whether any number that is not masked lies outside."""
    wrong = jnp.asarray(False)
    for index, size in zip(ref.transforms[-1].indices, ref.ref.shape, strict=True):
        wrong = wrong | (jnp.asarray(index) < 0) | (jnp.asarray(index) >= size)
    return jnp.any(wrong if mask is None else wrong & mask)


def _other(value: Any) -> Any:
    one = jnp.ones((), value.dtype)
    return value + one if jnp.issubdtype(value.dtype, jnp.floating) else value ^ one


def watch(patch: pytest.MonkeyPatch, *modules: Any) -> None:
    """Loads and stores of the modules' programs must stay inside from now on."""
    for module in modules:
        patch.setattr(module, "plt", Bounded())
