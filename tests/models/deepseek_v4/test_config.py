"""Configs as Hugging Face and the release write them, and what they are turned into."""

import json

import numpy as np
import pytest
from geometries import FLASH, FLASH_RATIOS, PRO_RATIOS

from hybridkv import formats
from hybridkv.errors import UserError
from hybridkv.kinds import Kind
from models.deepseek_v4.config import (
    HEAVY,
    SLIDING,
    SPARSE,
    Rope,
    load_config,
    parse_config,
)
from models.files import ConfigError

YARN = {
    "type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32,
    "beta_slow": 1,
}


def flash(**changes):
    """V4-Flash as its release describes it (reference section 1)."""
    fields = {
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": 129280,
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "compress_ratios": [*FLASH_RATIOS, 0, 0, 0],
        "num_hash_layers": 3,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": YARN,
        "tie_word_embeddings": False,
    } | changes
    return {name: value for name, value in fields.items() if value is not ...}


def test_the_release_config_gives_the_published_cache():
    config = parse_config(flash())
    assert config.layers == 43
    assert config.layer_ratios == tuple(FLASH_RATIOS)
    assert config.layer_kinds[:4] == (SLIDING, SLIDING, SPARSE, HEAVY)
    assert config.hash_layers == (True,) * 3 + (False,) * 40
    assert config.dtype == "bfloat16"
    geometry = config.geometry(
        window_format=formats.FP8_ROPE16,
        row_format=formats.FP8_ROPE16,
        index_format=formats.MXFP4,
    )
    assert geometry == FLASH
    assert config.geometry(cells_per_block=2).block_tokens == 256


def test_the_larger_release_has_no_sliding_layers():
    config = parse_config(
        flash(num_hidden_layers=61, compress_ratios=[*PRO_RATIOS, 0], num_hash_layers=0)
    )
    assert SLIDING not in config.layer_kinds
    assert config.layer_kinds.count(HEAVY) == 31
    assert not any(config.hash_layers)


@pytest.mark.parametrize("name", ["tiny_a", "tiny_c", "tiny_d"])
def test_saved_models_are_read_from_folder_or_file(oracles, name):
    config = load_config(oracles / name)
    assert load_config(oracles / name / "config.json") == config
    fields = json.loads((oracles / name / "config.json").read_text())
    rates = fields["compress_rates"]
    assert config.layer_kinds == tuple(fields["layer_types"])
    assert config.layer_ratios == tuple(rates.get(kind, 0) for kind in fields["layer_types"])
    assert config.hash_layers == tuple(k == "hash_moe" for k in fields["mlp_layer_types"])
    assert config.dtype == "float32"


def test_layer_types_and_ratios_say_the_same(oracles):
    fields = json.loads((oracles / "tiny_d" / "config.json").read_text())
    by_type = parse_config(fields)
    fields["compress_ratios"] = [0, 2, 6, 2, 0]
    del fields["layer_types"], fields["mlp_layer_types"]
    fields["num_hash_layers"] = 1
    assert parse_config(fields) == by_type


def test_a_model_without_sparse_layers_has_no_index_rows():
    config = parse_config(flash(num_hidden_layers=2, compress_ratios=[0, 128]))
    geometry = config.geometry()
    assert geometry.index_width == 0
    assert geometry.bytes_per_token[Kind.INDEXER] == 0


# Rotary frequencies.


def test_compressed_layers_have_a_base_of_their_own():
    config = parse_config(flash())
    assert config.layer_rope(0) == config.rope == Rope(theta=10000.0)
    assert config.layer_rope(2) == config.layer_rope(3) == config.compressed_rope
    assert config.compressed_rope == Rope(
        theta=160000.0, factor=16.0, original_positions=65536, beta_fast=32.0, beta_slow=1.0
    )


def test_plain_frequencies_are_powers_of_the_base():
    got = Rope(theta=10000.0).frequencies(64)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [10000.0 ** (-2 * i / 64) for i in range(32)], rtol=1e-6)


def test_yarn_stretches_slow_pairs_and_leaves_fast_ones():
    """Reference section 1: the ramp goes from pair 15 to pair 25."""
    got = Rope(theta=160000.0, factor=16.0, original_positions=65536).frequencies(64)
    for i in range(32):
        plain = 160000.0 ** (-2 * i / 64)
        share = min(max((i - 15) / 10, 0), 1)
        assert got[i] == pytest.approx(plain / 16 * share + plain * (1 - share), rel=1e-6), i


def test_a_config_without_yarn_is_not_stretched():
    config = parse_config(flash(rope_scaling=None))
    assert config.compressed_rope == Rope(theta=160000.0)


def test_both_spellings_of_rope_parameters_agree():
    nested = {
        "main": {"rope_theta": 10000.0},
        "compress": {"rope_theta": 160000.0} | YARN,
    }
    assert parse_config(flash(rope_parameters=nested, rope_scaling=...)) == parse_config(flash())


# Refusals.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama': this loader reads 'deepseek_v4'"),
        ({"model_type": ...}, "model_type is None"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax': only 'sqrtsoftplus'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"q_lora_rank": ...}, "config.json lacks 'q_lora_rank'"),
        ({"num_hidden_layers": ...}, "config.json lacks 'num_hidden_layers'"),
        ({"compress_rope_theta": ...}, "config.json lacks 'compress_rope_theta'"),
        ({"num_hash_layers": ...}, "config.json lacks 'num_hash_layers'"),
        ({"compress_ratios": ...}, "neither layer_types nor compress_ratios"),
        ({"compress_ratios": [0, 8] * 22}, r"compress_ratios has 8: known are \[0, 4, 128\]"),
        ({"compress_ratios": [0, 4, 128]}, "3 layer types for num_hidden_layers = 43"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types has 'full_attention': known are"),
        ({"layer_types": [SLIDING] * 42}, "42 layer types for num_hidden_layers = 43"),
    ],
)
def test_another_architecture_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        parse_config(flash(**changes))
    assert isinstance(error.value, UserError)
    assert "\n" not in str(error.value)


def test_other_ratios_are_named_by_compress_rates():
    rates = {SPARSE: 8, HEAVY: 64}
    config = parse_config(flash(compress_rates=rates, compress_ratios=[0, 8, 64] * 15))
    assert config.layer_kinds[:3] == (SLIDING, SPARSE, HEAVY)
    assert config.geometry().block_tokens == 64


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=rf"no config\.json at {tmp_path}/config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4",')
    with pytest.raises(ConfigError, match=r"config\.json is not JSON") as error:
        load_config(tmp_path)
    assert "\n" not in str(error.value)
