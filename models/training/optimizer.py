"""Muon for matrices, AdamW for the rest."""

import functools
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

# Looked up rather than multiplied with features, or read as a vector: not matrices for Muon.
_NOT_MATRICES = ("embed", "head", "position_bias", "fn", "score", "weights")


@functools.cache
def make_optimizer(
    rate: float = 0.02, other_rate: float = 0.004, decay: float = 0.01, clip: float = 1.0
) -> optax.GradientTransformation:
    """Updates of unit schedule; the step multiplies them with the schedule's factor.

    ``rate`` is Muon's (root-mean-square of an update of a square matrix), ``other_rate`` AdamW's,
    ``decay`` the weight decay of matrices, ``clip`` the largest global norm of a gradient. Equal
    arguments give the same object, so that runs alike share one compiled step.
    """
    return optax.chain(
        optax.clip_by_global_norm(clip),
        muon(
            rate,
            beta=0.95,
            weight_decay=decay,
            adam_b1=0.9,
            adam_b2=0.98,
            adam_learning_rate=other_rate,
            muon_weight_dimension_numbers=muon_axes,
        ),
    )


def muon_axes(parameters: Any) -> Any:
    """Muon's matrix axes of each parameter, None for those left to AdamW.

    Stacked matrices (``[experts, in, out]``, ``[groups, in, out]``) are orthogonalised one by one.
    """

    def axes(path: tuple[Any, ...], leaf: jax.Array) -> MuonDimensionNumbers | None:
        names = [str(getattr(part, "key", getattr(part, "name", part))) for part in path]
        if leaf.ndim < 2 or any(name in _NOT_MATRICES for name in names):
            return None
        if "weight" in names:  # of a linear map: [out, in]
            return MuonDimensionNumbers(1, 0)
        return MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(axes, parameters)
