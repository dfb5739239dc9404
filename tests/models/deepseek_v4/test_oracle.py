"""Outside oracles: transformers' logits and those of the official release's code."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy import decode, empty_cache, prefill

from hybridkv.engine.steps import Steps
from hybridkv.state.batch import StepOptions
from models.deepseek_v4.checkpoint import load_model
from models.deepseek_v4.parallel import parallel_forward
from models.deepseek_v4.runtime import DeepseekV4Runtime

TOLERANCE = 1e-4
"""Two right float32 implementations differ by about 3e-5 where logits have a deviation of 2."""
TILES = {"tiny_a": 48, "tiny_c": 32, "tiny_d": 30}


@pytest.fixture(scope="module", params=TILES)
def given(request, oracles):
    """A model and what others computed for it."""
    folder = oracles / request.param
    arrays = {}
    for file in sorted(folder.glob("*.npz")):
        with np.load(file) as content:
            arrays |= {f"{file.stem}.{name}": content[name] for name in content}
    oracle = {name.removeprefix("oracle."): value for name, value in arrays.items()}
    return SimpleNamespace(
        model=load_model(folder),
        tile=TILES[request.param],
        prompt=oracle["input_ids"][0].astype(np.int32),
        ids=oracle["full_ids"][0].astype(np.int32),
        greedy=oracle["greedy_tokens"].astype(np.int32),
        prefill=oracle["prefill_logits"],
        decoded=oracle["decode_logits"],
        full=oracle["full_logits"],
        official=oracle.get("official_exact.full_logits"),
    )


@pytest.fixture(scope="module")
def steps(given):
    options = StepOptions(tile=given.tile, sequential=True, all_logits=True)
    return Steps(DeepseekV4Runtime(given.model), options)


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


def test_the_whole_sequence_at_once_has_the_oracles_logits(given):
    graph, state = nnx.split(given.model)

    @jax.jit
    def forward(state, tokens):
        with jax.default_matmul_precision("highest"):
            return parallel_forward(nnx.merge(graph, state), tokens)[0][0]

    logits = np.asarray(forward(state, jnp.asarray(given.ids[None])))
    close(logits, given.full)
    if given.official is not None:
        close(logits, given.official)
    start = len(given.prompt) - 1
    np.testing.assert_array_equal(logits[start:-1].argmax(axis=1), given.greedy)


def test_tile_by_tile_and_decoded_tokens_have_the_oracles_logits(given, steps):
    tokens = len(given.ids)
    whole, _ = prefill(steps, empty_cache(steps, tokens=tokens), given.ids)
    close(whole, given.full)
    if given.official is not None:
        close(whole, given.official)
    logits, cache = prefill(steps, empty_cache(steps, tokens=tokens), given.prompt)
    close(logits, given.prefill)
    after, _ = decode(steps, cache, given.greedy)
    close(after, given.decoded)
    likeliest = [logits[-1].argmax(), *after[:-1].argmax(axis=1)]
    np.testing.assert_array_equal(likeliest, given.greedy)


def test_the_official_code_was_asked_for_the_models_it_can_run(oracles):
    """Else the comparisons above would pass without having been made."""
    found = {file.parent.name for file in oracles.glob("*/official_exact.npz")}
    assert found == {"tiny_a", "tiny_c"}
