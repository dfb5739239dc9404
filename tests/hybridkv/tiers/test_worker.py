"""A worker does the most urgent first, outlives what its work raises, and ends."""

import threading
import time

import pytest

from hybridkv.tiers.worker import Worker


@pytest.fixture
def worker():
    worker = Worker("a test's")
    yield worker
    assert worker.close(timeout_s=5)


def blocked(worker):
    """Keeps the worker busy until the event is set."""
    gate, started = threading.Event(), threading.Event()
    worker.submit(lambda: (started.set(), gate.wait(5)), priority=100)
    assert started.wait(5)
    return gate


def test_the_most_urgent_goes_first_and_of_equals_the_earlier(worker):
    gate, order = blocked(worker), []
    futures = [
        worker.submit(lambda n=n: order.append(n), priority=priority)
        for n, priority in enumerate([-1.0, 0.0, 2.0, 0.0, 2.0])
    ]
    gate.set()
    for future in futures:
        future.result(5)
    assert order == [2, 4, 1, 3, 0]


def test_what_work_raises_is_its_futures_and_the_next_is_done(worker):
    def fails():
        raise OSError("gone")

    failed, fine = worker.submit(fails), worker.submit(lambda: 7)
    with pytest.raises(OSError, match="gone"):
        failed.result(5)
    assert fine.result(5) == 7


def test_what_was_cancelled_before_it_began_is_not_done(worker):
    gate, order = blocked(worker), []
    future = worker.submit(lambda: order.append(1))
    last = worker.submit(lambda: order.append(2))
    assert future.cancel()
    gate.set()
    last.result(5)
    assert order == [2]


def test_closing_ends_after_the_work_at_hand_and_forgets_the_rest():
    worker = Worker("a test's")
    gate, order = blocked(worker), []
    later = worker.submit(lambda: order.append(1), priority=50)
    closing = threading.Timer(0.05, gate.set)
    closing.start()
    assert worker.close(timeout_s=5)
    closing.join()
    assert not later.done()
    assert order == []


def test_closing_waits_no_longer_than_it_is_told():
    worker = Worker("a test's")
    gate = blocked(worker)
    began = time.monotonic()
    assert not worker.close(timeout_s=0.05)
    assert time.monotonic() - began < 2
    gate.set()
    assert worker.close(timeout_s=5)
