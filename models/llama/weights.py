"""Checkpoints: safetensors under Hugging Face's names. One table serves loading and saving."""

import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from models.files import TensorReaders, WeightsError, open_tensors, parameter_at, read_tensor
from models.llama.config import LlamaConfig
from models.llama.model import Llama

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BUFFERS = ".rotary_emb.inv_freq"
"""What older checkpoints hold beside weights; computed from the config here."""


class Place(NamedTuple):
    """Where one parameter lives in a checkpoint, in the same layout."""

    path: tuple[str | int, ...]
    """Attribute path of the parameter in the model."""
    name: str


def places(config: LlamaConfig) -> Iterator[Place]:
    """Every parameter of the model."""
    yield Place(("embed",), EMBED)
    yield Place(("norm", "weight"), "model.norm.weight")
    if not config.tied_embeddings:
        yield Place(("head", "weight"), HEAD)
    for layer in range(config.layers):
        for path, name in (
            (("attention_norm",), "input_layernorm"),
            (("mlp_norm",), "post_attention_layernorm"),
            *((("attention", part), f"self_attn.{part}_proj") for part in "qkvo"),
            *((("mlp", part), f"mlp.{part}_proj") for part in ("gate", "up", "down")),
        ):
            yield Place(("blocks", layer, *path, "weight"), f"model.layers.{layer}.{name}.weight")


def load_safetensors(model: Llama, folder: str | pathlib.Path) -> None:
    """Fills ``model`` from all ``*.safetensors`` of a folder.

    Raises:
      WeightsError: no tensors there; a tensor is missing, quantised, of another shape, or one that
        this model has no place for; or a head that the config ties to the embedding differs.
    """
    tensors = dict(open_tensors(folder))
    if model.config.tied_embeddings and HEAD in tensors:
        if not np.array_equal(read_tensor(tensors, HEAD), read_tensor(tensors, EMBED)):
            raise WeightsError(
                f"{HEAD} differs from {EMBED}, to which config.json ties it: set "
                "tie_word_embeddings to false"
            )
        del tensors[HEAD]
    kept = {name: read for name, read in tensors.items() if not name.endswith(BUFFERS)}
    fill(model, kept, list(places(model.config)))


def fill(model: Llama, tensors: TensorReaders, table: Sequence[Place]) -> None:
    """Gives every parameter in ``table`` its tensor, in the dtype of the model.

    Raises:
      WeightsError: a tensor is missing, quantised with a scale beside it, of another shape, or left
        over, such as a bias: without it the logits would be others.
    """
    for place in table:
        parameter = parameter_at(model, place.path)
        value = read_tensor(tensors, place.name)
        if value.shape != parameter.shape:
            raise WeightsError(
                f"{place.name} has shape {list(value.shape)}, this config wants "
                f"{list(parameter.shape)}: config and weights belong to different models"
            )
        parameter.set_value(jnp.asarray(value.astype(parameter.dtype)))
    left = sorted(set(tensors) - {place.name for place in table})
    if left:
        raise WeightsError(
            f"tensor {left[0]} has no place in this model: the checkpoint is of another "
            "architecture or holds more layers than its config says"
        )


def save_safetensors(model: Llama, path: str | pathlib.Path) -> None:
    """Writes the model's weights to one file under Hugging Face names."""
    tensors = {
        place.name: np.ascontiguousarray(parameter_at(model, place.path)[...])
        for place in places(model.config)
    }
    save_file(tensors, str(path), metadata={"format": "pt"})
