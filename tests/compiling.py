"""What XLA compiles while somebody listens."""

import contextlib
from collections.abc import Iterator

import jax

from hybridkv.engine.guard import COMPILATION


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that grows by one with every compilation."""
    seen: list[str] = []

    def note(event: str, seconds: float, **_: object) -> None:
        del seconds
        if event == COMPILATION:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
