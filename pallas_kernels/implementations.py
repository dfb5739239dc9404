"""Which implementation of an operation runs: the one that is named, or the first that can.

    tpu, gpu --- NotImplementedError(reason) ---> reference (XLA), which always can

A kernel raises ``NotImplementedError`` while it is traced, before anything runs, for an input that
it does not support. Without a name the next implementation is then taken; a named one fails.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import jax

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

REFERENCE = "reference"
"""The XLA implementation that every operation has."""
_PREFERRED = {"tpu": ("tpu",), "gpu": ("gpu",)}
"""By the platform of the default backend, what is tried before the reference."""
_CHOSEN: ContextVar[list[str] | None] = ContextVar("chosen", default=None)


@contextmanager
def listening() -> Iterator[list[str]]:
    """Which implementation ran, as ``operation: name``, of each operation traced inside."""
    chosen: list[str] = []
    token = _CHOSEN.set(chosen)
    try:
        yield chosen
    finally:
        _CHOSEN.reset(token)


def may_choose(name: str | None) -> bool:
    """Whether the choice depends on the input: none is named, and the platform has kernels."""
    return name is None and bool(_PREFERRED.get(jax.default_backend()))


def first_supported(
    operation: str, candidates: Mapping[str, Callable[[], T]], name: str | None
) -> T:
    """The result of the implementation ``name``, or of the first that supports the input.

    Args:
      operation: what errors and the log call it.
      candidates: by name, a call of each implementation there is; nothing is imported or traced
        until it is called.
      name: ``"tpu"``, ``"gpu"`` or ``"reference"``. None takes those for the default backend's
        platform, then the reference.

    Raises:
      ValueError: the operation has no implementation of that name.
      NotImplementedError: the named implementation does not support the input; says why.
    """
    if name is not None:
        if name not in candidates:
            known = ", ".join(sorted(candidates))
            raise ValueError(f"{operation} has no implementation {name!r}: known are {known}")
        return candidates[name]()
    for each in _PREFERRED.get(jax.default_backend(), ()):
        if each not in candidates:
            continue
        try:
            result = candidates[each]()
        except NotImplementedError as reason:
            _LOG.info("%s: not by %s: %s", operation, each, reason)
        else:
            _note(operation, each)
            return result
    _note(operation, REFERENCE)
    return candidates[REFERENCE]()


def _note(operation: str, name: str) -> None:
    chosen = _CHOSEN.get()
    if chosen is not None:
        chosen.append(f"{operation}: {name}")
