"""Where the parameters of a DeepSeek-V4 stand on a mesh; XLA's partitioner does the rest.

Each matrix is split along its outputs (heads, vocabulary, channels), never along what its product
sums over: activations, which are small in a decode step, are what is gathered. Experts are split
inside each expert, so that every device works on every token whatever is picked, and a traced
expert number never indexes a split axis.

The partitioner still splits the sums of norms and of index heads, whose terms stand apart: bits
depend on the mesh, which is part of a prefix's identity.
"""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from models.deepseek_v4.model import DeepseekV4

DEFAULT_RULES: Mapping[str, str] = {
    "heads": "model",
    "index_heads": "model",
    "vocab": "model",
    "outputs": "model",
    "experts": "expert",
}
"""Logical axis to mesh axis, as ``hybridkv.state.leaf.DEFAULT_RULES`` is for the cache. A mesh
without one of these axes leaves it whole."""

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


def shardings(
    model: DeepseekV4, mesh: jax.sharding.Mesh, rules: Mapping[str, str] = DEFAULT_RULES
) -> Any:
    """A ``NamedSharding`` for each parameter of ``model``, which may be abstract.

    An axis that the mesh axis does not divide stays whole.

    Args:
      model: the module, or what ``nnx.eval_shape`` makes of it.
      mesh: of axes named in ``rules``.
      rules: logical axis to mesh axis.

    Returns:
      A tree like ``nnx.state(model)``; its leaves stand in the order of ``ModuleRuntime.params``.
    """

    def one(path: tuple[Any, ...], parameter: Any) -> jax.sharding.NamedSharding:
        axes = [rules.get(axis) if axis else None for axis in logical_axes(path, parameter.ndim)]
        spec = [
            axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None
            for axis, size in zip(axes, parameter.shape, strict=True)
        ]
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    state = nnx.state(model)
    flat = [(path, one(path, parameter)) for path, parameter in nnx.to_flat_state(state)]
    leaves = [value for _, value in flat]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)
