"""A model on disk: ``config.json`` beside safetensors, as Hugging Face lays it out."""

import dataclasses
import pathlib

from flax import nnx

from models.files import checkpoint_folder
from models.llama.config import load_config
from models.llama.model import Llama
from models.llama.weights import load_safetensors


def load_model(folder: str | pathlib.Path, *, dtype: str | None = None) -> Llama:
    """Reads a model from a folder in Hugging Face layout, in ``dtype`` or that of its config.

    Raises:
      ConfigError: the config is missing or of another architecture.
      WeightsError: weights are missing or do not fit the config.
    """
    folder = checkpoint_folder(folder)
    config = load_config(folder)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    model = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))
    load_safetensors(model, folder)
    return model
