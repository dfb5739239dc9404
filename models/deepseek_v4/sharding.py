"""Where the parameters of a DeepSeek-V4 stand on a mesh.

Each matrix is split along its outputs (heads, vocabulary, channels), never along what its product
sums over: activations, which are small in a decode step, are what is gathered. Experts are split
inside each expert, so that every device works on every token whatever is picked, and a traced
expert number never indexes a split axis.

XLA's partitioner does the rest. Trace a step under the mesh (``jax.set_mesh``, axes of type Auto):
then kernels are split (``hybridkv.state.per_device``), and what a product gives is gathered before
anything sums over it (``models.common.gathered``). Otherwise the partitioner splits the sums of
norms and of index heads too, and there are no kernels. Bits depend on the mesh, which is part of a
prefix's identity.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from models.deepseek_v4.model import DeepseekV4

Rules = Mapping[str, str | tuple[str, ...]]
"""Logical axis to a mesh axis, or to several."""
DEFAULT_RULES: Rules = {
    "heads": "model",
    "index_heads": "model",
    "vocab": "model",
    "outputs": "model",
    "experts": "expert",
}
"""As ``hybridkv.state.leaf.DEFAULT_RULES`` is for the cache. A mesh without an axis leaves it
whole."""
SPREAD_RULES: Rules = {
    name: ("data", "model") if axis == "model" else axis for name, axis in DEFAULT_RULES.items()
}
"""Matrices are split over the devices that share out the sequences too, rather than copied to each
group of them: for models that are large beside their batch."""

AXES: Mapping[tuple[str, ...], tuple[str | None, ...]] = {
    ("embed",): ("vocab", None),
    ("head", "weight"): ("vocab", None),
    ("attention", "q_a", "weight"): ("outputs", None),
    ("attention", "q_b", "weight"): ("heads", None),
    ("attention", "kv", "weight"): ("outputs", None),
    ("attention", "o_a"): (None, "outputs", None),
    ("attention", "o_b", "weight"): ("outputs", None),
    ("indexer", "q_b", "weight"): ("index_heads", None),
    ("indexer", "weights", "weight"): ("index_heads", None),
    ("compressor", "kv", "weight"): ("outputs", None),
    ("compressor", "gate", "weight"): ("outputs", None),
    ("experts", "up"): ("experts", "outputs", None),
    ("experts", "down"): ("experts", "outputs", None),
    ("experts", "shared_up", "weight"): ("outputs", None),
    ("experts", "shared_down", "weight"): ("outputs", None),
    ("gate", "score", "weight"): ("outputs", None),
}
"""Logical axes of a parameter by the end of its path. All others (norms, biases, hyper-connections,
sinks, tables of the hash layers) are small and stand whole on every device."""


def logical_axes(path: tuple[Any, ...], rank: int) -> tuple[str | None, ...]:
    """Logical name of each axis of the parameter at ``path``; all None where it is not split."""
    names = tuple(str(part) for part in path)
    for end, axes in AXES.items():
        if names[-len(end) :] == end:
            return axes
    return (None,) * rank


def shardings(model: DeepseekV4, mesh: jax.sharding.Mesh, rules: Rules = DEFAULT_RULES) -> Any:
    """A ``NamedSharding`` for each parameter of ``model``, which may be abstract.

    An axis that the mesh axis does not divide stays whole.

    Args:
      model: the module, or what ``nnx.eval_shape`` makes of it.
      mesh: of axes named in ``rules``.
      rules: which of them each logical axis is split over.

    Returns:
      A tree like ``nnx.state(model)``; its leaves stand in the order of ``ModuleRuntime.params``.
    """

    def one(path: tuple[Any, ...], parameter: Any) -> jax.sharding.NamedSharding:
        logical = logical_axes(path, parameter.ndim)
        spec = [
            _mesh_axes(rules.get(axis) if axis else None, size, mesh)
            for axis, size in zip(logical, parameter.shape, strict=True)
        ]
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    state = nnx.state(model)
    flat = [(path, one(path, parameter)) for path, parameter in nnx.to_flat_state(state)]
    leaves = [value for _, value in flat]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def _mesh_axes(
    axes: str | tuple[str, ...] | None, size: int, mesh: jax.sharding.Mesh
) -> str | tuple[str, ...] | None:
    """Those of ``axes`` that the mesh has, if together they divide ``size``."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    there = tuple(name for name in names if name in mesh.shape)
    if not there or size % math.prod(mesh.shape[name] for name in there):
        return None
    return there[0] if len(there) == 1 else there
