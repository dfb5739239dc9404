"""Command lines of ``scripts`` in this process; a user's cache is neither read nor filled."""

import sys
from collections.abc import Callable

import pytest
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import command_line


def status(
    main: Callable[[], int | None], monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> int:
    """The exit status."""
    monkeypatch.setattr(command_line, "use_compilation_cache", lambda: None)
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        command_line.run(main)
    return stop.value.code


def call(
    main: Callable[[], int | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *arguments: object,
) -> tuple[int, str, str]:
    """The exit status, and what was printed on standard output and on standard error."""
    code = status(main, monkeypatch, *arguments)
    out, err = capsys.readouterr()
    return code, out, err
