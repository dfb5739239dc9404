"""An engine that computes nothing: all of who comes, goes and waits, at full speed."""

import contextlib
import functools
from collections.abc import Iterator

from engines import Lab, Time, make_engine

from hybridkv.state.batch import StepOptions
from scenarios.runs import CountingModel, smaller

BLOCKS, SLOTS, LANES, LONGEST = 24, 4, 4, 40
"""Sequences may be longer than the pool."""


@functools.cache
def counting_lab() -> Lab:
    """One a process."""
    time = Time()
    steps = StepOptions(tile=16, lanes=LANES)
    sizes = {"blocks": BLOCKS, "slots": SLOTS, "per_sequence": LONGEST, "snapshots": 32}
    return Lab(make_engine(CountingModel(), steps, time=time, **sizes), time)


@contextlib.contextmanager
def pool_of(lab: Lab, blocks: int, *, slots: int = SLOTS) -> Iterator[None]:
    """As if the engine had no more."""
    runner = lab.engine.runner
    taken = [runner.slots.free.pop(0) for _ in range(SLOTS - slots)]
    with smaller(runner, blocks=BLOCKS - blocks):
        yield
    runner.slots.free[:0] = taken
