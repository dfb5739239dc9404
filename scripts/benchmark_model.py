"""The random model that most benchmarks run: 43 M parameters, of the shape of DeepSeek-V4."""

import json
import pathlib
from typing import Any

from flax import nnx

from models.deepseek_v4.config import HASHED, HEAVY, SLIDING, SPARSE, parse_config
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.weights import save_safetensors

KINDS = [SLIDING, SLIDING, SPARSE, HEAVY, SPARSE, HEAVY, SPARSE, HEAVY]
ROPE_SHARE = 0.25
MODEL: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "float32",
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": len(KINDS),
    "layer_types": KINDS,
    "compress_rates": {SPARSE: 4, HEAVY: 128},
    "mlp_layer_types": [HASHED] * 2 + ["moe"] * 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "partial_rotary_factor": ROPE_SHARE,
    "q_lora_rank": 256,
    "o_groups": 4,
    "o_lora_rank": 128,
    "sliding_window": 128,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "pad_token_id": None,
}


def random_model(seed: int) -> DeepseekV4:
    """The model with random weights."""
    return DeepseekV4(parse_config(MODEL), nnx.Rngs(seed))


def write(model: DeepseekV4, folder: str) -> None:
    """Writes it into ``folder`` as peers read it: ``config.json`` and ``model.safetensors``."""
    (pathlib.Path(folder) / "config.json").write_text(json.dumps(MODEL))
    save_safetensors(model, pathlib.Path(folder) / "model.safetensors")
