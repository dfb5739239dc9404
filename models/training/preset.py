"""The small byte-level model: every part of DeepSeek-V4, at a size that a CPU can train."""

from typing import Any

from models.deepseek_v4.config import HASHED, HEAVY, SLIDING, SPARSE


def shakespeare_fields() -> dict[str, Any]:
    """Fields of the model's ``config.json``, as ``parse_config`` and transformers read them.

    Tokens are bytes. One sliding layer, then sparse and heavy ones in turn; the first layer routes
    by token id.
    """
    kinds = [SLIDING, SPARSE, HEAVY, SPARSE, HEAVY]
    rope_share = 0.25
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "float32",
        "vocab_size": 256,
        "hidden_size": 128,
        "num_hidden_layers": len(kinds),
        "num_nextn_predict_layers": 0,
        "layer_types": kinds,
        "compress_rates": {SPARSE: 4, HEAVY: 16},
        "mlp_layer_types": [HASHED] + ["moe"] * (len(kinds) - 1),
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "partial_rotary_factor": rope_share,
        "q_lora_rank": 96,
        "o_groups": 2,
        "o_lora_rank": 64,
        "sliding_window": 32,
        "index_n_heads": 8,
        "index_head_dim": 32,
        "index_topk": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "hc_mult": 2,
        "hc_sinkhorn_iters": 6,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 65536,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_parameters": {
            "main": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": rope_share,
            },
            "compress": {
                "rope_type": "default",
                "rope_theta": 160000.0,
                "partial_rotary_factor": rope_share,
            },
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.02,
        "use_cache": True,
    }
