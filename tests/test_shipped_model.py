"""The model that the repository ships: text it reads well, and rows and picks it really uses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from places import REPOSITORY
from toy import empty_cache, prefill

from hybridkv.engine.steps import Steps
from hybridkv.state.batch import StepOptions
from models.deepseek_v4.checkpoint import load_model
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.runtime import DeepseekV4Runtime
from models.training import corpus
from models.training.evaluate import without_compressed_rows, without_indexer
from models.training.recall import RecallTask, plant

CONTEXT = 1024
FAR = 128
"""Tokens: four windows, further back than a window reaches in any layer but by compressed rows."""


@pytest.fixture(scope="module")
def model() -> DeepseekV4:
    return load_model(REPOSITORY / "data" / "shakespeare")


@pytest.fixture(scope="module")
def steps(model) -> Steps:
    return Steps(DeepseekV4Runtime(model), StepOptions(tile=128, sequential=True, all_logits=True))


def logits_of(steps: Steps, model: DeepseekV4, rows: np.ndarray) -> np.ndarray:
    """Logits ``[rows, CONTEXT, 256]`` of the cached tile step, with parameters of ``model``."""
    steps.model.params = jax.tree.leaves(nnx.state(model))
    out = []
    for row in rows:
        cache = empty_cache(steps, tokens=CONTEXT)
        out.append(prefill(steps, cache, row.astype(np.int32))[0])
    return np.stack(out)


def test_bits_per_byte_of_held_out_plays(steps, model):
    text = corpus.held_out_bytes()
    starts = np.linspace(0, len(text) - CONTEXT, 12).astype(int)
    rows = np.stack([text[s : s + CONTEXT] for s in starts])
    logits = jnp.asarray(logits_of(steps, model, rows)[:, :-1])
    right = jnp.asarray(rows[:, 1:].astype(np.int32))[..., None]
    score = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), right, axis=-1)
    assert -float(score.mean()) / math.log(2) <= 2.2


def test_far_recall_needs_compressed_rows_and_indexer(steps, model):
    text, random = corpus.held_out_bytes(), np.random.default_rng(0)
    starts = random.integers(0, len(text) - CONTEXT, 10)
    planted = [plant(text[s : s + CONTEXT], CONTEXT, RecallTask(), random) for s in starts]
    rows = np.stack([p.tokens for p in planted])

    def far_recall(variant: DeepseekV4) -> float:
        best = logits_of(steps, variant, rows).argmax(-1)
        hits = [
            best[i, p.answers[p.distances >= FAR] - 1] == p.tokens[p.answers[p.distances >= FAR]]
            for i, p in enumerate(planted)
        ]
        return float(np.concatenate(hits).mean())

    whole = far_recall(model)
    assert whole >= 0.8
    assert far_recall(without_compressed_rows(model)) <= 0.3
    assert far_recall(without_indexer(model)) <= whole - 0.1
