"""Traces of requests: when they came, how long they were, and which blocks their prompts share.

    {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}

One JSON object a line (Mooncake's schema), or a CSV with the header ``CSV_HEADER`` (Azure's), plain
or compressed with gzip or xz. A hash id names one block of ``BLOCK`` tokens and everything before
it. The last id may stand for fewer tokens; such a block never counts as found, but it takes room. A
line that says something else is skipped, and why is kept: nothing is dropped in silence.
"""

import contextlib
import dataclasses
import datetime
import functools
import gzip
import json
import lzma
import math
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, cast

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from hybridkv.arithmetic import cdiv
from hybridkv.errors import UserError

BLOCK = 512
"""Tokens of a trace's block."""
CSV_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOST_TOKENS = 2**31 - 1
"""Of one request; positions are int32."""


class TraceError(UserError):
    """A trace that cannot be read or has no request."""


class LineError(ValueError):
    """One line that is no request; says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skipped:
    """A line that was not replayed."""

    line: int
    """From 1."""
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Requests in order of arrival, one array a field."""

    name: str
    arrival: Float64[np.ndarray, " n"]
    """Seconds from the first one; never falls."""
    prompt: Int64[np.ndarray, " n"]
    """Tokens."""
    output: Int64[np.ndarray, " n"]
    """Tokens."""
    offsets: Int64[np.ndarray, " n_plus_1"]
    """Where each request's blocks begin in ``blocks``."""
    blocks: Int32[np.ndarray, " blocks"]
    """Blocks of all prompts, last partial ones too: numbers from 0; equal ones hold equal tokens,
    as does all that is before them."""
    skipped: tuple[Skipped, ...] = ()
    shares: bool = True
    """Whether the source says which blocks are equal; else none are."""

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def lines(self) -> int:
        """Lines that were read, a CSV's header aside."""
        return len(self) + len(self.skipped)

    @functools.cached_property
    def distinct(self) -> int:
        """Different blocks."""
        return int(self.blocks.max(initial=-1)) + 1

    def of(self, request: int) -> Int32[np.ndarray, " blocks"]:
        """The blocks of one request, a last partial one too."""
        return self.blocks[self.offsets[request] : self.offsets[request + 1]]

    def only(self, keep: Bool[np.ndarray, " n"]) -> "Trace":
        """The same with some of its requests; block numbers stay."""
        if keep.all():
            return self
        rows = [self.of(int(at)) for at in np.flatnonzero(keep)]
        return dataclasses.replace(
            self,
            arrival=self.arrival[keep],
            prompt=self.prompt[keep],
            output=self.output[keep],
            offsets=np.cumsum([0, *map(len, rows)], dtype=np.int64),
            blocks=np.concatenate([*rows, np.zeros(0, np.int32)]),
        )

    def first(self, requests: int) -> "Trace":
        """The same without later requests."""
        end = min(requests, len(self))
        return dataclasses.replace(
            self,
            arrival=self.arrival[:end],
            prompt=self.prompt[:end],
            output=self.output[:end],
            offsets=self.offsets[: end + 1],
            blocks=self.blocks[: self.offsets[end]],
        )


@dataclasses.dataclass(kw_only=True)
class Builder:
    """Collects requests; whoever has them one by one fills it."""

    arrival: list[float] = dataclasses.field(default_factory=list)
    prompt: list[int] = dataclasses.field(default_factory=list)
    output: list[int] = dataclasses.field(default_factory=list)
    blocks: list[list[int]] = dataclasses.field(default_factory=list)
    skipped: list[Skipped] = dataclasses.field(default_factory=list)
    _numbers: dict[int, int] = dataclasses.field(default_factory=dict)
    """By hash id: the block's number."""
    _before: dict[int, int] = dataclasses.field(default_factory=dict)
    """By hash id: the id before it, -1 for none."""
    _count: int = 0

    def add(self, arrival: float, prompt: int, output: int, ids: Sequence[int]) -> None:
        """One request with the ids of its blocks.

        Raises:
          LineError: an id stands twice, or stood behind another one before.
        """
        if len(set(ids)) != len(ids):
            raise LineError("a hash id stands twice in hash_ids")
        before = -1
        for block in ids:
            known = self._before.get(block, before)
            if known != before:
                was = "first" if known < 0 else f"behind {known}"
                now = "first" if before < 0 else f"behind {before}"
                raise LineError(f"hash id {block} stands {now} here and stood {was} before")
            before = block
        self._before.update(zip(ids, [-1, *ids], strict=False))
        numbers = self._numbers
        row = []
        for block in ids:
            number = numbers.get(block)
            if number is None:
                number = numbers[block] = self._count
                self._count += 1
            row.append(number)
        self._append(arrival, prompt, output, row)

    def add_unshared(self, arrival: float, prompt: int, output: int) -> None:
        """One request whose blocks are like no other's."""
        count = cdiv(prompt, BLOCK)
        self._append(arrival, prompt, output, list(range(self._count, self._count + count)))
        self._count += count

    def _append(self, arrival: float, prompt: int, output: int, row: list[int]) -> None:
        self.arrival.append(arrival)
        self.prompt.append(prompt)
        self.output.append(output)
        self.blocks.append(row)

    def build(self, name: str, *, shares: bool = True) -> Trace:
        """The trace, in order of arrival.

        Raises:
          TraceError: there is no request.
        """
        if not self.arrival:
            why = f"; {self.skipped[0]}" if self.skipped else ""
            raise TraceError(f"{name} has no request ({len(self.skipped)} lines skipped{why})")
        order = np.argsort(np.asarray(self.arrival, np.float64), kind="stable")
        rows = [self.blocks[at] for at in order]
        arrival = np.asarray(self.arrival, np.float64)[order]
        return Trace(
            name=name,
            arrival=arrival - arrival[0],
            prompt=np.asarray(self.prompt, np.int64)[order],
            output=np.asarray(self.output, np.int64)[order],
            offsets=np.cumsum([0, *map(len, rows)], dtype=np.int64),
            blocks=np.asarray([block for row in rows for block in row], np.int32),
            skipped=tuple(self.skipped),
            shares=shares,
        )


