"""Engines in the tests' hands: one compiled for all, virtual time, fakes of what it asks."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scenarios.runs import assert_at_rest
from toy import TOY, prompt, toy_options, toy_runtime

from hybridkv.engine.counters import EngineCounters
from hybridkv.engine.engine import Engine, EngineOptions
from hybridkv.engine.guard import CompiledAfterWarmUp
from hybridkv.engine.handle import Handle
from hybridkv.engine.requests import Finish, Output, Request
from hybridkv.engine.restores import RestoreState
from hybridkv.engine.runner import RunnerOptions
from hybridkv.engine.sampling import SamplingOptions
from hybridkv.engine.sequence import Hold
from hybridkv.engine.task import Task
from hybridkv.prefixes.identity import Identity
from hybridkv.state.batch import StepOptions
from hybridkv.state.capacity import Capacity

TILE, BLOCK = 16, 16
SLOTS, LANES, BLOCKS, SNAPSHOTS, PER_SEQUENCE = 3, 2, 24, 6, 12
LOGPROBS = 4
VOCAB = TOY.vocab_size


class Time:
    """A clock that moves when it is told to, or when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_engine(model: Any, steps: StepOptions, *, time: Time, **sizes: Any) -> Engine:
    """A small engine that walks all bookkeeping and keeps digests."""
    capacity = Capacity(
        blocks=sizes.pop("blocks", BLOCKS),
        slots=sizes.pop("slots", SLOTS),
        blocks_per_sequence=sizes.pop("per_sequence", PER_SEQUENCE),
    )
    sizes = {"snapshots": SNAPSHOTS, "debug": True} | sizes
    return Engine(
        model,
        steps,
        RunnerOptions(capacity=capacity, **sizes),
        EngineOptions(digests=True, strict=True, logprobs=LOGPROBS),
        identity=Identity.of_geometry(model.geometry, weights="a test's", numerics="here"),
        clock=time,
        sleep=time.sleep,
    )


@functools.cache
def toy_lab() -> "Lab":
    """Of the TOY model, for bits; one a process, because it takes long to compile."""
    time = Time()
    options = toy_options(tile=TILE, key_block=8, index_block=16, lanes=LANES)
    return Lab(make_engine(toy_runtime(), options, time=time), time)


@contextlib.contextmanager
def renewed(lab: "Lab") -> Iterator["Lab"]:
    """Empty; afterwards nothing may be left in it."""
    lab.renew()
    yield lab
    engine = lab.engine
    left, engine._tasks = list(engine._tasks.values()), {}
    assert not left
    engine._idle.clear()
    assert_at_rest(engine.runner)
    assert engine.runner.free_slots == engine.runner.sizes.capacity.slots
    assert engine.seating.parked_bytes == 0
    assert engine.counters.compilations == 0


