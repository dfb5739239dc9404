"""Values that change how fast a kernel is and nothing that it computes, by kind of device.

    trying(...)  >  <device>.json beside this module  >  the default that the kernel passes

A table is read while a kernel is traced. It may hold how a kernel is staged, how much one program
takes and what it is launched with; never a key block or a range of rows, whose sums have an order.
Such values stand in the lowered text, so that a cache filled under another table has another
numerics id: even a compiler that sums in another order for them mixes no bits.

A table's file::

    {"device": "NVIDIA H100 80GB HBM3",
     "source": "how the values were found",
     "entries": [{"operation": "attention/gpu", "key": {"format": "bfloat16"},
                  "values": {"warps": 8}}]}

An entry holds where all of its key is asked for; of several the one with the longest key. What it
leaves out is the default's. A device without a table has the defaults everywhere.
"""

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import jax

T = TypeVar("T")
Key = Mapping[str, int | str]

FOLDER = pathlib.Path(__file__).parent
_HEARD: ContextVar["list[Asked] | None"] = ContextVar("tuned_asked", default=None)
_TRIED: ContextVar[Mapping[str, Key] | None] = ContextVar("tuned_tries", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """Values of one operation where the key holds."""

    operation: str
    """Operation and implementation: ``attention/gpu``."""
    key: Key = dataclasses.field(default_factory=dict)
    values: Key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """What is known about one kind of device."""

    device: str
    """The kind, as JAX names it."""
    source: str
    """How the values were found."""
    entries: tuple[Entry, ...]

    def values(self, operation: str, key: Key) -> Key:
        """Those of the entry with the longest key that holds; none where none does."""
        fitting = [
            entry
            for entry in self.entries
            if entry.operation == operation and entry.key.items() <= key.items()
        ]
        return max(fitting, key=lambda entry: len(entry.key)).values if fitting else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a kernel asked for."""

    operation: str
    default: Any
    key: Key


def tuned(operation: str, default: T, **key: int | str) -> T:
    """The values to run with.

    Args:
      operation: as in ``Entry``.
      default: a dataclass of all its values, for a device that has no table.
      key: what values may depend on, such as ``format`` and ``width``.

    Raises:
      ValueError: the table has a value that the operation has not; says which.
    """
    heard = _HEARD.get()
    if heard is not None:
        heard.append(Asked(operation=operation, default=default, key=key))
    tried = (_TRIED.get() or {}).get(operation)
    if tried is not None:
        return replaced(operation, default, tried)
    table = table_of(device_kind())
    return default if table is None else replaced(operation, default, table.values(operation, key))


def replaced(operation: str, default: T, values: Key) -> T:
    """``default`` with some of its values.

    Raises:
      ValueError: it has no value of that name, or one that is no positive integer.
    """
    known = {field.name for field in dataclasses.fields(default)}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{operation} is not tuned by {name!r}: {', '.join(sorted(known))}")
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{operation}: {name} is {value!r}, which is no positive integer")
    changed: T = dataclasses.replace(default, **values)  # type: ignore[type-var]
    return changed


def device_kind() -> str:
    """The kind of device that kernels are traced for: that of the mesh in use, else the first."""
    told = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if told is None else told.device_kind


@contextmanager
def trying(operation: str, **values: int) -> Iterator[None]:
    """Kernels of ``operation`` traced inside take these values, not the table's."""
    token = _TRIED.set({**(_TRIED.get() or {}), operation: values})
    try:
        yield
    finally:
        _TRIED.reset(token)


@contextmanager
def listening() -> Iterator[list[Asked]]:
    """What kernels traced inside ask for, in order: for those who fill a table."""
    heard: list[Asked] = []
    token = _HEARD.set(heard)
    try:
        yield heard
    finally:
        _HEARD.reset(token)


def file_of(kind: str) -> pathlib.Path:
    """Where the table of a kind of device is, if there is one."""
    name = re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")
    return FOLDER / f"{name}.json"


@functools.cache
def table_of(kind: str) -> Table | None:
    """The table of a kind of device; None where it has none.

    Raises:
      ValueError: its file is not a table.
    """
    file = file_of(kind)
    return read(file) if file.exists() else None


def read(file: pathlib.Path) -> Table:
    """The table in ``file``.

    Raises:
      ValueError: it is none.
    """
    try:
        given: dict[str, Any] = json.loads(file.read_text())
        entries = tuple(Entry(**entry) for entry in given.pop("entries"))
        return Table(entries=entries, **given)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is no tuning table: {error}") from error


def write(table: Table, file: pathlib.Path) -> None:
    """Writes ``table`` where it is read from the next process on."""
    given = dataclasses.asdict(table)
    file.write_text(json.dumps(given, indent=1) + "\n")
