"""Without an accelerator: the steps lower for TPU and GPU, and other dtypes are as exact."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy import TOY, decode, digest, empty_cache, prefill, prompt, toy_model, toy_options

from hybridkv.engine.steps import Steps, idle_decode, idle_tile
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity
from models.deepseek_v4.parallel import parallel_forward
from models.deepseek_v4.runtime import DeepseekV4Runtime

BFLOAT16 = dataclasses.replace(TOY, dtype="bfloat16")


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("config", [TOY, BFLOAT16], ids=["float32", "bfloat16"])
def test_both_steps_lower_for_accelerators(platform, config):
    """A weak check (lowering is not compiling): no operation is missing there."""
    runtime = DeepseekV4Runtime(toy_model(config))
    options = toy_options(lanes=2, sequential=False, all_logits=False)
    capacity = Capacity.for_tokens(runtime.geometry, tokens=256, slots=2)
    cache = Cache.abstract(runtime.geometry, capacity)
    for step, batch in (
        (runtime.tile_step, idle_tile(options, 2)),
        (runtime.decode_step, idle_decode(2)),
    ):
        traced = jax.jit(step, static_argnums=3).trace(runtime.params, batch, cache, options)
        assert "stablehlo.while" in traced.lower(lowering_platforms=(platform,)).as_text()


def test_a_bfloat16_model_is_exact_and_close_to_the_whole_sequence():
    model = toy_model(BFLOAT16)
    runtime = DeepseekV4Runtime(model)
    assert runtime.geometry.row_format.name == "bfloat16"
    steps = Steps(runtime, toy_options())
    ids = prompt(75)
    runs = []
    for tokens in (115, 512):
        logits, cache = prefill(steps, empty_cache(steps, tokens=tokens), ids)
        runs.append(digest(logits) + digest(decode(steps, cache, prompt(20, 1))[0]))
    assert runs[0] == runs[1]
    graph, state = nnx.split(model)
    whole = jax.jit(lambda s, t: parallel_forward(nnx.merge(graph, s), t)[0])(
        state, jnp.asarray(ids[None])
    )
    # Rounding flips picks and experts of a random model now and then: most tokens must agree.
    apart = np.abs(np.asarray(whole[0]) - logits).max(axis=1)
    assert np.median(apart) < 0.15
