"""The toy Llama of the tests, and the same function written out in float64 without a cache."""

import dataclasses

import numpy as np

from hybridkv.formats import RowFormat
from hybridkv.state.batch import StepOptions
from models.files import parameter_at
from models.llama.config import LlamaConfig
from models.llama.model import Llama
from models.llama.runtime import LlamaRuntime
from models.llama.toy import TOY_LLAMA, toy_llama
from models.llama.weights import places


def llama_runtime(config: LlamaConfig = TOY_LLAMA, format: RowFormat | None = None) -> LlamaRuntime:
    return LlamaRuntime(toy_llama(config), format=format)


def llama_options(**changes: object) -> StepOptions:
    options = StepOptions(tile=32, key_block=32, sequential=True, all_logits=True)
    return dataclasses.replace(options, **changes)


def dense_logits(model: Llama, ids: np.ndarray) -> np.ndarray:
    """float64 logits ``[tokens, vocab]``: every query against every key before it, no cache."""
    config = model.config
    weights = {
        place.name: np.asarray(parameter_at(model, place.path)[...], np.float64)
        for place in places(config)
    }

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weights[name]

    half = config.head_dim // 2
    frequency = config.rope_theta ** (-np.arange(half) / half)
    turn = np.exp(1j * np.arange(len(ids))[:, None] * frequency)[:, None]

    def heads(x, count):
        return x.reshape(len(ids), count, config.head_dim)

    def rotated(x):
        pairs = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    x = weights["model.embed_tokens.weight"][ids]
    future = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for layer in range(config.layers):

        def linear(y, name, layer=layer):
            return y @ weights[f"model.layers.{layer}.{name}.weight"].T

        y = norm(x, f"model.layers.{layer}.input_layernorm.weight")
        q = rotated(heads(linear(y, "self_attn.q_proj"), config.heads))
        k = rotated(heads(linear(y, "self_attn.k_proj"), config.kv_heads))
        v = heads(linear(y, "self_attn.v_proj"), config.kv_heads)
        out = np.empty_like(q)
        for head in range(config.heads):
            group = head // (config.heads // config.kv_heads)
            score = q[:, head] @ k[:, group].T / np.sqrt(config.head_dim) + future
            weight = np.exp(score - score.max(-1, keepdims=True))
            out[:, head] = weight / weight.sum(-1, keepdims=True) @ v[:, group]
        x = x + linear(out.reshape(len(ids), -1), "self_attn.o_proj")
        y = norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
        gate = linear(y, "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, "mlp.up_proj"), "mlp.down_proj")
    head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    return norm(x, "model.norm.weight") @ weights[head].T
