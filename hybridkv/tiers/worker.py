"""One thread that does what it is given, the most urgent first.

    owner --submit(work, priority)--> queue --> thread: work() --> Future

A worker touches host memory, disk and staging arrays only, never the cache. What its work raises is
the Future's, so that it ends no thread.
"""

import concurrent.futures
import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

Future = concurrent.futures.Future
_Item = tuple[float, int, "Future[Any]", Callable[[], Any] | None]


class Worker:
    """A daemon thread; ``submit`` from any thread."""

    def __init__(self, name: str) -> None:
        self._queue: queue.PriorityQueue[_Item] = queue.PriorityQueue()
        self._serial = itertools.count()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any], *, priority: float = 0.0) -> "Future[Any]":
        """Queues work; a larger priority goes first, of equals the earlier."""
        future: Future[Any] = Future()
        self._queue.put((-priority, next(self._serial), future, work))
        return future

    def close(self, *, timeout_s: float) -> bool:
        """Ends after the work at hand, forgetting the rest; whether it ended in time."""
        last: Future[Any] = Future()
        self._queue.put((-float("inf"), next(self._serial), last, None))
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            _, _, future, work = self._queue.get()
            if work is None:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
