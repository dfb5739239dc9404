"""Checkpoints under three namings, damaged ones, and the way out and back."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file, save_file
from toy import TOY

from hybridkv.errors import UserError
from models.deepseek_v4.checkpoint import load_model, save_orbax
from models.deepseek_v4.config import load_config
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.weights import load_safetensors, save_safetensors
from models.files import ConfigError, WeightsError

RENAMES = [
    (r"^model\.embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.", ""),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.self_attn\.compressor\.indexer\.q_b_proj", ".attn.indexer.wq_b"),
    (r"\.self_attn\.compressor\.indexer\.scorer\.", ".attn.indexer."),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"\.self_attn\.", ".attn."),
    (r"\.q_a_proj", ".wq_a"),
    (r"\.q_a_norm", ".q_norm"),
    (r"\.q_b_proj", ".wq_b"),
    (r"\.kv_proj", ".wkv"),
    (r"\.attn\.gate_proj|compressor\.gate_proj", "compressor.wgate"),
    (r"compressor\.kv_norm", "compressor.norm"),
    (r"\.position_bias", ".ape"),
    (r"\.o_a_proj", ".wo_a"),
    (r"\.o_b_proj", ".wo_b"),
    (r"\.sinks", ".attn_sink"),
    (r"\.mlp\.", ".ffn."),
    (r"\.e_score_correction_bias", ".bias"),
    (r"shared_experts\.gate_proj", "shared_experts.w1"),
    (r"shared_experts\.up_proj", "shared_experts.w3"),
    (r"shared_experts\.down_proj", "shared_experts.w2"),
]
"""Hugging Face's names to the release's, in this order (reference section 10)."""


def as_release(tensors):
    """The same tensors as the release names and splits them."""
    out = {}
    for name, value in tensors.items():
        for pattern, new in RENAMES:
            name = re.sub(pattern, new, name)
        stem = name.rpartition(".")[0]
        for expert in range(len(value)):
            if name.endswith("experts.gate_up_proj"):
                half = value.shape[1] // 2
                out[f"{stem}.{expert}.w1.weight"] = value[expert, :half].copy()
                out[f"{stem}.{expert}.w3.weight"] = value[expert, half:].copy()
            elif name.endswith("experts.down_proj"):
                out[f"{stem}.{expert}.w2.weight"] = value[expert].copy()
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            out[name] = value
    return out


def as_pretrained(release):
    """The release's names as ``save_pretrained`` puts them."""
    out = {}
    for name, value in release.items():
        if name == "embed.weight":
            name = "model.embed_tokens.weight"
        elif name.startswith("hc_head_"):
            name = name.replace("hc_head_", "model.hc_head.hc_")
        elif name != "head.weight":
            name = "model." + re.sub(r"\.attn\.kv_norm\.", ".attn.norm.", name)
        out[name] = value
    return out


def folder_of(path, tensors, config=None):
    path.mkdir()
    save_file(tensors, str(path / "model.safetensors"))
    if config is not None:
        shutil.copy(config, path / "config.json")
    return path


def abstract(config):
    return nnx.eval_shape(lambda: DeepseekV4(config, nnx.Rngs(0)))


def random_model(config):
    """Random bits in every parameter, without compiling an initialiser for each shape."""
    model, rng = abstract(config), np.random.default_rng(0)
    for _, value in nnx.to_flat_state(nnx.state(model)):
        noise = rng.integers(0, config.experts, value.shape) + rng.random(value.shape)
        value.set_value(jax.device_put(noise.astype(value.dtype)))
    return model


def parameters(model):
    return {
        ".".join(map(str, path)): np.asarray(value[...])
        for path, value in nnx.to_flat_state(nnx.state(model))
    }


def assert_same(ours, theirs):
    ours, theirs = parameters(ours), parameters(theirs)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.fixture(scope="module")
def hugging_face(oracles):
    return load_file(str(oracles / "tiny_a" / "model.safetensors"))


@pytest.fixture(scope="module")
def model_a(oracles):
    return load_model(oracles / "tiny_a")


def test_three_namings_give_the_same_parameters(oracles, tmp_path, hugging_face, model_a):
    config = oracles / "tiny_a" / "config.json"
    release = as_release(hugging_face)
    assert not set(release) & set(hugging_face)
    assert_same(load_model(folder_of(tmp_path / "release", release, config)), model_a)
    saved = folder_of(tmp_path / "pretrained", as_pretrained(release), config)
    assert_same(load_model(saved), model_a)


