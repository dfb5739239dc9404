"""What every model's config and weights loaders share."""

import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from hybridkv.errors import UserError

TensorReaders = Mapping[str, Callable[[], np.ndarray]]
"""Tensor name to a function that reads it."""


class ConfigError(UserError):
    """A config this model cannot be built from; the message says which field and what to do."""


class WeightsError(UserError):
    """A checkpoint that does not fit the model; the message names the tensor."""


def read_config(path: str | pathlib.Path) -> Mapping[str, Any]:
    """The fields of ``config.json``, given it or the folder that holds it.

    Raises:
      ConfigError: the file is missing or is not JSON.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(f"no config.json at {path}: pass a folder in Hugging Face layout")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def checkpoint_folder(folder: str | pathlib.Path) -> pathlib.Path:
    """The folder of a checkpoint.

    Raises:
      WeightsError: there is none.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise WeightsError(f"no checkpoint folder at {folder}: pass one with config.json")
    return folder


def open_tensors(folder: str | pathlib.Path) -> TensorReaders:
    """Every tensor of all ``*.safetensors`` of a folder; nothing is read yet.

    Raises:
      WeightsError: there is no such file, or one is damaged.
    """
    folder = pathlib.Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"no *.safetensors in {folder}: pass a folder with weights")
    readers: dict[str, Callable[[], np.ndarray]] = {}
    for file in files:
        try:
            handle = safe_open(str(file), framework="flax")
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file} is not a safetensors file: {error}") from error
        for name in handle.keys():  # noqa: SIM118 (not a mapping)
            readers[name] = functools.partial(_tensor, handle, name)
    return readers


def _tensor(handle: Any, name: str) -> np.ndarray:
    return np.asarray(handle.get_tensor(name))


def read_tensor(tensors: TensorReaders, name: str) -> np.ndarray:
    """One tensor as it is stored.

    Raises:
      WeightsError: it is missing or quantised.
    """
    if name not in tensors:
        raise WeightsError(f"tensor {name} is missing: the checkpoint is of another architecture")
    stem = name.removesuffix(".weight")
    if f"{stem}.scale" in tensors or f"{stem}.weight_scale_inv" in tensors:
        raise WeightsError(
            f"tensor {name} is quantised (it has a scale): convert the checkpoint to bfloat16 first"
        )
    return tensors[name]()


def parameter_at(model: Any, path: tuple[str | int, ...]) -> Any:
    """The parameter at an attribute path of a module."""
    node = model
    for part in path:
        node = node[part] if isinstance(part, int) else getattr(node, part)
    return node
