"""Tables of the ``crash`` and ``faults`` checks, and progress on standard error."""

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import command_line
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TextColumn, TimeElapsedColumn


class Finding(Protocol):
    """Anything that was checked."""

    wrong: list[str]


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """A line that says what is being tried; gone at the end."""
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title)
        yield lambda what: bar.update(task, description=f"{title}: {escape(what)}")


def print_wrong(found: Sequence[tuple[str, Finding]], most: int = 20) -> None:
    """What is wrong, a line each."""
    lines = [f"{name}: {line}" for name, each in found for line in each.wrong]
    for line in lines[:most]:
        print(f"wrong: {line}")
    if len(lines) > most:
        print(f"... and {len(lines) - most} more")


def grouped(
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[int]]],
) -> list[dict[str, int | str]]:
    """Adds up rows of one name, prints them as a table and returns them."""
    sums: dict[str, collections.Counter[str]] = {}
    for name, counts in rows:
        sums.setdefault(name, collections.Counter()).update(
            dict(zip(columns[1:], map(int, counts), strict=True))
        )
    command_line.print_table(
        title,
        columns,
        [(name, *(count[column] for column in columns[1:])) for name, count in sums.items()],
    )
    return [
        {columns[0]: name, **{column: count[column] for column in columns[1:]}}
        for name, count in sums.items()
    ]