def test_names_of_save_pretrained_are_those_it_really_writes(oracles, tmp_path):
    """tiny_d was saved by transformers; from it to Hugging Face names and back."""
    written = load_file(str(oracles / "tiny_d" / "model.safetensors"))
    save_safetensors(load_model(oracles / "tiny_d"), tmp_path / "model.safetensors")
    again = as_pretrained(as_release(load_file(str(tmp_path / "model.safetensors"))))
    assert again.keys() == written.keys()
    for name, value in written.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_parameters_stand_in_our_layout(hugging_face, model_a):
    layer, block = "model.layers.3.", model_a.blocks[3]
    mlp, attn = layer + "mlp.", layer + "self_attn."
    expected = [
        (model_a.embed, hugging_face["model.embed_tokens.weight"]),
        (model_a.head.weight, hugging_face["lm_head.weight"]),
        (model_a.stream_head.fn, hugging_face["model.hc_head.hc_fn"].T),
        (block.attention.q_a.weight, hugging_face[attn + "q_a_proj.weight"]),
        (block.attention.sink, hugging_face[attn + "sinks"]),
        (
            block.attention.indexer.compressor.position_bias,
            hugging_face[attn + "compressor.indexer.position_bias"],
        ),
        (block.experts.gate.bias, hugging_face[mlp + "gate.e_score_correction_bias"]),
    ]
    for ours, theirs in expected:
        np.testing.assert_array_equal(ours[...], theirs)
    for expert in range(8):
        np.testing.assert_array_equal(
            block.experts.up[...][expert], hugging_face[mlp + "experts.gate_up_proj"][expert]
        )
        np.testing.assert_array_equal(
            block.experts.down[...][expert], hugging_face[mlp + "experts.down_proj"][expert]
        )
    shared = np.concatenate(
        [hugging_face[f"{mlp}shared_experts.{n}_proj.weight"] for n in ("gate", "up")]
    )
    np.testing.assert_array_equal(block.experts.shared_up.weight[...], shared)
    groups = hugging_face[attn + "o_a_proj.weight"].reshape(4, 16, 64)
    np.testing.assert_array_equal(block.attention.o_a[...], groups)
    table = model_a.blocks[0].experts.gate.expert_of[...]
    np.testing.assert_array_equal(table, hugging_face["model.layers.0.mlp.gate.tid2eid"])
    assert np.issubdtype(table.dtype, np.integer)


def test_tensors_may_be_spread_over_several_files(oracles, tmp_path, hugging_face, model_a):
    names = sorted(hugging_face)
    for number in range(3):
        part = {name: hugging_face[name] for name in names[number::3]}
        save_file(part, str(tmp_path / f"model-{number}.safetensors"))
    shutil.copy(oracles / "tiny_a" / "config.json", tmp_path)
    assert_same(load_model(tmp_path), model_a)


# Refusals.


@pytest.fixture(scope="module")
def target(oracles):
    """A model that failed loads may leave half filled."""
    return abstract(load_config(oracles / "tiny_a"))


def refused(target, folder, message):
    with pytest.raises(WeightsError, match=message) as error:
        load_safetensors(target, folder)
    assert isinstance(error.value, UserError)
    assert "\n" not in str(error.value)


HF = "model.layers.1."
WRONG = [
    (f"{HF}input_layernorm.weight", (63,)),
    (f"{HF}self_attn.q_a_proj.weight", (33, 64)),
    (f"{HF}self_attn.sinks", (4,)),
    (f"{HF}self_attn.o_a_proj.weight", (64, 32)),
    (f"{HF}self_attn.compressor.position_bias", (16, 64)),
    (f"{HF}self_attn.compressor.kv_proj.weight", (64,)),
    (f"{HF}mlp.gate.tid2eid", (512, 2)),
    (f"{HF}mlp.experts.gate_up_proj", (8, 95, 64)),
    (f"{HF}mlp.experts.down_proj", (7, 64, 48)),
    (f"{HF}mlp.shared_experts.gate_proj.weight", (48, 63)),
    (f"{HF}mlp.shared_experts.up_proj.weight", (47, 64)),
    ("lm_head.weight", (512,)),
    ("model.embed_tokens.weight", (511, 64)),
    (f"{HF}mlp.experts.down_proj", (64, 48)),
]


