"""Whether TPU kernels are compiled or interpreted, told by a context and not by the environment.

The choice is read while a kernel is traced. A jitted function keeps what it was traced with, so
trace it inside the context::

    with checked():
        out = jax.block_until_ready(attend(q, ...))
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_PARAMS: ContextVar[Any] = ContextVar("interpret_params", default=False)
_CLOCKS = 64
"""Copies under way share so many clocks: by default one, and most races between them go unseen."""


def interpret_params() -> Any:
    """The ``interpret`` argument of ``pallas_call`` here: False outside of ``interpreted``."""
    return _PARAMS.get()


@contextmanager
def interpreted(params: Any) -> Iterator[None]:
    """Kernels traced inside are interpreted: ``params`` is True or a ``pltpu.InterpretParams``."""
    token = _PARAMS.set(params)
    try:
        yield
    finally:
        _PARAMS.reset(token)


@contextmanager
def checked() -> Iterator[None]:
    """Interprets TPU kernels and looks for races: those of the last kernel that ran inside.

    Take one kernel's result inside, and wait for it there. Leaving by an error clears the state
    that the interpreter keeps across kernels.

    Raises:
      RuntimeError: memory was read or written while a copy to or from it was under way. JAX 0.10
        only prints where; later versions say it in the error.
    """
    from jax.experimental.pallas import tpu as pltpu

    pltpu.reset_tpu_interpret_mode_state()
    try:
        params = pltpu.InterpretParams(detect_races=True, vector_clock_size=_CLOCKS)
        with interpreted(params):
            yield
        if _races_found():
            raise RuntimeError("a race in an interpreted kernel: see what the interpreter printed")
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise


def _races_found() -> bool:
    # JAX 0.10 tells races nowhere else.
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    races = interpret_pallas_call.races
    return races is not None and races.races_found
