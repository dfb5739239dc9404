"""A Llama out of a GGUF file is the one whose safetensors hold the same weights."""

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_gguf
from flax import nnx
from toy import empty_cache, prefill, prompt
from toy_llama import llama_options

from hybridkv.engine.steps import Steps
from models.common import Angles, rotate
from models.files import ConfigError, WeightsError
from models.gguf import open_gguf
from models.llama.attention import rotate_halves
from models.llama.from_gguf import halves_of_pairs, read_config, read_model
from models.llama.model import Llama
from models.llama.runtime import LlamaRuntime
from models.llama.toy import TIED, TOY_LLAMA, toy_llama
from models.llama.weights import load_safetensors, save_safetensors

WHOLE_BLOCKS = dataclasses.replace(TOY_LLAMA, head_dim=8, mlp_size=64)
"""Every row a multiple of 32, the block of quantised types."""
IDS = prompt(40)


def weights(model):
    return {path: value[...] for path, value in nnx.to_flat_state(nnx.state(model))}


def assert_same(ours, theirs):
    ours, theirs = weights(ours), weights(theirs)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        assert value.dtype == theirs[path].dtype
        np.testing.assert_array_equal(value, theirs[path], err_msg=str(path))


def logits_of(model):
    steps = Steps(LlamaRuntime(model), llama_options())
    return prefill(steps, empty_cache(steps), IDS)[0]


def write(path, *, config=TOY_LLAMA, kind="F32", tensors=None, **changes):
    """A change of ``...`` leaves the key or the tensor out; two underscores are a dot."""
    metadata = tiny_gguf.architecture(config) | {
        name.replace("__", "."): value for name, value in changes.items()
    }
    metadata = {name: value for name, value in metadata.items() if value is not ...}
    every = tiny_gguf.tensors_of(toy_llama(config)) | (tensors or {})
    every = {name: value for name, value in every.items() if value is not ...}
    return tiny_gguf.write(path / "model.gguf", metadata, every, kind=kind)


@pytest.mark.parametrize("config", [TOY_LLAMA, TIED], ids=["head", "tied"])
def test_logits_are_bitwise_those_of_the_same_weights_in_safetensors(tmp_path, config):
    save_safetensors(toy_llama(config), tmp_path / "model.safetensors")
    theirs = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))
    load_safetensors(theirs, tmp_path)
    ours = read_model(open_gguf(write(tmp_path, config=config)))
    assert ours.config == config
    assert_same(ours, theirs)
    np.testing.assert_array_equal(logits_of(ours), logits_of(theirs))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_stored_types_give_the_logits_of_their_rounded_weights(tmp_path, kind):
    exact = toy_llama(WHOLE_BLOCKS)
    ours = read_model(open_gguf(write(tmp_path, config=WHOLE_BLOCKS, kind=kind)))
    type_ = gguf.GGMLQuantizationType[kind]

    def rounded(value):
        if value.ndim < 2:
            return value
        return jnp.asarray(gguf.dequantize(gguf.quantize(np.asarray(value), type_), type_))

    # Blocks lie along a row, so that the order of rows does not matter to rounding.
    theirs = nnx.clone(exact)
    nnx.update(theirs, jax.tree.map(rounded, nnx.state(exact)))
    assert_same(ours, theirs)
    np.testing.assert_array_equal(logits_of(ours), logits_of(theirs))
    assert (logits_of(ours) != logits_of(exact)).any()


def test_weights_are_converted_to_the_dtype_that_is_asked_for(tmp_path):
    model = read_model(open_gguf(write(tmp_path)), dtype="bfloat16")
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model))} == {"bfloat16"}
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        read_model(open_gguf(tmp_path / "model.gguf"), dtype="int8")


