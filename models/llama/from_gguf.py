"""A Llama out of a GGUF file, as llama.cpp's converter writes it."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from flax import nnx

from models.files import ConfigError, TensorReaders
from models.gguf import REQUIRED, GGUFFile
from models.llama.config import LlamaConfig
from models.llama.model import Llama
from models.llama.weights import Place, fill

ARCHITECTURE = "llama"
HEAD = "output.weight"
READ = {
    "vocab_size",
    "context_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
}
"""Keys of the architecture that this loader understands; any other might change the function."""
ONLY = {
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.type": "none",
    "attention.causal": True,
}
"""Keys that change the architecture, and their only implemented value."""


def read_config(file: GGUFFile, *, dtype: str = "float32") -> LlamaConfig:
    """The config from the metadata; nothing is assumed that the file does not say.

    ``dtype`` is that of activations and weights, which are converted when they are read.

    Raises:
      ConfigError: another architecture, or a key that is missing or not implemented.
    """
    architecture = file.value("general.architecture", str)
    if architecture != ARCHITECTURE:
        raise ConfigError(
            f"{file.path} holds a model of architecture {architecture!r}: this loader reads "
            f"{ARCHITECTURE!r}"
        )
    _check_keys(file)

    def number(name: str, default: Any = REQUIRED) -> int:
        value = file.value(f"{ARCHITECTURE}.{name}", int, default)
        if value < 1:
            raise ConfigError(f"{ARCHITECTURE}.{name} is {value}: it must be at least 1")
        return value

    hidden, heads = number("embedding_length"), number("attention.head_count")
    width = number("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if number(name, width) != width:
            raise ConfigError(
                f"{ARCHITECTURE}.{name} is {number(name)}: only that of a whole head, {width}, is "
                "implemented"
            )
    return LlamaConfig(
        vocab_size=len(file.value("tokenizer.ggml.tokens", list)),
        hidden_size=hidden,
        layers=number("block_count"),
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        head_dim=width,
        mlp_size=number("feed_forward_length"),
        norm_eps=file.value(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", float),
        rope_theta=file.value(f"{ARCHITECTURE}.rope.freq_base", float),
        tied_embeddings=HEAD not in file.tensors,
        pad_token=file.value("tokenizer.ggml.padding_token_id", int, None),
        dtype=dtype,
    )


def _check_keys(file: GGUFFile) -> None:
    """Refuses what would be left out: the logits would be others."""
    for key, value in file.metadata.items():
        scope, _, name = key.partition(".")
        if scope != ARCHITECTURE or name in READ:
            continue
        if name not in ONLY:
            raise ConfigError(f"{key} is {value!r}: this loader does not implement it")
        if value != ONLY[name]:
            raise ConfigError(f"{key} is {value!r}: only {ONLY[name]!r} is implemented")


def read_model(file: GGUFFile, *, dtype: str = "float32") -> Llama:
    """The model with its weights, dequantised.

    Raises:
      ConfigError: see ``read_config``.
      WeightsError: a tensor is missing, of another shape, cannot be dequantised, or has no place.
    """
    config = read_config(file, dtype=dtype)
    model = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))
    fill(model, _halved(file.tensors, config), list(places(config)))
    return model


def places(config: LlamaConfig) -> Iterator[Place]:
    """Every parameter of the model under llama.cpp's names."""
    yield Place(("embed",), "token_embd.weight")
    yield Place(("norm", "weight"), "output_norm.weight")
    if not config.tied_embeddings:
        yield Place(("head", "weight"), HEAD)
    for layer in range(config.layers):
        for path, name in (
            (("attention_norm",), "attn_norm"),
            (("mlp_norm",), "ffn_norm"),
            *((("attention", part), f"attn_{part}") for part in "qkv"),
            (("attention", "o"), "attn_output"),
            *((("mlp", part), f"ffn_{part}") for part in ("gate", "up", "down")),
        ):
            yield Place(("blocks", layer, *path, "weight"), f"blk.{layer}.{name}.weight")


def _halved(tensors: TensorReaders, config: LlamaConfig) -> TensorReaders:
    """The same readers, with queries and keys in the order of ``rotate_halves``."""
    readers = dict(tensors)
    for layer in range(config.layers):
        for part, heads in (("q", config.heads), ("k", config.kv_heads)):
            name = f"blk.{layer}.attn_{part}.weight"
            if name in tensors:
                readers[name] = functools.partial(_read_halved, tensors[name], heads, config)
    return readers


def _read_halved(read: Callable[[], np.ndarray], heads: int, config: LlamaConfig) -> np.ndarray:
    return halves_of_pairs(read(), heads, config.head_dim)


def halves_of_pairs(rows: np.ndarray, heads: int, width: int) -> np.ndarray:
    """Undoes the converter's order of the rows ``[heads * width, inputs]`` of a projection.

    llama.cpp rotates channels ``2 i`` and ``2 i + 1`` of a head together, this model ``i`` and
    ``i + width / 2``. Rows of another shape pass through, to be refused by whoever wants them.
    """
    if rows.ndim != 2 or rows.shape[0] != heads * width:
        return rows
    return rows.reshape(heads, width // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)
