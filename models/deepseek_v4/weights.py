"""Checkpoints: safetensors under any of the three names that are in use.

One table says where each parameter lives; loading and saving both follow it. Hugging Face's names
are those of its modules (a ``state_dict``); the release has its own; and what ``save_pretrained``
writes are the release's names again under Hugging Face's roots.
"""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from models.deepseek_v4.config import SLIDING, SPARSE, DeepseekV4Config
from models.deepseek_v4.model import DeepseekV4
from models.files import WeightsError, open_tensors, parameter_at, read_tensor


class Place(NamedTuple):
    """Where one parameter lives in a checkpoint."""

    path: tuple[str | int, ...]
    """Attribute path of the parameter in the model."""
    hugging_face: str
    release: tuple[str, ...]
    """Names in the release; several when the parameter joins them."""
    layout: str
    """``same`` (several tensors are joined along their first axis), ``transposed``, ``grouped``
    (groups and their outputs are one axis in the checkpoint), or ``experts`` (one tensor under
    Hugging Face's names, several of each expert under the release's)."""


def places(config: DeepseekV4Config) -> Iterator[Place]:
    """Every parameter of the model."""
    yield Place(("embed",), "model.embed_tokens.weight", ("embed.weight",), "same")
    yield Place(("head", "weight"), "lm_head.weight", ("head.weight",), "same")
    yield Place(("norm", "weight"), "model.norm.weight", ("norm.weight",), "same")
    for leaf, layout in (("fn", "transposed"), ("base", "same"), ("scale", "same")):
        yield Place(("stream_head", leaf), f"model.hc_head.hc_{leaf}", (f"hc_head_{leaf}",), layout)
    for layer in range(config.layers):
        yield from _layer_places(config, layer)


def _layer_places(config: DeepseekV4Config, layer: int) -> Iterator[Place]:
    at, hf, off = ("blocks", layer), f"model.layers.{layer}", f"layers.{layer}"
    for ours, theirs, short in (
        ("attention_norm", "input_layernorm", "attn_norm"),
        ("experts_norm", "post_attention_layernorm", "ffn_norm"),
    ):
        yield Place(
            (*at, ours, "weight"), f"{hf}.{theirs}.weight", (f"{off}.{short}.weight",), "same"
        )
    for ours, short in (("attention_hc", "attn"), ("experts_hc", "ffn")):
        for leaf, layout in (("fn", "transposed"), ("base", "same"), ("scale", "same")):
            yield Place(
                (*at, ours, leaf), f"{hf}.{short}_hc.{leaf}", (f"{off}.hc_{short}_{leaf}",), layout
            )
    yield from _attention_places(config, layer, at, hf, off)
    yield from _expert_places(config, layer, at, hf, off)


def _attention_places(
    config: DeepseekV4Config, layer: int, at: tuple[str | int, ...], hf: str, off: str
) -> Iterator[Place]:
    at, hf, off = (*at, "attention"), f"{hf}.self_attn", f"{off}.attn"
    for ours, theirs, short in (
        ("q_a", "q_a_proj", "wq_a"),
        ("q_b", "q_b_proj", "wq_b"),
        ("kv", "kv_proj", "wkv"),
        ("o_b", "o_b_proj", "wo_b"),
    ):
        yield _matrix((*at, ours), f"{hf}.{theirs}", f"{off}.{short}")
    yield Place((*at, "o_a"), f"{hf}.o_a_proj.weight", (f"{off}.wo_a.weight",), "grouped")
    yield Place((*at, "sink"), f"{hf}.sinks", (f"{off}.attn_sink",), "same")
    for ours, theirs, short in (
        ("q_norm", "q_a_norm", "q_norm"),
        ("kv_norm", "kv_norm", "kv_norm"),
    ):
        yield Place(
            (*at, ours, "weight"), f"{hf}.{theirs}.weight", (f"{off}.{short}.weight",), "same"
        )
    kind = config.layer_kinds[layer]
    if kind == SLIDING:
        return
    hf = f"{hf}.compressor"
    yield from _compressor_places((*at, "compressor"), hf, f"{off}.compressor")
    if kind == SPARSE:
        at, hf, off = (*at, "indexer"), f"{hf}.indexer", f"{off}.indexer"
        yield from _compressor_places((*at, "compressor"), hf, f"{off}.compressor")
        yield _matrix((*at, "q_b"), f"{hf}.q_b_proj", f"{off}.wq_b")
        yield _matrix((*at, "weights"), f"{hf}.scorer.weights_proj", f"{off}.weights_proj")


def _compressor_places(at: tuple[str | int, ...], hf: str, off: str) -> Iterator[Place]:
    yield _matrix((*at, "kv"), f"{hf}.kv_proj", f"{off}.wkv")
    yield _matrix((*at, "gate"), f"{hf}.gate_proj", f"{off}.wgate")
    yield Place((*at, "position_bias"), f"{hf}.position_bias", (f"{off}.ape",), "same")
    yield Place((*at, "norm", "weight"), f"{hf}.kv_norm.weight", (f"{off}.norm.weight",), "same")