def read_trace(path: str | pathlib.Path) -> Trace:
    """Reads a trace, skipping lines that are no request.

    Raises:
      TraceError: the file can't be read, or no line of it is a request.
    """
    path = pathlib.Path(path)
    builder, shares = Builder(), True
    parse: Callable[[Builder, str], None] = _json_line
    for number, raw in numbered_lines(path):
        try:
            line = decoded(raw)
            if number == 1 and line.lstrip("\ufeff").strip().split(",") == list(CSV_HEADER):
                parse, shares = _csv_line, False
                continue
            parse(builder, line)
        except LineError as error:
            builder.skipped.append(Skipped(line=number, reason=str(error)))
    return builder.build(path.name, shares=shares)


def opened(path: pathlib.Path) -> BinaryIO:
    """The file's bytes, whatever it is compressed with."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return cast(BinaryIO, lzma.open(path, "rb")) if path.suffix == ".xz" else path.open("rb")


def numbered_lines(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    """Lines from 1, without their ends.

    Raises:
      TraceError: the file can't be read, or is cut.
    """
    try:
        with contextlib.closing(opened(path)) as file:
            for number, raw in enumerate(file, 1):
                yield number, raw.rstrip(b"\r\n")
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from error


def decoded(raw: bytes) -> str:
    """One line as text.

    Raises:
      LineError: it is not UTF-8.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8 at byte {error.start}") from error


def json_object(line: str) -> dict[str, Any]:
    """The object of one line.

    Raises:
      LineError: it is none.
    """
    if not line.strip():
        raise LineError("empty")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LineError(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise LineError(f"not a JSON object but {_shown(row)}")
    return row


def count_of(row: dict[str, Any], name: str, *, least: int) -> int:
    """An integer field.

    Raises:
      LineError: it is missing, no integer, or out of range.
    """
    value = _field(row, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise LineError(f"{name} is {_shown(value)}, not an integer")
    if not least <= value <= MOST_TOKENS:
        raise LineError(f"{name} is {_shown(value)}, not in {least}..{MOST_TOKENS}")
    return value


def number_of(row: dict[str, Any], name: str) -> float:
    """A field that is a finite number, at least 0.

    Raises:
      LineError: it is not.
    """
    value = _field(row, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LineError(f"{name} is {_shown(value)}, not a number")
    if not (0 <= value < 1e15 and math.isfinite(value)):
        raise LineError(f"{name} is {_shown(value)}, not a number of at least 0")
    return float(value)


def _field(row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise LineError(f"{name} is missing")
    return row[name]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _json_line(builder: Builder, line: str) -> None:
    row = json_object(line)
    arrival = number_of(row, "timestamp") / 1e3
    prompt = count_of(row, "input_length", least=1)
    output = count_of(row, "output_length", least=0)
    ids = _field(row, "hash_ids")
    if not isinstance(ids, list):
        raise LineError(f"hash_ids is {_shown(ids)}, not a list")
    if len(ids) != cdiv(prompt, BLOCK):
        raise LineError(
            f"{prompt} tokens are {cdiv(prompt, BLOCK)} blocks of {BLOCK}, hash_ids has {len(ids)}"
        )
    for value in ids:
        if type(value) is not int or value < 0:
            raise LineError(f"hash_ids holds {_shown(value)}, not an integer of at least 0")
    builder.add(arrival, prompt, output, ids)


def _csv_line(builder: Builder, line: str) -> None:
    fields = line.strip().split(",")
    if len(fields) != len(CSV_HEADER):
        raise LineError(f"{len(fields)} fields, not {len(CSV_HEADER)}")
    row: dict[str, Any] = dict(zip(CSV_HEADER, fields, strict=True))
    try:
        when = datetime.datetime.fromisoformat(fields[0])
    except ValueError as error:
        raise LineError(f"TIMESTAMP is {_shown(fields[0])}, not a date and time") from error
    for name in CSV_HEADER[1:]:
        with contextlib.suppress(ValueError):
            row[name] = int(row[name])
    arrival = (when.replace(tzinfo=None) - datetime.datetime.min).total_seconds()
    prompt = count_of(row, "ContextTokens", least=1)
    output = count_of(row, "GeneratedTokens", least=0)
    builder.add_unshared(arrival, prompt, output)
