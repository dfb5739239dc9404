"""Which model ``decode.py`` runs, over which cache."""

import argparse
import pathlib
from typing import Any

import command_line

from hybridkv import formats
from hybridkv.errors import UserError
from hybridkv.tiers.options import TierOptions
from models.deepseek_v4.cache_formats import CACHE_FORMATS
from models.deepseek_v4.checkpoint import load_model
from models.deepseek_v4.runtime import DeepseekV4GenericRuntime, DeepseekV4Runtime
from models.files import read_config
from models.llama import smollm2
from models.llama.checkpoint import load_model as load_llama
from models.llama.runtime import LlamaRuntime
from models.text import Text, load_text

LEAST = {"context": 1, "tile": 1, "snapshots": 0, "store_tokens": 0}
"""Of the sizes that ``add_arguments`` adds."""
PLAIN = {x.name: x for x in (formats.FLOAT32, formats.BFLOAT16)}
MODELS = ("shakespeare", "smollm2")
SCHEMES = ("hybrid", "generic", "off")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What says which model runs, and what a store of its prefixes depends on."""
    parser.add_argument(
        "--model", choices=MODELS, default="shakespeare", help="without --checkpoint"
    )
    parser.add_argument(
        "--checkpoint",
        type=pathlib.Path,
        help="folder with config.json and safetensors or Orbax parameters, or a GGUF file",
    )
    parser.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, help="use the chat template"
    )
    parser.add_argument("--context", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--snapshots", type=int, default=64, help="stored sequence states")
    parser.add_argument("--tile", type=int, help="prompt tokens computed at once")
    parser.add_argument("--cache-format", choices=list(CACHE_FORMATS), help="how rows are stored")
    parser.add_argument(
        "--cells-per-block",
        type=int,
        metavar="CELLS",
        help="of the largest ratio; on a TPU packed rows need at least 4",
    )
    parser.add_argument("--store-tokens", type=int, default=1 << 20, help="room of the store")


def tiers(args: argparse.Namespace, runtime: Any, store: pathlib.Path | None) -> TierOptions | None:
    """Host memory and the store that the command line names; None for neither.

    Raises:
      UserError: a size below 0.
    """
    host = getattr(args, "host_tokens", 0)
    if store is None and not host:
        return None
    disk = args.store_tokens if store is not None else 0
    return TierOptions.for_tokens(
        runtime.geometry, host=host, disk=disk, path=store, require_store=True
    )


def load(args: argparse.Namespace) -> tuple[Any, Text | None]:
    """The model as an engine takes it, and its tokenizer where text is needed.

    Raises:
      UserError: nothing to load, or the scheme does not exist for this model.
    """
    if args.checkpoint is None and args.model == "smollm2":
        return _llama(*smollm2.load(), args)
    path = args.checkpoint or command_line.DEFAULT_CHECKPOINT
    if path.is_file():
        return _llama(*smollm2.load(path), args)
    needs_text = args.token_ids is None
    if path.is_dir() and _is_llama(path):
        llama = load_llama(path)
        text = load_text(path, llama.config.vocab_size) if needs_text else None
        return _llama(llama, text, args)
    model = load_model(path)
    text = load_text(path, model.config.vocab_size) if needs_text else None
    if args.scheme == "generic":
        if args.cache_format is not None:
            raise UserError("generic rows are float32, which compressors pool: no --cache-format")
        if args.cells_per_block is not None:
            raise UserError("generic rows are not compressed: no --cells-per-block")
        return DeepseekV4GenericRuntime(model), text
    formats = CACHE_FORMATS.get(args.cache_format)
    return DeepseekV4Runtime(model, format=formats, **_blocks(args)), text


def _blocks(args: argparse.Namespace) -> dict[str, int]:
    """The runtime's own choice without the argument.

    Raises:
      UserError: less than a cell.
    """
    cells = args.cells_per_block
    if cells is not None and cells < 1:
        raise UserError(f"--cells-per-block {cells}: a block has at least one cell")
    return {} if cells is None else {"cells_per_block": cells}


def _is_llama(path: pathlib.Path) -> bool:
    config = path / "config.json"
    return config.is_file() and read_config(config).get("model_type") == "llama"


def _llama(model: Any, text: Text | None, args: argparse.Namespace) -> tuple[Any, Text | None]:
    if args.scheme == "generic":
        raise UserError(
            "this model has one kind of attention, so that its cache is generic already: "
            "use --scheme hybrid or off"
        )
    if args.cache_format not in (None, *PLAIN):
        raise UserError(
            f"--cache-format {args.cache_format} is for DeepSeek-V4: use {' or '.join(PLAIN)}"
        )
    return LlamaRuntime(model, format=PLAIN.get(args.cache_format), **_blocks(args)), text
