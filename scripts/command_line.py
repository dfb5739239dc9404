"""What the scripts share: one-line errors, the compilation cache, tables."""

import argparse
import json
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
from rich.console import Console
from rich.table import Table

from hybridkv.errors import UserError

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
DEFAULT_CHECKPOINT = pathlib.Path(__file__).parent.parent / "data" / "shakespeare"


def fail(message: str) -> NoReturn:
    """Prints one line and exits with status 2."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs a command; what the user can mend becomes one line and exit status 2."""
    try:
        status = main() or 0
        sys.stdout.flush()
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    raise SystemExit(status)


def check_least(args: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Refuses sizes below their least; one that is None was not given.

    Raises:
      UserError: names the option.
    """
    for name, bound in least.items():
        given = getattr(args, name)
        if given is not None and given < bound:
            option = name.replace("_", "-")
            raise UserError(f"--{option} must be at least {bound}, got {given}")


def use_compilation_cache() -> None:
    """Keeps compiled steps under the user's cache folder, so that a second start takes seconds.

    ``JAX_COMPILATION_CACHE_DIR``, where set, decides instead.
    """
    if getattr(jax.config, "jax_compilation_cache_dir", None):
        return
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(base / "hybridkv" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def log_to_stderr() -> None:
    """Log lines with their time, level and logger.

    Orbax logs while it is imported, and absl gives the root logger a handler then: ``basicConfig``
    does nothing after that.
    """
    logging.basicConfig()
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            handler.setFormatter(logging.Formatter(LOG_FORMAT))


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    console: Console | None = None,
) -> None:
    """Prints a table to standard output, or to ``console``."""
    console = console or Console()
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    print(title, file=console.file)
    console.print(table)


def write_json(path: str | None, result: Any) -> None:
    """Writes ``result`` to ``path``, if there is one.

    Raises:
      UserError: the file cannot be written.
    """
    if path is None:
        return
    try:
        pathlib.Path(path).write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def device_name() -> str:
    """The default device in words."""
    device = jax.devices()[0]
    return f"{device.platform} ({device.device_kind})"
