"""Workers that a test runs by hand, and calls in the middle of what they do."""

import pathlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hybridkv.tiers.faults import Faults, Point


class Hands:
    """A worker whose jobs run when a test says so, in the order that it says."""

    def __init__(self, name: str) -> None:
        self.name, self.closed = name, False
        self.jobs: list[tuple[float, Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[[], Any], *, priority: float = 0.0) -> "Future[Any]":
        future: Future[Any] = Future()
        self.jobs.append((priority, future, work))
        return future

    def step(self, number: int | None = None) -> bool:
        """Runs one job, by default the one that a worker would take; False where none waits."""
        if not self.jobs:
            return False
        if number is None:
            number = max(range(len(self.jobs)), key=lambda n: (self.jobs[n][0], -n))
        _, future, work = self.jobs.pop(number)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
        return True

    def close(self, *, timeout_s: float) -> bool:
        """As a worker that has nothing at hand: only what goes before its end is done."""
        del timeout_s
        while any(priority == float("inf") for priority, _, _ in self.jobs):
            self.step()
        self.closed = True
        return True


class Hook(Faults):
    """Calls what a test gives it when a point is reached, in the middle of a worker's job."""

    def __init__(self, point: Point, call: Callable[[int], Any]) -> None:
        self.point, self.call, self.reached = point, call, 0

    def reach(self, point: Point, data: Any = None, path: pathlib.Path | None = None) -> Any:
        if point is self.point:
            self.reached += 1
            self.call(self.reached)
        return data
