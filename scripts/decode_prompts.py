"""Where ``decode.py`` finds its prompts, and what each asks for."""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from hybridkv.errors import UserError
from models.text import Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, and the words it is shown as."""

    ids: np.ndarray
    title: str
    max_new_tokens: int | None = None


def read_text(path: pathlib.Path) -> str:
    """A file's text.

    Raises:
      UserError: it cannot be read.
    """
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def parse_ids(text: str) -> np.ndarray:
    """Comma-separated token ids.

    Raises:
      UserError: they are no integers of 64 bits.
    """
    try:
        return np.asarray([int(x) for x in text.split(",") if x.strip()], np.int64)
    except (ValueError, OverflowError) as error:
        raise UserError(f"--token-ids takes integers, as in 5,17,3: {error}") from error


def single(args: argparse.Namespace, text: Text | None) -> Prompt:
    """The one prompt of the command line.

    Raises:
      UserError: it cannot be read.
    """
    if args.token_ids is not None:
        return Prompt(ids=parse_ids(args.token_ids), title=args.token_ids)
    assert text is not None
    if args.file is not None:
        content = read_text(args.file)
    else:
        content = _standard_input() if args.prompt == "-" else args.prompt
    return Prompt(ids=encode(text, content, chat=args.chat), title=shorten(content))


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read standard input: {error}") from error


def encode(text: Text, content: str, *, chat: bool) -> np.ndarray:
    """A prompt's ids: as a user's message where the model chats.

    Raises:
      UserError: it has half of a surrogate pair, as bytes become that are no text.
    """
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the prompt {shorten(content)!r} is not text: {error}") from error
    if chat:
        return text.encode_chat([{"role": "user", "content": content}])
    return text.encode(content)


def several(path: pathlib.Path, text: Text, *, chat: bool) -> list[Prompt]:
    """Prompts of a file: lines of text, or of JSON with ``prompt`` and ``max_new_tokens``.

    Raises:
      UserError: it cannot be read, a line is malformed (with its number), or there is no prompt.
    """
    prompts = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        fields: dict[str, Any] = {"prompt": line}
        if path.suffix == ".jsonl":
            fields = _fields(path, number, line)
        content = fields["prompt"]
        prompts.append(
            Prompt(
                ids=encode(text, content, chat=chat),
                title=shorten(content),
                max_new_tokens=fields.get("max_new_tokens"),
            )
        )
    if not prompts:
        raise UserError(f"{path} holds no prompt: write one a line")
    return prompts


def _fields(path: pathlib.Path, number: int, line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise UserError(f'{path}, line {number}: write {{"prompt": "text"}}')
    new = fields.get("max_new_tokens")
    if new is not None and (type(new) is not int or new < 1):
        raise UserError(
            f"{path}, line {number}: max_new_tokens is {new!r}, not an integer from 1 on"
        )
    return fields


def questions(document: str, asked: Sequence[str], text: Text, *, chat: bool) -> list[Prompt]:
    """One prompt a question, each behind the same document."""
    return [
        Prompt(ids=encode(text, f"{document}\n\n{question}", chat=chat), title=shorten(question))
        for question in asked
    ]


def turns(path: pathlib.Path) -> list[str]:
    """What a user says in a conversation: lines of text, or a JSON list of strings.

    Raises:
      UserError: it cannot be read, or there is nothing in it.
    """
    content = read_text(path)
    said: Any = [line for line in content.splitlines() if line.strip()]
    if path.suffix == ".json":
        try:
            said = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(said, list) or not said or not all(isinstance(x, str) for x in said):
        raise UserError(f"{path} holds no conversation: write what the user says, a turn a line")
    return said


def shorten(text: str, width: int = 24) -> str:
    """A title of one line."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
