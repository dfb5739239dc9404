r"""From a log of one's own service to a trace: lengths and block ids stay, tokens do not.

    {"timestamp": 1764489600.25, "tokens": [17, 4, 99, ...], "output_length": 120}
    {"timestamp": "2026-11-30T08:00:00", "hashes": ["a3...", "9c..."], "input_length": 900,
     "output_length": 64, "namespace": "team-b"}

One JSON object a line, one line a request, in any order:

- ``timestamp``: seconds, or a date and time of ISO 8601;
- ``tokens``: the ids of the prompt, of which the chained hash of every block of ``BLOCK`` tokens is
  taken and numbered; or ``hashes``: one text for each block, the last partial one too, which stands
  for all tokens up to the block's end, together with ``input_length``;
- ``output_length``: tokens that were generated;
- ``namespace`` (optional): requests of different ones share nothing.

The trace names blocks by numbers in order of first use, so that neither tokens nor hashes leave.
"""

import contextlib
import dataclasses
import datetime
import gzip
import hashlib
import json
import pathlib
import secrets
from typing import Any, TextIO, cast

import numpy as np

from hybridkv.arithmetic import cdiv
from hybridkv.errors import UserError
from hybridkv.prefixes.hashing import as_tokens, sha256_block
from hybridkv.replay.trace import (
    BLOCK,
    LineError,
    Skipped,
    TraceError,
    count_of,
    decoded,
    json_object,
    number_of,
    numbered_lines,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
    """What became of a log."""

    requests: int
    blocks: int
    """Different ones."""
    skipped: tuple[Skipped, ...]


@dataclasses.dataclass(kw_only=True)
class _Rows:
    rows: list[tuple[float, int, int, list[int]]] = dataclasses.field(default_factory=list)
    """(milliseconds, prompt tokens, output tokens, block ids)."""
    ids: dict[bytes, int] = dataclasses.field(default_factory=dict)
    before: dict[int, int] = dataclasses.field(default_factory=dict)
    """By block id: the one that it stands behind, -1 for none."""
    secret: bytes = dataclasses.field(default_factory=lambda: secrets.token_bytes(32))


def record(log: str | pathlib.Path, trace: str | pathlib.Path) -> Recorded:
    """Writes the trace of a log, compressed where its name ends in ``.gz``.

    Raises:
      TraceError: the log can't be read, or no line of it is a request.
      UserError: the trace can't be written.
    """
    found, skipped = _Rows(), []
    for number, raw in numbered_lines(pathlib.Path(log)):
        try:
            _add(found, json_object(decoded(raw)))
        except LineError as error:
            skipped.append(Skipped(line=number, reason=str(error)))
    if not found.rows:
        why = f"; {skipped[0]}" if skipped else ""
        raise TraceError(f"{log} has no request ({len(skipped)} lines skipped{why})")
    _write(pathlib.Path(trace), found)
    return Recorded(requests=len(found.rows), blocks=len(found.ids), skipped=tuple(skipped))


def _add(found: _Rows, row: dict[str, Any]) -> None:
    when = _milliseconds(row)
    output = count_of(row, "output_length", least=0)
    namespace = row.get("namespace", "")
    if not isinstance(namespace, str):
        raise LineError("namespace is no text")
    if "tokens" in row:
        prompt, keys = _from_tokens(found.secret, namespace, row["tokens"])
        if "input_length" in row and row["input_length"] != prompt:
            raise LineError(f"input_length is {row['input_length']!r}, but tokens are {prompt}")
    else:
        prompt, keys = _from_hashes(namespace, row)
    ids: list[int] = []
    fresh: dict[bytes, int] = {}
    before = -1
    for key in keys:
        block = found.ids.get(key, -1)
        if block < 0 and key not in fresh:
            block = fresh[key] = len(found.ids) + len(fresh)
        elif key in fresh or block in ids:
            raise LineError("a hash stands twice")
        elif found.before[block] != before:
            raise LineError("a hash stands behind another block than before: it is no chained one")
        ids.append(block)
        before = block
    found.ids |= fresh
    for at, block in enumerate(ids):
        found.before[block] = ids[at - 1] if at else -1
    found.rows.append((when, prompt, output, ids))


def _milliseconds(row: dict[str, Any]) -> float:
    value = row.get("timestamp")
    if isinstance(value, str):
        try:
            when = datetime.datetime.fromisoformat(value)
        except ValueError as error:
            raise LineError(f"timestamp is {value[:40]!r}, not a date and time") from error
        if when.tzinfo is None:
            when = when.replace(tzinfo=datetime.UTC)
        return 1e3 * when.timestamp()
    return 1e3 * number_of(row, "timestamp")


def _from_tokens(secret: bytes, namespace: str, tokens: Any) -> tuple[int, list[bytes]]:
    if not isinstance(tokens, list) or not tokens:
        raise LineError("tokens is no list of token ids")
    if not all(type(token) is int for token in tokens):
        raise LineError("tokens holds something that is no integer")
    try:
        array = as_tokens(tokens)
    except (UserError, OverflowError) as error:
        raise LineError(f"tokens: {str(error)[:80]}") from error
    digest = hashlib.sha256(secret + namespace.encode("utf-8", "surrogatepass")).digest()
    keys = []
    for start in range(0, len(array), BLOCK):
        part = array[start : start + BLOCK]
        # A partial block is not a whole one that begins alike.
        digest = sha256_block(
            digest, part.astype("<u4").tobytes() + len(part).to_bytes(4, "little")
        )
        keys.append(digest)
    return len(array), keys


def _from_hashes(namespace: str, row: dict[str, Any]) -> tuple[int, list[bytes]]:
    hashes = row.get("hashes")
    if not isinstance(hashes, list):
        raise LineError("neither tokens nor a list of hashes")
    prompt = count_of(row, "input_length", least=1)
    if len(hashes) != cdiv(prompt, BLOCK):
        raise LineError(
            f"{prompt} tokens are {cdiv(prompt, BLOCK)} blocks of {BLOCK}, hashes has {len(hashes)}"
        )
    keys = []
    for value in hashes:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise LineError("hashes holds something that is neither text nor integer")
        text = json.dumps([namespace, value])
        keys.append(hashlib.sha256(text.encode()).digest())
    return prompt, keys


def _write(path: pathlib.Path, found: _Rows) -> None:
    order = np.argsort([row[0] for row in found.rows], kind="stable")
    first = found.rows[int(order[0])][0]
    try:
        with contextlib.closing(_created(path)) as file:
            for at in order:
                when, prompt, output, ids = found.rows[int(at)]
                line = {
                    "timestamp": round(when - first),
                    "input_length": prompt,
                    "output_length": output,
                    "hash_ids": ids,
                }
                file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _created(path: pathlib.Path) -> TextIO:
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, "wt", encoding="utf-8"))
    return path.open("w", encoding="utf-8")
