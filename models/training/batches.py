"""Batches: plays, and plays with the recall task, as a function of the step alone.

Nothing is remembered between steps, so a resumed run sees the batches that it would have seen.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from models.training.recall import RecallTask, plant


class Batch(NamedTuple):
    """What one step learns from."""

    tokens: np.ndarray
    """int32 ``[b, length + 1]``: inputs, and their successors one place on."""
    weights: np.ndarray
    """float32 ``[b, length]``: what each prediction counts."""
    answers: np.ndarray
    """bool ``[b, length]``: whether the prediction is the answer to a query."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Shape and mixture of the batches."""

    size: int = 4
    length: int = 1024
    """Tokens a sequence."""
    recall_share: float = 0.5
    """Share of the sequences that carry the recall task."""
    answer_weight: float = 4.0
    """What an answer counts, where a byte of the play counts 1."""
    task: RecallTask = dataclasses.field(
        default_factory=lambda: RecallTask(facts=16, fewest=1, queries=64)
    )
    """Few facts are easy, which is where recall begins; many queries make it learn sooner."""


def make_batch(text: np.ndarray, step: int, options: BatchOptions, seed: int = 0) -> Batch:
    """The batch of ``step``, from uint8 ``text``."""
    generator = np.random.default_rng((seed, step))
    length = options.length + 1
    tokens = np.empty((options.size, length), np.int32)
    weights = np.ones((options.size, length), np.float32)
    answers = np.zeros((options.size, length), bool)
    # Dealt out over the steps, not drawn: every step has its share, give or take one sequence.
    first = int(step * options.size * options.recall_share)
    carriers = int((step + 1) * options.size * options.recall_share) - first
    for row in range(options.size):
        start = int(generator.integers(0, len(text) - length))
        piece = text[start : start + length]
        if row >= carriers:
            tokens[row] = piece
            continue
        sequence = plant(piece, length, options.task, generator)
        tokens[row] = sequence.tokens
        weights[row, sequence.random] = 0.0
        weights[row, sequence.answers] = options.answer_weight
        answers[row, sequence.answers] = True
    return Batch(tokens, weights[:, 1:], answers[:, 1:])
