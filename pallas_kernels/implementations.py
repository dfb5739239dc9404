"""Which implementation of an operation runs: the one that is named, or the first that can.

    tpu, gpu --- NotImplementedError(reason) ---> reference (XLA), which always can

A kernel raises ``NotImplementedError`` while it is traced, before anything runs, for an input that
it does not support. Without a name the next implementation is then taken; a named one fails.
"""

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

REFERENCE = "reference"
"""The XLA implementation that every operation has."""
_PREFERRED = {"tpu": ("tpu",), "gpu": ("gpu",)}
"""By the platform of the default backend, what is tried before the reference."""


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
            return candidates[each]()
        except NotImplementedError as reason:
            _LOG.info("%s: not by %s: %s", operation, each, reason)
    return candidates[REFERENCE]()
