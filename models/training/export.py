"""What a run leaves behind: a checkpoint in Hugging Face layout, the curve as JSON and PNG."""

import importlib.util
import itertools
import json
import math
import pathlib
from typing import Any

from hybridkv.errors import UserError
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.weights import save_safetensors
from models.training.checkpoints import make_folder


class ExportError(UserError):
    """A folder that cannot be written, or a missing package; the message says which."""


def check_targets(model: str | None, curve: str | None) -> None:
    """Finds out before a run whether its results can be written after it.

    Raises:
      ExportError: a folder cannot be written, or matplotlib is missing.
    """
    if curve is not None and importlib.util.find_spec("matplotlib") is None:
        raise ExportError("matplotlib is missing: pip install -e '.[train]'")
    folders = [pathlib.Path(model)] if model is not None else []
    folders += [pathlib.Path(curve).parent] if curve is not None else []
    for folder in folders:
        try:
            make_folder(folder)
        except OSError as error:
            raise ExportError(f"cannot write to {folder}: {error.strerror}") from error


def export_model(model: DeepseekV4, fields: dict[str, Any], folder: str | pathlib.Path) -> None:
    """Writes ``config.json`` (of ``fields``) and ``model.safetensors`` into ``folder``.

    Raises:
      ExportError: the folder cannot be written.
    """
    folder = pathlib.Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
        save_safetensors(model, folder / "model.safetensors")
    except OSError as error:
        raise ExportError(f"cannot write to {folder}: {error.strerror or error}") from error


def export_curve(curve: list[dict[str, float]], path: str | pathlib.Path) -> None:
    """Writes the curve to ``path`` (``.png``) and its numbers beside it (``.json``).

    Raises:
      ExportError: matplotlib is missing or the folder cannot be written.
    """
    check_targets(None, str(path))
    import matplotlib  # optional: only those who draw need it

    matplotlib.use("agg")
    from matplotlib import pyplot

    path = pathlib.Path(path)
    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6))
    megabytes = [record["bytes"] / 1e6 for record in curve]
    top.plot(megabytes, [record["loss"] / math.log(2) for record in curve], color="C0")
    top.set_ylabel("bits per byte (training)")
    top.set_ylim(1.5, 5)
    told = [record for record in curve if "answer_accuracy" in record]
    places = [record["bytes"] / 1e6 for record in told]
    bottom.plot(places, [record["answer_accuracy"] for record in told], color="C2", lw=0.7)
    bottom.set_ylabel("recall accuracy (training)")
    bottom.set_xlabel("bytes seen, millions")
    bottom.set_ylim(0, 1)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        for before, record in itertools.pairwise(curve):
            if record["sparse"] != before["sparse"]:
                axes.axvline(record["bytes"] / 1e6, color="gray", ls=":", lw=1)
    top.set_title("dotted: routed layers switch from all rows to the indexer's picks", fontsize=9)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
        path.with_suffix(".json").write_text(json.dumps(curve) + "\n")
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        pyplot.close(figure)
