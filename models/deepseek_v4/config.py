"""A DeepSeek-V4 model's true inputs, read from a Hugging Face ``config.json``."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from hybridkv import formats
from hybridkv.formats import RowFormat
from hybridkv.geometry import Geometry, LayerGeometry
from models.files import ConfigError, read_config

SLIDING = "sliding_attention"
SPARSE = "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"
KINDS = (SLIDING, SPARSE, HEAVY)
HASHED = "hash_moe"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary frequencies of one layer kind (reference: release ``model.py``, YaRN section)."""

    theta: float
    factor: float = 1.0
    """YaRN stretch; 1 for none. Neither cos, sin nor the softmax scale is ever multiplied."""
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def frequencies(self, width: int) -> np.ndarray:
        """float32 ``[width // 2]`` radians a position."""
        frequency = self.theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
        if self.factor == 1.0:
            return frequency.astype(np.float32)

        def correction(rotations: float) -> float:
            turns = self.original_positions / (rotations * 2 * math.pi)
            return width * math.log(turns) / (2 * math.log(self.theta))

        low = max(math.floor(correction(self.beta_fast)), 0)
        high = min(math.ceil(correction(self.beta_slow)), width - 1)
        ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
        return (frequency / self.factor * ramp + frequency * (1 - ramp)).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV4Config:
    """Sizes and constants of one model. Field names say what the release's names abbreviate."""

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[str, ...]
    """SLIDING, SPARSE or HEAVY a layer."""
    layer_ratios: tuple[int, ...]
    """Compression ratio a layer, 0 for SLIDING."""
    hash_layers: tuple[bool, ...]
    """Whether a layer picks experts by token id rather than by score."""
    heads: int
    head_dim: int
    rope_dim: int
    query_rank: int
    output_groups: int
    output_rank: int
    window: int
    index_heads: int
    index_dim: int
    index_topk: int
    experts: int
    experts_per_token: int
    shared_experts: int
    expert_dim: int
    route_scale: float
    normalize_route: bool
    swiglu_limit: float
    streams: int
    sinkhorn_steps: int
    stream_eps: float
    norm_eps: float
    rope: Rope
    compressed_rope: Rope
    pad_token: int | None = None
    """Id that other libraries pad batches with. Padding never enters this model."""
    dtype: str = "float32"
    """Dtype of activations and plain weights; gates, streams, routing and head are float32."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.layer_kinds)

    def layer_rope(self, layer: int) -> Rope:
        """Compressed layers use their own rotary base for everything in the layer."""
        return self.rope if self.layer_kinds[layer] == SLIDING else self.compressed_rope

    def geometry(
        self,
        *,
        window_format: RowFormat = formats.FLOAT32,
        row_format: RowFormat = formats.FLOAT32,
        index_format: RowFormat = formats.FLOAT32,
        cells_per_block: int = 1,
    ) -> Geometry:
        """The cache of this model.

        Raises:
          ConfigError: a packed ``index_format`` for an index width that is no power of two.
        """
        if index_format.scale_block and self.index_dim & (self.index_dim - 1):
            raise ConfigError(
                f"index_head_dim is {self.index_dim}: before index rows are stored in "
                f"{index_format.name} a Hadamard matrix rotates them, which needs a power of two; "
                "use a plain index format"
            )
        return Geometry(
            layers=tuple(
                LayerGeometry(
                    window=self.window,
                    ratio=ratio,
                    overlap=kind == SPARSE,
                    indexed=kind == SPARSE,
                )
                for kind, ratio in zip(self.layer_kinds, self.layer_ratios, strict=True)
            ),
            row_width=self.head_dim,
            rope_width=self.rope_dim,
            index_width=self.index_dim if SPARSE in self.layer_kinds else 0,
            window_format=window_format,
            row_format=row_format,
            index_format=index_format,
            cells_per_block=cells_per_block,
        )


def load_config(path: str | pathlib.Path) -> DeepseekV4Config:
    """Reads ``config.json``, or the folder that holds it.

    Raises:
      ConfigError: the file is missing, is not JSON, or describes another architecture.
    """
    return parse_config(read_config(path))


def parse_config(fields: Mapping[str, Any]) -> DeepseekV4Config:
    """Builds the config from the fields of a Hugging Face ``config.json``.

    Raises:
      ConfigError: a field is missing or has a value this model does not implement.
    """
    if fields.get("model_type") != "deepseek_v4":
        raise ConfigError(
            f"model_type is {fields.get('model_type')!r}: this loader reads 'deepseek_v4'"
        )
    scoring = fields.get("scoring_func", "sqrtsoftplus")
    if scoring != "sqrtsoftplus":
        raise ConfigError(f"scoring_func is {scoring!r}: only 'sqrtsoftplus' is implemented")
    if fields.get("tie_word_embeddings"):
        raise ConfigError("tie_word_embeddings is true: this model keeps embed and head apart")
    try:
        kinds, ratios = _layers(fields)
        rope, compressed_rope = _ropes(fields)
        return DeepseekV4Config(
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            layer_kinds=kinds,
            layer_ratios=ratios,
            hash_layers=_hash_layers(fields, len(kinds)),
            heads=fields["num_attention_heads"],
            head_dim=fields["head_dim"],
            rope_dim=fields["qk_rope_head_dim"],
            query_rank=fields["q_lora_rank"],
            output_groups=fields["o_groups"],
            output_rank=fields["o_lora_rank"],
            window=fields["sliding_window"],
            index_heads=fields["index_n_heads"],
            index_dim=fields["index_head_dim"],
            index_topk=fields["index_topk"],
            experts=fields["n_routed_experts"],
            experts_per_token=fields["num_experts_per_tok"],
            shared_experts=fields["n_shared_experts"],
            expert_dim=fields["moe_intermediate_size"],
            route_scale=fields["routed_scaling_factor"],
            normalize_route=fields.get("norm_topk_prob", True),
            swiglu_limit=fields["swiglu_limit"],
            streams=fields["hc_mult"],
            sinkhorn_steps=fields["hc_sinkhorn_iters"],
            stream_eps=fields["hc_eps"],
            norm_eps=fields["rms_norm_eps"],
            rope=rope,
            compressed_rope=compressed_rope,
            pad_token=fields.get("pad_token_id"),
            dtype=fields.get("dtype") or fields.get("torch_dtype") or "float32",
        )
    except KeyError as error:
        raise ConfigError(f"config.json lacks {error.args[0]!r}") from error


def _layers(fields: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Layer kinds and ratios, from ``layer_types`` or the release's ``compress_ratios``."""
    rates = {SPARSE: 4, HEAVY: 128} | dict(fields.get("compress_rates") or {})
    count = fields["num_hidden_layers"]
    if fields.get("layer_types"):
        kinds = tuple(fields["layer_types"])
        unknown = sorted(set(kinds) - set(KINDS))
        if unknown:
            raise ConfigError(f"layer_types has {unknown[0]!r}: known are {', '.join(KINDS)}")
        ratios = tuple(0 if kind == SLIDING else rates[kind] for kind in kinds)
    elif "compress_ratios" in fields:
        by_ratio = {0: SLIDING, rates[SPARSE]: SPARSE, rates[HEAVY]: HEAVY}
        ratios = tuple(fields["compress_ratios"])[:count]  # the tail belongs to the MTP layers
        unknown_ratios = sorted(set(ratios) - set(by_ratio))
        if unknown_ratios:
            raise ConfigError(
                f"compress_ratios has {unknown_ratios[0]}: known are {sorted(by_ratio)}; "
                "set compress_rates for others"
            )
        kinds = tuple(by_ratio[ratio] for ratio in ratios)
    else:
        raise ConfigError("config.json has neither layer_types nor compress_ratios: add one")
    if len(kinds) != count:
        raise ConfigError(f"{len(kinds)} layer types for num_hidden_layers = {count}")
    return kinds, ratios


def _hash_layers(fields: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    if fields.get("mlp_layer_types"):
        return tuple(kind == HASHED for kind in fields["mlp_layer_types"])
    return tuple(layer < fields["num_hash_layers"] for layer in range(layers))


def _ropes(fields: Mapping[str, Any]) -> tuple[Rope, Rope]:
    """The plain rotary base, and that of the compressed layers with its YaRN stretch."""
    parameters = fields.get("rope_parameters") or {}
    plain = parameters.get("main", {})
    yarn = parameters.get("compress") or fields.get("rope_scaling") or {}
    compressed = Rope(
        theta=float(yarn.get("rope_theta") or fields["compress_rope_theta"]),
        factor=float(yarn.get("factor", 1.0)),
        original_positions=int(yarn.get("original_max_position_embeddings", 0)),
        beta_fast=float(yarn.get("beta_fast", 32)),
        beta_slow=float(yarn.get("beta_slow", 1)),
    )
    return Rope(theta=float(plain.get("rope_theta") or fields["rope_theta"])), compressed