def _expert_places(
    config: DeepseekV4Config, layer: int, at: tuple[str | int, ...], hf: str, off: str
) -> Iterator[Place]:
    at, hf, off = (*at, "experts"), f"{hf}.mlp", f"{off}.ffn"
    yield _matrix((*at, "gate", "score"), f"{hf}.gate", f"{off}.gate")
    if config.hash_layers[layer]:
        table = (f"{off}.gate.tid2eid",)
        yield Place((*at, "gate", "expert_of"), f"{hf}.gate.tid2eid", table, "same")
    else:
        bias = f"{hf}.gate.e_score_correction_bias"
        yield Place((*at, "gate", "bias"), bias, (f"{off}.gate.bias",), "same")
    shared = f"{off}.shared_experts"
    yield Place(
        (*at, "shared_up", "weight"),
        f"{hf}.shared_experts.gate_proj.weight+{hf}.shared_experts.up_proj.weight",
        (f"{shared}.w1.weight", f"{shared}.w3.weight"),
        "same",
    )
    yield _matrix((*at, "shared_down"), f"{hf}.shared_experts.down_proj", f"{shared}.w2")
    each = [f"{off}.experts.{e}" for e in range(config.experts)]
    up = tuple(f"{e}.{w}.weight" for e in each for w in ("w1", "w3"))
    yield Place((*at, "up"), f"{hf}.experts.gate_up_proj", up, "experts")
    down = tuple(f"{e}.w2.weight" for e in each)
    yield Place((*at, "down"), f"{hf}.experts.down_proj", down, "experts")


def _matrix(at: tuple[str | int, ...], hf: str, off: str) -> Place:
    return Place((*at, "weight"), f"{hf}.weight", (f"{off}.weight",), "same")


def load_safetensors(model: DeepseekV4, folder: str | pathlib.Path) -> None:
    """Fills ``model`` from a folder of ``*.safetensors``, in any of the three namings.

    Raises:
      WeightsError: no tensors there, a tensor is missing, quantised, or of another shape.
    """
    tensors = open_tensors(folder)
    hugging_face = "lm_head.weight" in tensors
    saved = not hugging_face and "model.embed_tokens.weight" in tensors
    for place in places(model.config):
        parameter = parameter_at(model, place.path)
        names = place.hugging_face.split("+") if hugging_face else list(place.release)
        if saved:
            names = [_pretrained_name(name) for name in names]
        parts = [read_tensor(tensors, name) for name in names]
        wanted = _part_shape(place.layout, parameter.shape, len(parts), hugging_face)
        for name, part in zip(names, parts, strict=True):
            if part.shape != wanted:
                raise WeightsError(
                    f"{name} has shape {list(part.shape)}, which does not fit this config's "
                    f"{'.'.join(map(str, place.path))} {list(parameter.shape)}: "
                    "config.json and weights belong to different models"
                )
        value = _from_checkpoint(parts, place.layout, parameter.shape)
        parameter.set_value(jnp.asarray(value.astype(parameter.dtype)))


def save_safetensors(model: DeepseekV4, path: str | pathlib.Path) -> None:
    """Writes the model's weights to one file under Hugging Face names."""
    tensors: dict[str, np.ndarray] = {}
    for place in places(model.config):
        value = np.asarray(parameter_at(model, place.path)[...])
        names = place.hugging_face.split("+")
        parts = np.split(value, len(names))
        for name, part in zip(names, parts, strict=True):
            tensors[name] = np.ascontiguousarray(_to_checkpoint(part, place.layout))
    save_file(tensors, str(path), metadata={"format": "pt"})


def _pretrained_name(release: str) -> str:
    """The name under which ``save_pretrained`` writes a tensor of the release."""
    if release.startswith("layers."):
        return f"model.{release}".replace(".attn.kv_norm.", ".attn.norm.")
    roots = {"head.weight": "head.weight", "embed.weight": "model.embed_tokens.weight"}
    return roots.get(release) or "model." + release.replace("hc_head_", "hc_head.hc_")


def _part_shape(
    layout: str, shape: tuple[int, ...], parts: int, hugging_face: bool
) -> tuple[int, ...]:
    """The shape that each of a parameter's tensors must have in the checkpoint."""
    if layout == "transposed":
        return (shape[1], shape[0])
    if layout == "grouped" or (layout == "experts" and not hugging_face):
        return (shape[0] * shape[1] // parts, shape[2])
    return (shape[0] // parts, *shape[1:])


def _from_checkpoint(parts: list[np.ndarray], layout: str, shape: tuple[int, ...]) -> np.ndarray:
    """One parameter in our layout."""
    value = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return value.T if layout == "transposed" else value.reshape(shape)


def _to_checkpoint(value: np.ndarray, layout: str) -> np.ndarray:
    if layout == "transposed":
        return value.T
    if layout == "grouped":
        return value.reshape(-1, value.shape[-1])
    return value
