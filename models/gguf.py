"""GGUF files through the ``gguf`` package: metadata, and tensors as float32.

Nothing here knows a model; ``models/llama/from_gguf.py`` gives names and values their meaning.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hybridkv.errors import UserError
from models.files import ConfigError, TensorReaders, WeightsError

DAMAGE = (ValueError, IndexError, KeyError, OverflowError)
"""What the package raises about bytes that are no whole GGUF file."""
SPLIT = "split.count"
REQUIRED = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFFile:
    """One open file. The tensors are mapped, not read."""

    path: pathlib.Path
    metadata: Mapping[str, Any]
    """Key to a Python value: int, float, bool, str, or a list of them."""
    tensors: TensorReaders
    """Name to a function that gives it as float32, slowest axis first (GGUF has it last)."""

    def value(self, key: str, kind: type, default: Any = REQUIRED) -> Any:
        """The metadata of ``key``, which must be of ``kind``; whole numbers count as floats.

        Raises:
          ConfigError: there is no such key and no default, or it is of another kind.
        """
        if key not in self.metadata:
            if default is REQUIRED:
                raise ConfigError(f"{self.path} lacks {key}: convert the model to GGUF again")
            return default
        value = self.metadata[key]
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise ConfigError(f"{key} is {value!r:.60}: it must be of type {kind.__name__}")
        return value


def open_gguf(path: str | pathlib.Path) -> GGUFFile:
    """Opens a file and reads its metadata.

    Raises:
      UserError: the ``gguf`` package is missing.
      WeightsError: no such file, a damaged one, one of several parts, or one in the other
        byte order.
    """
    path = pathlib.Path(path)
    try:
        import gguf
    except ImportError as error:
        raise UserError(f"{path} needs the gguf package: pip install -e '.[gguf]'") from error
    if not path.is_file():
        raise WeightsError(f"no file {path}: pass a GGUF file")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except DAMAGE as error:
        raise WeightsError(
            f"{path} is not a whole GGUF file ({' '.join(str(error).split())}): download it again"
        ) from error
    if reader.byte_order != "I":
        raise WeightsError(f"{path} has the other byte order: convert it for this machine")
    if metadata.get(SPLIT, 1) > 1:
        raise WeightsError(f"{path} is one of {metadata[SPLIT]} parts: merge them into one file")
    tensors: dict[str, Callable[[], np.ndarray]] = {
        tensor.name: functools.partial(_dequantise, tensor) for tensor in reader.tensors
    }
    return GGUFFile(path=path, metadata=metadata, tensors=tensors)


def _dequantise(tensor: Any) -> np.ndarray:
    import gguf

    try:
        return gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise WeightsError(
            f"tensor {tensor.name} is stored as {tensor.tensor_type.name}, which the gguf package "
            "cannot read: use another quantisation, such as Q8_0"
        ) from error
