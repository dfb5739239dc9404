"""Models that ``compile_for.py`` knows by name, as data; no parameter is ever allocated."""

import dataclasses
import pathlib
from typing import Any

from hybridkv.errors import UserError
from models.deepseek_v4.config import DeepseekV4Config, load_config, parse_config
from models.deepseek_v4.toy import TOY

_V4 = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"factor": 16, "original_max_position_embeddings": 65536},
    "torch_dtype": "bfloat16",
}
"""What both releases share (their ``config.json``)."""
V4_FLASH: dict[str, Any] = {
    **_V4,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4],
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "index_topk": 512,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5,
}
V4_PRO: dict[str, Any] = {
    **_V4,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4],
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
}
_SMALL: dict[str, Any] = {
    **V4_FLASH,
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "num_attention_heads": 16,
    "q_lora_rank": 256,
    "o_lora_rank": 128,
    "n_routed_experts": 16,
    "moe_intermediate_size": 256,
    "num_hash_layers": 1,
}
"""All kinds of layers at the widths that kernels are made for, and little around them."""
_THIN: dict[str, Any] = {
    **V4_FLASH,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "n_routed_experts": 8,
    "num_hash_layers": 1,
}
"""Layers of V4-Flash at its own widths, few of them and with few experts: they fit any chip."""
_CONFIGS = {"small": _SMALL, "v4-flash-thin": _THIN, "v4-flash": V4_FLASH, "v4-pro": V4_PRO}
NAMED = ("toy", *_CONFIGS)


def model_config(
    name: str, *, layers: int | None = None, dtype: str | None = None
) -> DeepseekV4Config:
    """The config of a named model, or of a ``config.json``.

    Args:
      name: one of ``NAMED``, or the path of a config or its folder.
      layers: only the first so many.
      dtype: of activations and plain weights, instead of the config's.

    Raises:
      UserError: no such model.
    """
    if name == "toy":
        config = TOY
    elif name in NAMED:
        config = parse_config(_CONFIGS[name])
    elif pathlib.Path(name).exists():
        config = load_config(name)
    else:
        raise UserError(f"no model {name!r}: give one of {', '.join(NAMED)} or a config.json")
    if layers is not None:
        config = _first_layers(config, layers)
    return config if dtype is None else dataclasses.replace(config, dtype=dtype)


def _first_layers(config: DeepseekV4Config, layers: int) -> DeepseekV4Config:
    if not 1 <= layers <= config.layers:
        raise UserError(f"--layers {layers}: the model has {config.layers}")
    return dataclasses.replace(
        config,
        layer_kinds=config.layer_kinds[:layers],
        layer_ratios=config.layer_ratios[:layers],
        hash_layers=config.hash_layers[:layers],
    )
