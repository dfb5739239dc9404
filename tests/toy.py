"""The TOY model of the tests: every part of the architecture, small enough to compile in seconds.

Window 8; ratio 4 with overlap and an indexer (2 picks); ratio 16 without; blocks of 16 tokens.
"""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hybridkv.engine.steps import Steps, prompt_tiles
from hybridkv.formats import RowFormat
from hybridkv.state.batch import DecodeBatch, StepOptions
from hybridkv.state.cache import Cache, assign_in_order
from hybridkv.state.capacity import Capacity
from models.deepseek_v4.config import HEAVY, SLIDING, SPARSE, DeepseekV4Config, Rope
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.runtime import DeepseekV4Runtime

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


def toy_runtime(format: RowFormat | None = None) -> DeepseekV4Runtime:
    return DeepseekV4Runtime(toy_model(), format=format)


def toy_options(**changes: object) -> StepOptions:
    options = StepOptions(
        tile=32, key_block=4, index_block=8, expert_rows=4, sequential=True, all_logits=True
    )
    return dataclasses.replace(options, **changes)


def empty_cache(steps: Steps, *, tokens: int = 128, slots: int = 1) -> Cache:
    geometry = steps.model.geometry
    capacity = Capacity.for_tokens(geometry, tokens=tokens, slots=slots)
    return assign_in_order(Cache.init(geometry, capacity))


def prefill(steps: Steps, cache: Cache, ids: np.ndarray, slot: int = 0) -> tuple[np.ndarray, Cache]:
    """Logits ``[tokens, vocab]`` (needs all_logits), and the cache after the prompt."""
    parts = []
    for batch in prompt_tiles(ids, slot, steps.options, cache.slots):
        logits, cache = steps.tile(batch, cache)
        parts.append(np.asarray(logits[0]))
    return np.concatenate(parts)[: len(ids)], cache


def decode(steps: Steps, cache: Cache, ids: np.ndarray, slot: int = 0) -> tuple[np.ndarray, Cache]:
    """Logits ``[tokens, vocab]`` after each of ``ids``, and the cache after the last."""
    rows = []
    active = jnp.arange(cache.slots) == slot
    for token in ids:
        tokens = jnp.full((cache.slots,), int(token), jnp.int32)
        logits, cache = steps.decode(DecodeBatch(tokens=tokens, active=active), cache)
        rows.append(np.asarray(logits[slot]))
    return np.stack(rows), cache


def prompt(length: int, seed: int = 0, vocab: int = TOY.vocab_size) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, length).astype(np.int32)


def digest(array: np.ndarray | jax.Array) -> str:
    """A digest of the very bits."""
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes()).hexdigest()