@pytest.mark.parametrize(("name", "shape"), WRONG)
def test_a_tensor_of_another_shape_is_named(tmp_path, hugging_face, target, name, shape):
    changed = hugging_face | {name: np.zeros(shape, hugging_face[name].dtype)}
    shown = re.escape(f"{name} has shape {list(shape)}")
    refused(target, folder_of(tmp_path / "x", changed), f"{shown}, which does not fit this config")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.1.ffn.experts.2.w1.weight", (48, 63)),
        ("layers.1.ffn.experts.7.w3.weight", (47, 64)),
        ("layers.1.ffn.experts.5.w2.weight", (48, 64)),
        ("layers.1.ffn.shared_experts.w3.weight", (48, 65)),
        ("layers.1.attn.wo_a.weight", (64,)),
    ],
)
def test_one_expert_of_another_shape_is_named(tmp_path, hugging_face, target, name, shape):
    release = as_release(hugging_face)
    assert name in release
    changed = release | {name: np.zeros(shape, np.float32)}
    refused(target, folder_of(tmp_path / "x", changed), re.escape(f"{name} has shape"))


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.4.self_attn.compressor.gate_proj.weight",
        "model.layers.0.mlp.gate.tid2eid",
        "model.layers.2.mlp.shared_experts.up_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path, hugging_face, target, name):
    less = {other: value for other, value in hugging_face.items() if other != name}
    refused(target, folder_of(tmp_path / "x", less), f"tensor {re.escape(name)} is missing")


@pytest.mark.parametrize("release", [False, True], ids=["weight_scale_inv", "scale"])
def test_a_quantised_tensor_is_named(tmp_path, hugging_face, target, release):
    one = np.ones((1, 1), np.float32)
    if release:
        name = "layers.2.ffn.experts.4.w2"
        tensors = as_release(hugging_face) | {f"{name}.scale": one}
    else:
        name = "model.layers.2.self_attn.q_b_proj"
        tensors = hugging_face | {f"{name}.weight_scale_inv": one}
    refused(
        target,
        folder_of(tmp_path / "x", tensors),
        rf"tensor {re.escape(name)}\.weight is quantised.*convert",
    )


def test_a_folder_without_weights_is_named(tmp_path, target):
    refused(target, tmp_path, rf"no \*\.safetensors in {tmp_path}")


@pytest.mark.parametrize("damage", ["cut", "short", "text", "empty"])
def test_a_damaged_file_is_named(tmp_path, hugging_face, target, damage):
    file = folder_of(tmp_path / "x", hugging_face) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(
        {"cut": whole[:-1], "short": whole[:100], "text": b"not tensors", "empty": b""}[damage]
    )
    refused(target, file.parent, "model.safetensors is not a safetensors file")


def test_a_folder_that_is_none_and_one_without_config_are_named(tmp_path):
    with pytest.raises(WeightsError, match=rf"no checkpoint folder at {tmp_path}/nowhere"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path)


# Out and back.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_loads_to_the_same_bits(tmp_path, dtype):
    config = dataclasses.replace(TOY, dtype=dtype, shared_experts=2)
    model = random_model(config)
    save_safetensors(model, tmp_path / "model.safetensors")
    again = abstract(config)
    load_safetensors(again, tmp_path)
    assert_same(again, model)


def test_saved_tensors_have_hugging_face_names_and_shapes(tmp_path, hugging_face, model_a):
    save_safetensors(model_a, tmp_path / "model.safetensors")
    written = load_file(str(tmp_path / "model.safetensors"))
    assert written.keys() == hugging_face.keys()
    for name, value in hugging_face.items():
        np.testing.assert_array_equal(written[name], value, err_msg=name)


def test_an_orbax_checkpoint_loads_to_the_same_bits(tmp_path, oracles, model_a):
    config = oracles / "tiny_a" / "config.json"
    save_orbax(model_a, config, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == json.loads(
        config.read_text()
    )
    assert_same(load_model(tmp_path / "saved"), model_a)
    with pytest.raises(FileExistsError):
        save_orbax(model_a, config, tmp_path / "saved")


def _foreign(path):
    ocp.save(path, {"a": jax.numpy.ones((2,))})


def _of_another_model(path):
    ocp.save(path, nnx.to_pure_dict(nnx.state(random_model(TOY))))


def _damaged(path):
    path.mkdir()
    (path / "anything").write_text("?")


@pytest.mark.parametrize("write", [_foreign, _of_another_model, _damaged])
def test_a_foreign_or_damaged_orbax_checkpoint_is_refused_in_one_line(tmp_path, oracles, write):
    shutil.copy(oracles / "tiny_a" / "config.json", tmp_path)
    write(tmp_path / "params")
    with pytest.raises(WeightsError, match=r"params is not a checkpoint of this config") as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)
