"""The TOY model in the tests' hands: steps, prompts, digests."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from hybridkv.engine.steps import Steps, prompt_tiles
from hybridkv.formats import RowFormat
from hybridkv.state.batch import DecodeBatch, StepOptions
from hybridkv.state.cache import Cache, assign_in_order
from hybridkv.state.capacity import Capacity
from models.deepseek_v4.runtime import DeepseekV4Runtime
from models.deepseek_v4.toy import TOY, toy_model


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
