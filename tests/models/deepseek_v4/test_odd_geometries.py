"""Ratios, windows and layer kinds are data: cached steps agree with the whole sequence at any."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy import TOY, decode, empty_cache, prefill, prompt, toy_model, toy_options

from hybridkv.engine.steps import Steps
from models.deepseek_v4.config import HEAVY, SLIDING, SPARSE
from models.deepseek_v4.parallel import parallel_forward
from models.deepseek_v4.runtime import DeepseekV4Runtime

CASES = {
    "windows only": {"layer_kinds": (SLIDING,) * 2, "layer_ratios": (0, 0), "window": 5},
    "ratios without a common factor, wide window, one pick": {
        "layer_kinds": (SPARSE, HEAVY),
        "layer_ratios": (3, 7),
        "window": 33,
        "index_topk": 1,
    },
    "window of one token, one stream": {
        "layer_kinds": (SPARSE, HEAVY, SLIDING),
        "layer_ratios": (4, 6, 0),
        "window": 1,
        "streams": 1,
    },
}


@pytest.mark.parametrize("case", CASES, ids=[name.replace(" ", "_") for name in CASES])
def test_cached_steps_agree_with_the_whole_sequence(case):
    changes = CASES[case]
    hashed = (False,) * len(changes["layer_kinds"])
    model = toy_model(dataclasses.replace(TOY, hash_layers=hashed, **changes))
    runtime = DeepseekV4Runtime(model)
    block = runtime.geometry.block_tokens
    steps = Steps(runtime, toy_options(tile=block * max(24 // block, 1)))
    ids = prompt(90)
    graph, state = nnx.split(model)
    forward = jax.jit(lambda s, t: parallel_forward(nnx.merge(graph, s), t)[0])
    whole = np.asarray(forward(state, jnp.asarray(ids[None])))[0]
    tiled, _ = prefill(steps, empty_cache(steps), ids)
    np.testing.assert_allclose(tiled, whole, atol=2e-5)
    start, cache = prefill(steps, empty_cache(steps), ids[:31])
    after, _ = decode(steps, cache, ids[31:])
    np.testing.assert_allclose(np.concatenate([start, after]), whole, atol=2e-5)
