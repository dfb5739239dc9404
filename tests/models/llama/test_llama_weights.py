"""Configs and checkpoints as Hugging Face writes them, and those that are refused."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from hybridkv.errors import UserError
from models.files import ConfigError, WeightsError
from models.llama.checkpoint import load_model
from models.llama.config import load_config, parse_config
from models.llama.model import Llama
from models.llama.runtime import LlamaRuntime
from models.llama.toy import TIED, TOY_LLAMA, toy_llama
from models.llama.weights import load_safetensors, save_safetensors

FIELDS = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "vocab_size": 64,
}


def fields(**changes):
    return {name: value for name, value in (FIELDS | changes).items() if value is not ...}


def test_a_config_gives_the_model():
    assert parse_config(FIELDS) == TOY_LLAMA
    tied = parse_config(fields(tie_word_embeddings=True, num_key_value_heads=1))
    assert tied == TIED
    assert parse_config(fields(torch_dtype="bfloat16", pad_token_id=3)) == dataclasses.replace(
        TOY_LLAMA, dtype="bfloat16", pad_token=3
    )


def test_what_older_configs_leave_out():
    config = parse_config(fields(num_key_value_heads=..., head_dim=..., rope_theta=...))
    assert (config.kv_heads, config.head_dim, config.rope_theta) == (4, 8, 10000.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        {"rope_scaling": None},
        {"rope_scaling": {"type": "default"}},
        {"attention_bias": False, "mlp_bias": False, "quantization_config": None},
    ],
)
def test_other_ways_to_say_the_same(changes):
    assert parse_config(fields(**changes)) == TOY_LLAMA


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral': this loader reads 'llama'"),
        ({"model_type": ...}, "model_type is None"),
        ({"attention_bias": True}, "attention_bias is True: only False is implemented"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu' is implemented"),
        ({"sliding_window": 64}, "sliding_window is 64"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling is of type 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling is of type 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters is of type 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4: .* multiple .* 3"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"dtype": "float16"}, "dtype is 'float16': set it to float32 or bfloat16"),
        ({"vocab_size": ...}, "lacks 'vocab_size'"),
        ({"intermediate_size": ...}, "lacks 'intermediate_size'"),
    ],
)
def test_a_config_of_another_architecture_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(fields(**changes))
    assert isinstance(caught.value, UserError)
    assert "\n" not in str(caught.value)


def test_a_missing_or_broken_config_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json at"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_config(tmp_path / "config.json")
    with pytest.raises(WeightsError, match="no checkpoint folder"):
        load_model(tmp_path / "missing")


@pytest.fixture
def folder(oracles, tmp_path):
    """A copy of the oracle to damage."""
    return shutil.copytree(oracles / "llama_tiny", tmp_path / "model")


def tensors_of(folder):
    return load_file(str(folder / "model.safetensors"))


def rewrite(folder, tensors):
    save_file(tensors, str(folder / "model.safetensors"))


def assert_same(ours, theirs):
    ours, theirs = (dict(nnx.to_flat_state(nnx.state(model))) for model in (ours, theirs))
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        np.testing.assert_array_equal(value[...], theirs[path][...], err_msg=str(path))


def test_saving_writes_what_was_read(folder, tmp_path):
    original = tensors_of(folder)
    model = load_model(folder)
    save_safetensors(model, tmp_path / "again.safetensors")
    again = load_file(str(tmp_path / "again.safetensors"))
    assert again.keys() == original.keys()
    for name, value in original.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
    assert len(jax.tree.leaves(LlamaRuntime(model).params)) == len(original)


def test_sharded_files_are_one_checkpoint(folder):
    whole, tensors = load_model(folder), tensors_of(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:])):
        file = folder / f"model-{number + 1:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, str(file))
    assert_same(load_model(folder), whole)


def test_weights_are_converted_to_the_dtype_of_the_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    model = load_model(folder)
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model))} == {"bfloat16"}
    assert LlamaRuntime(model).geometry.row_format.name == "bfloat16"


def test_tied_embeddings_need_no_head(tmp_path):
    model = toy_llama(TIED)
    assert model.head is None
    save_safetensors(model, tmp_path / "model.safetensors")
    tensors = tensors_of(tmp_path)
    assert "lm_head.weight" not in tensors
    again = nnx.eval_shape(lambda: Llama(TIED, nnx.Rngs(0)))
    load_safetensors(again, tmp_path)
    assert_same(again, model)
    embed = tensors["model.embed_tokens.weight"]
    rewrite(tmp_path, tensors | {"lm_head.weight": embed.copy()})
    load_safetensors(again, tmp_path)
    assert_same(again, model)
    rewrite(tmp_path, tensors | {"lm_head.weight": embed + 1})
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load_safetensors(again, tmp_path)


def test_a_computed_buffer_is_not_a_weight(folder):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32)}
    whole = load_model(folder)
    rewrite(folder, tensors_of(folder) | buffer)
    assert_same(load_model(folder), whole)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lm_head.weight", None, r"tensor lm_head\.weight is missing"),
        ("model.norm.weight", np.ones(5, np.float32), r"model\.norm\.weight has shape \[5\]"),
        (
            "model.layers.1.self_attn.k_proj.weight",
            np.ones((32, 24), np.float32),
            r"has shape \[32, 24\], this config wants \[24, 32\]",
        ),
        (
            "model.layers.0.mlp.up_proj.weight_scale_inv",
            np.ones(1, np.float32),
            r"up_proj\.weight is quantised",
        ),
        (
            "model.layers.0.self_attn.q_proj.bias",
            np.ones(48, np.float32),
            r"q_proj\.bias has no place in this model",
        ),
        (
            "model.layers.3.mlp.up_proj.weight",
            np.ones((48, 32), np.float32),
            r"layers\.3\.mlp\.up_proj\.weight has no place",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(folder, name, value, message):
    tensors = tensors_of(folder)
    tensors = {k: v for k, v in tensors.items() if k != name} | (
        {} if value is None else {name: value}
    )
    rewrite(folder, tensors)
    with pytest.raises(WeightsError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_damaged_and_absent_files_are_named(folder):
    (folder / "model.safetensors").write_bytes(b"no")
    with pytest.raises(WeightsError, match="is not a safetensors file"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"no \*\.safetensors in"):
        load_model(folder)
