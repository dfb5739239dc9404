"""One training step: next-byte loss, the indexer's loss, and expert balancing beside the gradient.

Sources: DeepSeek-V3.2 (indexer trained by KL towards the attention it feeds, apart from the rest of
the model), DeepSeek-V3 (balancing by a bias, ``noaux_tc``).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.parallel import Observed, ParallelOptions, observed_forward

Parameters = Any
"""A flax state: a pytree of arrays under the model's attribute names."""


class TrainState(NamedTuple):
    """Everything that a checkpoint holds beside the step number."""

    parameters: Parameters
    """What gradients reach."""
    biases: Parameters
    """Balancing biases of the experts, float32 ``[experts]`` a routed layer."""
    optimizer: Any


class StepMetrics(NamedTuple):
    """float32 scalars of one step."""

    loss: jax.Array
    """Mean cross entropy of play bytes, nats a byte."""
    answer_loss: jax.Array
    """Mean cross entropy of recall answers, nats; NaN without any."""
    answer_accuracy: jax.Array
    """Share of recall answers whose byte is the likeliest; NaN without any."""
    indexer_loss: jax.Array
    """Mean KL a query, nats, over the routed layers."""
    imbalance: jax.Array
    """Largest load of an expert over the mean load, of the worst layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Static choices of a step."""

    forward: ParallelOptions = dataclasses.field(
        default_factory=lambda: ParallelOptions(
            indexer_loss=True, indexer_stride=4, dense_experts=True
        )
    )
    indexer_weight: float = 0.5
    balance_rate: float = 0.002
    """How far a bias moves a step towards expert balance; scores are of order 1."""


def is_bias(path: tuple[Any, ...], _: Any) -> bool:
    """Whether a variable is a balancing bias (a filter for ``nnx.split``)."""
    return tuple(path[-2:]) == ("gate", "bias")


def split_model(model: DeepseekV4) -> tuple[nnx.GraphDef[DeepseekV4], Parameters, Parameters, Any]:
    """The model as graph, parameters, biases, and constants (the hash layers' tables)."""
    parts: Any = nnx.split(model, is_bias, nnx.Param, ...)
    graph, biases, parameters, constants = parts
    return graph, parameters, biases, constants


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def train_step(
    graph: nnx.GraphDef[DeepseekV4],
    optimizer: optax.GradientTransformation,
    options: StepOptions,
    state: TrainState,
    constants: Parameters,
    tokens: Int[Array, "b length"],
    weights: Float[Array, "b t"],
    answers: Bool[Array, "b t"],
    rate: Float[Array, ""],
) -> tuple[TrainState, StepMetrics]:
    """The state after one step, and what to report. DONATES state.

    ``tokens`` are int32 ``[b, t + 1]``, ``weights`` float32 and ``answers`` bool ``[b, t]``, as in
    a ``Batch``; ``rate`` is the schedule's factor, float32.
    """

    def loss(parameters: Parameters) -> tuple[jax.Array, tuple[StepMetrics, Any]]:
        model = nnx.merge(graph, state.biases, parameters, constants)
        observed = observed_forward(model, tokens[:, :-1], options.forward)
        total, metrics = _losses(observed, tokens[:, 1:], weights, answers)
        total = total + options.indexer_weight * metrics.indexer_loss
        return total, (metrics, observed.loads)

    gradients, (metrics, loads) = jax.grad(loss, has_aux=True)(state.parameters)
    # Optax promotes dtypes and ranks as it likes; our own arithmetic may be held to more.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, moments = optimizer.update(gradients, state.optimizer, state.parameters)
    updates = jax.tree.map(lambda u: u * rate.astype(u.dtype), updates)
    parameters = optax.apply_updates(state.parameters, updates)
    biases = _balance(state.biases, loads, options.balance_rate)
    return TrainState(parameters, biases, moments), metrics


def _losses(
    observed: Observed,
    targets: Int[Array, "b t"],
    weights: Float[Array, "b t"],
    answers: Bool[Array, "b t"],
) -> tuple[jax.Array, StepMetrics]:
    """The weighted cross entropy, and what to report of it."""
    terms = optax.softmax_cross_entropy_with_integer_labels(observed.logits, targets)
    plain = jnp.where(answers, 0.0, jnp.minimum(weights, 1.0))
    asked = answers.astype(jnp.float32)
    right = jnp.argmax(observed.logits, axis=-1) == targets
    # Divided by the number of bytes, not by the weights' sum: a sequence with answers then adds
    # its answers' gradient instead of taking weight from the play.
    total = jnp.sum(terms * weights) / terms.size
    divergence, queries = jnp.zeros(()), jnp.ones(())
    for part in observed.losses:
        if part is not None:
            divergence = divergence + part.divergence
            queries = queries + part.queries.astype(jnp.float32)
    return total, StepMetrics(
        loss=jnp.sum(terms * plain) / jnp.sum(plain),
        answer_loss=jnp.sum(terms * asked) / jnp.sum(asked),
        answer_accuracy=jnp.sum(jnp.where(right, asked, 0.0)) / jnp.sum(asked),
        indexer_loss=divergence / queries,
        imbalance=jnp.max(jnp.stack(observed.loads)) * observed.loads[0].shape[0],
    )


def _balance(biases: Parameters, loads: tuple[jax.Array, ...], rate: float) -> Parameters:
    """Each bias moved by ``rate`` towards balance: up where an expert has less than its share."""

    def moved(path: tuple[Any, ...], bias: jax.Array) -> jax.Array:
        load = loads[_layer(path)]
        return bias + rate * jnp.sign(jnp.mean(load) - load)

    return jax.tree_util.tree_map_with_path(moved, biases)


def _layer(path: tuple[Any, ...]) -> int:
    keys: list[Any] = [getattr(part, "key", None) for part in path]
    return int(keys[keys.index("blocks") + 1])
