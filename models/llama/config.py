"""A Llama model's true inputs, read from a Hugging Face ``config.json``."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from hybridkv import formats
from hybridkv.formats import RowFormat
from hybridkv.geometry import Geometry, LayerGeometry
from models.files import ConfigError, read_config

DTYPES = ("float32", "bfloat16")
ONLY = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
    "sliding_window": None,
}
"""Fields that change the architecture, and their only implemented value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of one model."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    """Key and value heads; a divisor of ``heads``. Each costs ``2 * head_dim`` channels a row."""
    head_dim: int
    mlp_size: int
    norm_eps: float
    rope_theta: float
    tied_embeddings: bool = False
    """Whether the head's weight is the embedding."""
    pad_token: int | None = None
    """Id that other libraries pad batches with. Padding never enters this model."""
    dtype: str = "float32"
    """Dtype of activations and weights; norms, rotation and attention are float32."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"num_attention_heads is {self.heads}: it must be a multiple of "
                f"num_key_value_heads, {self.kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}: rotary pairs need an even one")
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"dtype is {self.dtype!r}: set it to {' or '.join(DTYPES)}; weights are converted "
                "when they are read"
            )

    def frequencies(self) -> np.ndarray:
        """float32 ``[head_dim / 2]`` radians a token."""
        width = self.head_dim
        frequency = self.rope_theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
        return frequency.astype(np.float32)

    def geometry(
        self, *, row_format: RowFormat = formats.FLOAT32, cells_per_block: int = 16
    ) -> Geometry:
        """The degenerate geometry: one row a token and layer, no window, tail or index.

        A row is ``2 * kv_heads * head_dim`` channels: the rotated keys of all key heads, then their
        values. Since a cell is one token, ``cells_per_block`` is the block in tokens.
        """
        return Geometry(
            layers=(LayerGeometry(ratio=1),) * self.layers,
            row_width=2 * self.kv_heads * self.head_dim,
            row_format=row_format,
            cells_per_block=cells_per_block,
        )


def load_config(path: str | pathlib.Path) -> LlamaConfig:
    """Reads ``config.json``, or the folder that holds it.

    Raises:
      ConfigError: the file is missing, is not JSON, or describes another architecture.
    """
    return parse_config(read_config(path))


def parse_config(fields: Mapping[str, Any]) -> LlamaConfig:
    """Builds the config from the fields of a Hugging Face ``config.json``.

    Raises:
      ConfigError: a field is missing or has a value this model does not implement.
    """
    if fields.get("model_type") != ONLY["model_type"]:
        raise ConfigError(f"model_type is {fields.get('model_type')!r}: this loader reads 'llama'")
    for name, value in ONLY.items():
        if fields.get(name, value) != value:
            raise ConfigError(f"{name} is {fields[name]!r}: only {value!r} is implemented")
    try:
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        return LlamaConfig(
            vocab_size=fields["vocab_size"],
            hidden_size=hidden,
            layers=fields["num_hidden_layers"],
            heads=heads,
            kv_heads=fields.get("num_key_value_heads") or heads,
            head_dim=fields.get("head_dim") or hidden // heads,
            mlp_size=fields["intermediate_size"],
            norm_eps=fields["rms_norm_eps"],
            rope_theta=_rope_theta(fields),
            tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
            pad_token=fields.get("pad_token_id"),
            dtype=fields.get("dtype") or fields.get("torch_dtype") or "float32",
        )
    except KeyError as error:
        raise ConfigError(f"config.json lacks {error.args[0]!r}") from error


def _rope_theta(fields: Mapping[str, Any]) -> float:
    """The rotary base, which older files name at the top and the first releases not at all."""
    theta = fields.get("rope_theta")
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name) or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default":
            raise ConfigError(f"{name} is of type {kind!r}: only 'default' is implemented")
        share = rope.get("partial_rotary_factor", 1.0)
        if share != 1.0:
            raise ConfigError(f"partial_rotary_factor is {share}: only 1.0 is implemented")
        theta = rope.get("rope_theta") or theta
    return float(theta or 10000.0)
