"""Text to token ids and back."""

import codecs
import pathlib
from typing import Protocol

import numpy as np

from hybridkv.errors import UserError

BYTES = 256


class Text(Protocol):
    """A tokenizer as the command lines use it."""

    def encode(self, text: str) -> np.ndarray:
        """int32 ``[tokens]``."""
        ...

    def feed(self, token: int) -> str:
        """The text that one more token completes; may be empty."""
        ...


class ByteText:
    """UTF-8 bytes are the tokens; a character appears when its last byte does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def encode(self, text: str) -> np.ndarray:
        """int32 ``[bytes]``."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def feed(self, token: int) -> str:
        """The characters that this byte completes."""
        return self._decoder.decode(bytes([token]))


class FileText:
    """A ``tokenizer.json`` through the ``tokenizers`` package."""

    def __init__(self, path: pathlib.Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise UserError(
                f"{path} needs the tokenizers package: pip install tokenizers"
            ) from error
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._ids: list[int] = []
        self._shown = ""

    def encode(self, text: str) -> np.ndarray:
        """int32 ``[tokens]``, without special tokens."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.asarray(ids, np.int32)

    def feed(self, token: int) -> str:
        """The new text, held back while it ends inside a character."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("�"):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new


def load_text(folder: pathlib.Path, vocab_size: int) -> Text:
    """The tokenizer of a checkpoint folder.

    Raises:
      UserError: the vocabulary is not bytes and the folder has no ``tokenizer.json``.
    """
    file = folder / "tokenizer.json"
    if file.is_file():
        return FileText(file)
    if vocab_size == BYTES:
        return ByteText()
    raise UserError(
        f"{folder} has no tokenizer.json and its vocabulary of {vocab_size} is not bytes: "
        "add the file, or pass --token-ids"
    )
