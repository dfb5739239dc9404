"""GGUF files that tests write: a toy Llama as llama.cpp stores it, and a vocabulary."""

import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from models.files import parameter_at
from models.llama.config import LlamaConfig
from models.llama.from_gguf import places
from models.llama.model import Llama

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2", "Ċ Ċ"]
TOOL = "<tool>"


def byte_characters() -> list[str]:
    """The character that stands for each byte in GPT-2's vocabularies."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]


def vocabulary(**changes: Any) -> dict[str, Any]:
    """Metadata of a small byte-level BPE; a change of ``...`` leaves the key out."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*SPECIAL, *byte_characters(), *merged, TOOL]
    normal = len(tokens) - len(SPECIAL) - 1
    fields = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3] * len(SPECIAL) + [1] * normal + [4],
        "merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    }
    named = {f"tokenizer.ggml.{name}": value for name, value in (fields | changes).items()}
    return {name: value for name, value in named.items() if value is not ...}


def architecture(config: LlamaConfig) -> dict[str, Any]:
    """Metadata of the model."""
    return {
        "llama.context_length": 128,
        "llama.block_count": config.layers,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.mlp_size,
        "llama.attention.head_count": config.heads,
        "llama.attention.head_count_kv": config.kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": config.rope_theta,
        "tokenizer.ggml.tokens": [f"[{number}]" for number in range(config.vocab_size)],
    }


def pairs_of_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of queries and keys, row by row."""
    width = len(rows) // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for i in range(width // 2):
            at = head * width
            out[at + 2 * i] = rows[at + i]
            out[at + 2 * i + 1] = rows[at + i + width // 2]
    return out


def tensors_of(model: Llama) -> dict[str, np.ndarray]:
    """float32 tensors under GGUF's names."""
    tensors = {}
    for place in places(model.config):
        value = np.asarray(parameter_at(model, place.path)[...], np.float32)
        for part, heads in (("attn_q.", model.config.heads), ("attn_k.", model.config.kv_heads)):
            if part in place.name:
                value = pairs_of_halves(value, heads)
        tensors[place.name] = value
    return tensors


def write(
    path: pathlib.Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    architecture: str = "llama",
    kind: str = "F32",
) -> pathlib.Path:
    """Writes a file; matrices are stored as ``kind``, vectors as float32, integers as they are."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float64(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, value in tensors.items():
        if value.ndim == 2 and kind != "F32":
            type_ = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(value, type_), raw_dtype=type_)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
