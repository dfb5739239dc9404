"""The TOY model: every part of the architecture, small enough to verify a device in seconds.

Window 8; ratio 4 with overlap and an indexer (2 picks); ratio 16 without; blocks of 16 tokens.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.deepseek_v4.config import HEAVY, SLIDING, SPARSE, DeepseekV4Config, Rope
from models.deepseek_v4.model import DeepseekV4

TOY = DeepseekV4Config(
    vocab_size=64,
    hidden_size=32,
    layer_kinds=(SLIDING, SPARSE, HEAVY, SPARSE),
    layer_ratios=(0, 4, 16, 4),
    hash_layers=(True, False, False, False),
    heads=4,
    head_dim=16,
    rope_dim=8,
    query_rank=16,
    output_groups=2,
    output_rank=8,
    window=8,
    index_heads=8,
    index_dim=16,
    index_topk=2,
    experts=4,
    experts_per_token=2,
    shared_experts=1,
    expert_dim=16,
    route_scale=1.5,
    normalize_route=True,
    swiglu_limit=10.0,
    streams=2,
    sinkhorn_steps=4,
    stream_eps=1e-6,
    norm_eps=1e-6,
    rope=Rope(theta=10000.0),
    compressed_rope=Rope(theta=160000.0),
)
WIDE_TOY = dataclasses.replace(
    TOY,
    layer_kinds=TOY.layer_kinds[:3],
    layer_ratios=TOY.layer_ratios[:3],
    hash_layers=TOY.hash_layers[:3],
    head_dim=128,
    rope_dim=64,
    index_dim=128,
)
"""One layer of each kind, whose rows fill the groups of channels that packed formats scale."""


def toy_model(config: DeepseekV4Config = TOY, seed: int = 0) -> DeepseekV4:
    """A random model in which no parameter has its neutral initial value."""
    model = DeepseekV4(config, nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        noise = rng.normal(size=parameter.shape).astype(np.float32)
        noise = jnp.asarray(0.3 * noise * _scale(path, parameter.shape)).astype(parameter.dtype)
        parameter[...] = parameter[...] + noise
    return model


def _scale(path: tuple[object, ...], shape: tuple[int, ...]) -> float:
    if len(shape) < 2:
        return 1.0
    outputs_first = path[-1] in ("weight", "o_a", "up", "down")
    return shape[-1 if outputs_first else -2] ** -0.5