def test_neighbours_that_llama_cpp_rotates_become_halves():
    """Scores between positions are the same by llama.cpp's rotation and by this model's."""
    heads, width, rng = 3, 6, np.random.default_rng(0)
    q, k = rng.normal(size=(2, heads * width, 5)).astype(np.float32)
    x = rng.normal(size=(5,)).astype(np.float32)
    frequency = 100.0 ** (-np.arange(width // 2) * 2 / width)

    def scores(rotation, q, k):
        def turned(w, position):
            angle = np.broadcast_to(position * frequency, (heads, width // 2)).astype(np.float32)
            return rotation((w @ x).reshape(heads, width), angle)

        return np.sum(turned(q, 7) * turned(k, 3), axis=-1)

    def neighbours(value, angle):
        return np.asarray(rotate(value, Angles(np.cos(angle), np.sin(angle))))

    def halves(value, angle):
        return np.asarray(rotate_halves(value, Angles(np.cos(angle[0]), np.sin(angle[0]))))

    undone = [halves_of_pairs(w, heads, width) for w in (q, k)]
    np.testing.assert_allclose(scores(halves, *undone), scores(neighbours, q, k), rtol=1e-4)
    assert not np.allclose(scores(halves, q, k), scores(neighbours, q, k), rtol=1e-2)


def test_everything_in_the_config_comes_from_the_file(tmp_path):
    file = open_gguf(write(tmp_path, tokenizer__ggml__padding_token_id=5))
    assert read_config(file) == dataclasses.replace(TOY_LLAMA, pad_token=5)
    other = {
        "llama__rope__freq_base": 7.0,
        "llama__attention__layer_norm_rms_epsilon": 1e-3,
        "llama__attention__head_count_kv": ...,
        "llama__attention__key_length": ...,
        "llama__attention__value_length": ...,
        "llama__rope__dimension_count": ...,
    }
    config = read_config(open_gguf(write(tmp_path, **other)))
    assert (config.rope_theta, config.norm_eps) == (7.0, 1e-3)
    assert (config.kv_heads, config.head_dim) == (4, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__rope__freq_base": ...}, r"lacks llama\.rope\.freq_base"),
        ({"llama__block_count": ...}, r"lacks llama\.block_count"),
        ({"llama__block_count": "two"}, r"block_count is 'two': it must be of type int"),
        ({"llama__attention__head_count": 0}, r"head_count is 0: it must be at least 1"),
        ({"llama__attention__head_count_kv": 3}, "must be a multiple of"),
        ({"llama__attention__value_length": 4}, r"value_length is 4: only that of a whole head, 6"),
        ({"llama__rope__dimension_count": 4}, r"dimension_count is 4: only that of a whole head"),
        ({"llama__rope__scaling__type": "linear"}, r"scaling\.type is 'linear': only 'none'"),
        ({"llama__expert_count": 8}, "expert_count is 8: only 0 is implemented"),
        ({"llama__attention__sliding_window": 64}, "sliding_window is 64: this loader does not"),
    ],
)
def test_metadata_of_another_function_is_refused_in_one_line(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_model(open_gguf(write(tmp_path, **changes)))
    assert "\n" not in str(caught.value)


def test_values_that_change_nothing_are_no_reason_to_refuse(tmp_path):
    neutral = {"llama__rope__scaling__type": "none", "llama__expert_count": 0}
    assert read_config(open_gguf(write(tmp_path, **neutral))) == TOY_LLAMA


def test_another_architecture_is_refused_in_one_line(tmp_path):
    path = tiny_gguf.write(tmp_path / "a.gguf", {}, {}, architecture="mamba")
    message = r"a\.gguf holds a model of architecture 'mamba': this loader reads 'llama'"
    with pytest.raises(ConfigError, match=message) as caught:
        read_model(open_gguf(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("blk.1.ffn_up.weight", ..., r"tensor blk\.1\.ffn_up\.weight is missing"),
        ("blk.0.attn_q.weight", np.ones((22, 32), np.float32), r"attn_q\.weight has shape \[22"),
        ("token_embd.weight", np.ones((65, 32), np.float32), r"token_embd\.weight has shape \[65"),
        ("blk.0.attn_k.bias", np.ones(12, np.float32), r"attn_k\.bias has no place"),
        ("rope_freqs.weight", np.ones(3, np.float32), r"rope_freqs\.weight has no place"),
        ("blk.2.ffn_up.weight", np.ones((40, 32), np.float32), r"blk\.2\..* has no place"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, name, value, message):
    with pytest.raises(WeightsError, match=message):
        read_model(open_gguf(write(tmp_path, tensors={name: value})))