class Lab:
    """One compiled engine, as new for each test."""

    def __init__(self, engine: Engine, time: Time) -> None:
        self.engine, self.time = engine, time
        self._given = engine.options
        self._alone: dict[tuple[Any, ...], Output] = {}

    def renew(self) -> None:
        """Empties it and takes back what a test changed of it."""
        self.engine.seating.parked_bytes = 0  # of a test that failed
        with contextlib.suppress(CompiledAfterWarmUp):  # of other engines in this process
            self.engine._guard.check()
        self.engine.reset()
        self.engine.options = self._given
        self.engine._text = self.engine.seating.restores = None
        self.engine.counters = EngineCounters()

    def change(self, *, text: Any = None, restores: Any = None, **options: Any) -> None:
        """Other options, which compile nothing, until the next test."""
        self.engine.options = dataclasses.replace(self.engine.options, **options)
        self.engine._text, self.engine.seating.restores = text, restores

    def alone(self, ids: np.ndarray, new: int, sampling: SamplingOptions | None = None) -> Output:
        """What these tokens give alone in an empty engine. Empties it."""
        key = (ids.tobytes(), new, sampling)
        if key not in self._alone:
            assert not self.engine.waiting
            sampling = sampling or SamplingOptions()
            request = Request(prompt=ids, max_new_tokens=new, sampling=sampling)
            with self.set_aside():
                self.engine.reset()
                (self._alone[key],) = self.engine.run([request])
                self.engine.reset()
        return self._alone[key]

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """The engine as it was given, for a while; what is counted meanwhile does not count."""
        engine = self.engine
        kept = engine.options, engine._text, engine.seating.restores, engine.counters
        engine.options, engine.counters = self._given, EngineCounters()
        engine._text = engine.seating.restores = None
        try:
            yield
        finally:
            engine.options, engine._text, engine.seating.restores, engine.counters = kept

    def submit(self, ids: np.ndarray, new: int = 4, **more: Any) -> Handle:
        return self.engine.submit(Request(prompt=ids, max_new_tokens=new, **more))

    def until(self, condition: Callable[[], bool], limit: int = 500) -> None:
        """Steps until it holds; fails where it never does."""
        for _ in range(limit):
            if condition():
                return
            self.engine.step()
        raise AssertionError(f"not within {limit} turns: {self.engine.stages()}")

    def finish(self, *handles: Handle, limit: int = 2000) -> None:
        """Steps until they have ended."""
        self.until(lambda: all(handle.done for handle in handles), limit)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()


def task_of(handle: Handle, sample: int = 0) -> Task:
    return handle.tasks[sample]


def same(output: Output, alone: Output) -> bool:
    """Whether it ended as it does alone, by its tokens and the bits of all its logits."""
    assert output.finish in (Finish.LENGTH, Finish.STOP), (output.finish, output.reason)
    assert output.logits_digest is not None
    return output.tokens == alone.tokens and output.logits_digest == alone.logits_digest


def ids_of(length: int, seed: int = 0) -> np.ndarray:
    """A random prompt."""
    return prompt(length, seed)


def words(tokens: list[int]) -> str:
    return "".join(Letters.letter(token) for token in tokens)


class Letters:
    """A tokenizer of one letter a token."""

    @staticmethod
    def letter(token: int) -> str:
        return chr(ord("A") + token)

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(letter) - ord("A") for letter in text], np.int32)

    def stream(self) -> "Letters":
        return self

    def feed(self, token: int) -> str:
        return self.letter(token)

    def finish(self) -> str:
        return ""


class FaultyLetters(Letters):
    """Fails on one token, or at the end."""

    def __init__(self, token: int | None = None) -> None:
        self._token = token

    def finish(self) -> str:
        if self._token is None:
            raise KeyError("the end")
        return ""

    def feed(self, token: int) -> str:
        if token == self._token:
            raise KeyError(token)
        return super().feed(token)


class FakeRestores:
    """Restores that end as they are told to, in virtual time."""

    def __init__(
        self,
        time: Time,
        *,
        after_s: float = 0.5,
        end: RestoreState = RestoreState.READY,
        load: Callable[[Hold], None] = lambda hold: None,
        begins: Callable[[Hold], bool] = lambda hold: True,
    ) -> None:
        self.time, self.after_s, self.end = time, after_s, end
        self.load, self.begins = load, begins
        self.tickets: list[FakeTicket] = []

    def begin(self, hold: Hold) -> "FakeTicket | None":
        if not self.begins(hold):
            return None
        self.tickets.append(FakeTicket(self, hold))
        return self.tickets[-1]


class FakeTicket:
    def __init__(self, restores: FakeRestores, hold: Hold) -> None:
        self.restores, self.hold = restores, hold
        self.ready_at = restores.time.now + restores.after_s
        self.asked = self.cancels = 0
        self.loaded = False

    def state(self) -> RestoreState:
        assert not self.cancels, "asked after it was cancelled"
        self.asked += 1
        if self.restores.time.now < self.ready_at:
            return RestoreState.PENDING
        if not self.loaded and self.restores.end is RestoreState.READY:
            self.restores.load(self.hold)
            self.loaded = True
        return self.restores.end

    def cancel(self) -> None:
        self.cancels += 1
