"""What a GGUF file of our model holds, by key, name and layout; writing one needs the peers."""

import sys

import numpy as np
import pytest
from places import REPOSITORY

from models.deepseek_v4.config import HASHED, HEAVY, SLIDING, SPARSE, parse_config
from models.deepseek_v4.weights import places

sys.path.insert(0, str(REPOSITORY / "scripts" / "peers"))

from gguf_export import ExportError, Source, convert, metadata, tensors

TINY = {
    "model_type": "deepseek_v4",
    "vocab_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SPARSE, HEAVY],
    "mlp_layer_types": [HASHED, "moe", "moe"],
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "sliding_window": 8,
    "index_n_heads": 2,
    "index_head_dim": 64,
    "index_topk": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "max_position_embeddings": 128,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
}


def test_every_tensor_of_the_checkpoint_is_exported():
    written = {n for place in places(parse_config(TINY)) for n in place.hugging_face.split("+")}
    assert {source.name for source in tensors(TINY).values()} == written


def test_each_kind_of_layer_has_its_own_tensors():
    names = tensors(TINY)
    assert names["blk.0.ffn_gate_tid2eid.weight"].part == "integer"
    assert "blk.0.exp_probs_b.bias" not in names
    assert "blk.1.exp_probs_b.bias" in names
    assert [f"blk.{i}.attn_compressor_kv.weight" in names for i in range(3)] == [False, True, True]
    assert [f"blk.{i}.indexer.proj.weight" in names for i in range(3)] == [False, True, False]


def test_metadata_describes_layers_routing_and_a_dummy_vocabulary():
    keys = metadata(TINY)
    assert keys["deepseek4.attention.compress_ratios"] == [0, 4, 128]
    assert keys["deepseek4.hash_layer_count"] == 1
    assert keys["deepseek4.expert_gating_func"] == 4
    assert keys["deepseek4.attention.compress_rope_freq_base"] == 160000.0
    assert "deepseek4.rope.scaling.type" not in keys
    assert len(set(keys["tokenizer.ggml.tokens"])) == 16


def test_release_style_fields_and_yarn_are_read():
    scaling = {"factor": 16, "original_max_position_embeddings": 64, "type": "yarn"}
    fields = {k: v for k, v in TINY.items() if k not in ("layer_types", "mlp_layer_types")}
    fields |= {"compress_ratios": [0, 4, 128, 0], "num_hash_layers": 1, "rope_scaling": scaling}
    keys = metadata(fields)
    assert tensors(fields) == tensors(TINY)
    assert keys["deepseek4.attention.compress_ratios"] == [0, 4, 128]
    assert keys["deepseek4.rope.scaling.factor"] == 16.0
    assert keys["deepseek4.rope.scaling.original_context_length"] == 64


def test_gate_and_up_are_the_halves_of_one_tensor():
    both = np.arange(2 * 6 * 4, dtype=np.float32).reshape(2, 6, 4)
    first, second = (convert(both, Source("x", part)) for part in ("first", "second"))
    assert np.array_equal(np.concatenate([first, second], axis=1), both)
    assert convert(np.arange(4, dtype=np.int64), Source("x", "integer")).dtype == np.int32


def test_rotary_pairs_of_llama_become_neighbours():
    rows = np.arange(8, dtype=np.float32)[:, None]  # 2 heads of 4: pairs (0, 2), (1, 3)
    source = tensors(LLAMA)["blk.0.attn_q.weight"]
    assert convert(rows, source)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"compress_rates": {SPARSE: 8}}, "a layer compresses by 8"),
        ({"layer_types": [SLIDING, SPARSE]}, "2 layer types for num_hidden_layers = 3"),
        ({"layer_types": [SLIDING, HEAVY, HEAVY]}, "no layer compresses by 4"),
        ({"layer_types": [SLIDING, "linear", HEAVY]}, "layer_types has 'linear'"),
        ({"mlp_layer_types": ["moe", HASHED, "moe"]}, "must come first"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"hc_mult": 2}, "hc_mult is 2"),
        ({"index_head_dim": 8}, "index_head_dim is 8"),
    ],
)
def test_what_llama_cpp_does_not_run_is_one_line(changes, message):
    with pytest.raises(ExportError, match=message) as error:
        metadata(TINY | changes)
    assert "\n" not in str(error.value)


def test_a_missing_field_is_named():
    with pytest.raises(ExportError, match=r"config\.json lacks 'o_groups'"):
        metadata({k: v for k, v in TINY.items() if k != "o_groups"})
