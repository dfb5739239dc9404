"""Many who read, or one who moves what they read.

Who reads goes first: a mover waits until nobody reads, and whoever comes while it only waits goes
before it. So a reader may wait for other work while it reads, that of another reader too.
"""

import contextlib
import threading
from collections.abc import Iterator


class Gate:
    """For threads of one process; not to be entered twice by one thread."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._readers = 0
        self._moving = False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Nothing is moved meanwhile. Waits for a move that has begun."""
        with self._free:
            self._free.wait_for(lambda: not self._moving)
            self._readers += 1
        try:
            yield
        finally:
            with self._free:
                self._readers -= 1
                self._free.notify_all()

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Nobody reads meanwhile. Waits until nobody does."""
        with self._free:
            self._free.wait_for(lambda: not self._moving and not self._readers)
            self._moving = True
        try:
            yield
        finally:
            with self._free:
                self._moving = False
                self._free.notify_all()
