"""What the model has learned: bits per byte on held-out plays, recall by distance."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models.deepseek_v4.attention import Attention
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.parallel import ParallelOptions, parallel_forward
from models.training.recall import RecallTask, plant

DISTANCES = (0, 32, 64, 128, 256, 512, 768, 1024)
"""Bounds of the distance classes of recall, tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Fixed conditions of an evaluation."""

    length: int = 1024
    """Tokens a sequence."""
    batch: int = 4
    sequences: int | None = None
    """Held-out sequences at most, spread evenly over the plays; None for all."""
    recall_sequences: int = 64
    task: RecallTask = dataclasses.field(default_factory=RecallTask)
    forward: ParallelOptions = dataclasses.field(
        default_factory=lambda: ParallelOptions(dense_experts=True)
    )


class RecallCell(NamedTuple):
    """Recall at one class of distances."""

    low: int
    high: int
    """Tokens from the fact's digit to the answer: ``low <= distance < high``."""
    asked: int
    accuracy: float
    """Share of answers whose byte is the likeliest; NaN if none was asked."""


def bits_per_byte(
    model: DeepseekV4, text: np.ndarray, options: EvaluationOptions = EvaluationOptions()
) -> float:
    """Mean bits a byte of uint8 ``text``, cut into sequences of ``options.length``.

    Each sequence starts from an empty context; its first byte is given, not predicted.
    """
    count = len(text) // options.length
    rows = text[: count * options.length].reshape(count, options.length).astype(np.int32)
    if options.sequences is not None and options.sequences < count:
        rows = rows[np.linspace(0, count - 1, options.sequences).astype(int)]
    total = 0.0
    for batch, used in _batches(rows, options.batch):
        terms, _ = _scored(model, batch, options.forward)
        total += float(np.sum(np.asarray(terms, np.float64)[:used]))
    return total / (len(rows) * (options.length - 1)) / math.log(2)


def recall_by_distance(
    model: DeepseekV4,
    text: np.ndarray,
    options: EvaluationOptions = EvaluationOptions(),
    seed: int = 0,
) -> list[RecallCell]:
    """Recall of facts planted into uint8 ``text``, by distance; chance is 10 %."""
    generator = np.random.default_rng(seed)
    length = options.length
    starts = generator.integers(0, len(text) - length, options.recall_sequences)
    planted = [plant(text[s : s + length], length, options.task, generator) for s in starts]
    rows = np.stack([sequence.tokens for sequence in planted]).astype(np.int32)
    right = np.concatenate(
        [
            np.asarray(_scored(model, batch, options.forward)[1])[:used]
            for batch, used in _batches(rows, options.batch)
        ]
    )
    distance = np.concatenate([sequence.distances for sequence in planted])
    hit = np.concatenate([right[row, sequence.answers - 1] for row, sequence in enumerate(planted)])
    cells = []
    for low, high in itertools.pairwise(DISTANCES):
        inside = (distance >= low) & (distance < high)
        accuracy = float(np.mean(hit[inside])) if inside.any() else math.nan
        cells.append(RecallCell(low, high, int(np.sum(inside)), accuracy))
    return cells


def without_compressed_rows(model: DeepseekV4) -> DeepseekV4:
    """A copy whose compressed rows are zero: keys and values that say nothing."""
    return _with_zeros(model, lambda a: a.compressor.norm.weight if a.compressor else None)


def without_indexer(model: DeepseekV4) -> DeepseekV4:
    """A copy whose index scores are all zero, so that the oldest rows are picked."""
    return _with_zeros(model, lambda a: a.indexer.weights.weight if a.indexer else None)


def _with_zeros(
    model: DeepseekV4, weight: Callable[[Attention], nnx.Param[jax.Array] | None]
) -> DeepseekV4:
    """A copy in which the weight is zero in every layer that has it."""
    copy = nnx.clone(model)
    for block in copy.blocks:
        found = weight(block.attention)
        if found is not None:
            found[...] = jnp.zeros_like(found[...])
    return copy


def _batches(rows: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Batches of one shape, the last filled up, with the number of true rows."""
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        yield np.concatenate([batch, np.repeat(batch[:1], size - len(batch), 0)]), len(batch)


def _scored(
    model: DeepseekV4, tokens: np.ndarray, forward: ParallelOptions
) -> tuple[jax.Array, jax.Array]:
    graph, state = nnx.split(model)
    return _score(graph, forward, state, tokens)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score(
    graph: nnx.GraphDef[DeepseekV4], forward: ParallelOptions, state: Any, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cross entropy (nats) and whether the likeliest byte is right, both ``[b, t - 1]``."""
    logits, _ = parallel_forward(nnx.merge(graph, state), tokens, forward)
    targets = tokens[:, 1:]
    terms = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], targets)
    return terms, jnp.argmax(logits[:, :-1], axis=-1) == targets
