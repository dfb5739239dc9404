"""One declaration of every array, from which abstract, sharded and real arrays are made.

A pytree class declares its leaves once (``declare``); the trio ``abstract``, ``shardings`` and
``init`` maps over that, so that a cache can be sized, sharded, saved and restored without
allocating.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DEFAULT_RULES: Mapping[str, str] = {"slots": "data"}
"""Logical axis to mesh axis. Sequences are spread over ``data``; rows are shared by all sequences
and so stand whole on every device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array before it exists."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    """Logical name of each axis."""
    fill: int = 0
    """Initial value: finite, so that a stale read can be masked by selection."""

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{len(self.axes)} axis names for shape {self.shape}")


def placement() -> jax.sharding.Sharding:
    """Of whatever an engine owns on one device: committed to the default one from the start.

    What comes from other memories arrives committed; an executable that was compiled for arrays
    without a commitment would be compiled once more for it.
    """
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Leaf)


def abstract(declared: Any) -> Any:
    """The same tree of ``jax.ShapeDtypeStruct``."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), declared, is_leaf=_is_leaf
    )


def shardings(
    declared: Any, mesh: jax.sharding.Mesh, rules: Mapping[str, str] = DEFAULT_RULES
) -> Any:
    """The same tree of ``NamedSharding``; logical axes without a mesh axis are replicated, and so
    are those that their mesh axis does not divide.
    """

    def one(leaf: Leaf) -> jax.sharding.NamedSharding:
        axes = [rules.get(axis) if axis else None for axis in leaf.axes]
        spec = [
            axis if axis in mesh.axis_names and size % mesh.shape[axis] == 0 else None
            for axis, size in zip(axes, leaf.shape, strict=True)
        ]
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    return jax.tree.map(one, declared, is_leaf=_is_leaf)


def init(declared: Any, placement: Any | None = None) -> Any:
    """The same tree of arrays.

    ``placement`` is a sharding, or a tree of them as ``shardings`` makes it; without it arrays
    stand uncommitted on the default device.
    """
    arrays = jax.tree.map(lambda x: jnp.full(x.shape, x.fill, x.dtype), declared, is_leaf=_is_leaf)
    return arrays if placement is None else jax.device_put(arrays, placement)


def tree_bytes(declared: Any) -> int:
    """Bytes of all arrays of a declared tree."""
    leaves = jax.tree.leaves(declared, is_leaf=_is_leaf)
    return sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in leaves)
