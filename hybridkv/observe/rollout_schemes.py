r"""Serves requests by the safe path, by reuse or by a share of each, and runs some of them twice.

    submit --stage, share--> one engine serves it --------> handle
              \--sampled---> the other engines run it too (shadow) --both ended--> compare
    step: engines that serve | 1 turn in ``every``: those that only shadow | watch | judge
                                                              back by itself <--/

Three engines, or two: ``reuse``; ``cold``, the same executables without anything to reuse, which
is what reuse is compared with; and ``safe``, which serves where reuse may not: the cold one, or
the generic scheme, whose bits are those of another cache and which is compared with nothing.

The bound on what shadow runs cost those that are served:
- an engine that serves nothing gets a turn only after ``every`` turns of those that serve, or while
  those have nothing to compute. A turn is one decode step and the tile steps of the scheduler's
  token budget, one at least. What arrives meanwhile waits for the rest of one such turn;
- in an engine that serves too, a shadow run comes last (its priority is below all others), so that
  it takes what a turn has left: a row of its decode step, a lane of its tile step, or one tile step
  where no served prompt is being computed; and it ends as soon as a served request waits for a
  slot or for blocks.
Give ``cold`` an engine of its own, beside ``safe``, where the second is too much.

An engine that raises while nobody waits for it (it shadows, or does idle work) is contained: its
shadow runs are dropped, it is emptied, and the fault is counted and judged; served requests go on.
One that raises ``MOST_FAULTS`` times in a row is left alone from then on. Where it serves, the
fault is counted and judged as well, and raised: who steps it ends what it served.

One thread calls this, as an engine. Whatever changes an engine is done under its ``turn_lock``, so
that another thread may look at its books in between.
"""

import collections
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping

import numpy as np

from hybridkv.engine.engine import Engine
from hybridkv.engine.generated import Publish
from hybridkv.engine.handle import Handle
from hybridkv.engine.requests import Finish, Request, prompt_ids
from hybridkv.engine.scheduler import QUEUED
from hybridkv.engine.schemes import Schemes
from hybridkv.engine.task import Task, Text
from hybridkv.errors import UserError
from hybridkv.observe.rollout import ORDER, RollbackCause, RolloutStage, RolloutState
from hybridkv.observe.rollout_counters import Dropped, RolloutCounters
from hybridkv.observe.rollout_engines import RolloutEngines
from hybridkv.observe.rollout_file import Rollout
from hybridkv.observe.rollout_handle import RolloutHandle, UnderWay
from hybridkv.observe.shadow import Mismatch, ShadowOptions, Verdict, compare, require_comparable
from hybridkv.observe.thresholds import Judge, Side, Thresholds

_LOG = logging.getLogger(__name__)
LOWEST = -(10**9)
"""Priority of shadow runs."""
KEPT = 16
"""Mismatches that ``RolloutSchemes.mismatches`` remembers."""
SERVES = (RolloutStage.PERCENT, RolloutStage.FULL)
"""Stages in which reuse serves."""
_GIVEN_UP = (Finish.CANCELLED, Finish.TIMED_OUT, Finish.HANDED_OFF)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """How a rollout is watched, and what a rollback does."""

    shadow: ShadowOptions = dataclasses.field(default_factory=ShadowOptions)
    thresholds: Thresholds = dataclasses.field(default_factory=Thresholds)
    under_way: UnderWay = UnderWay.UNSEEN
    forget: bool = True
    """After a mismatch the reuse path forgets what it stored on the device and in host memory, when
    its last request has ended; until then it takes none. What a store on disk has stays."""
    refresh_s: float = 1.0
    """Seconds between two looks at the state file."""

    def __post_init__(self) -> None:
        # With NaN no look would ever be due, and a person's step back would not be seen.
        if not (isinstance(self.refresh_s, (int, float)) and 0 <= self.refresh_s < math.inf):
            raise UserError(f"refresh_s must be a number from 0 on, got {self.refresh_s!r}")


@dataclasses.dataclass(kw_only=True, eq=False)
class _Served:
    """A request that somebody waits for."""

    request: Request
    tokens: np.ndarray
    handle: RolloutHandle
    inner: Handle
    """The engine's own."""
    scheme: str
    began: float
    marks: list[tuple[int, float]]
    """Of each output: pieces that were seen, and when the last came."""


@dataclasses.dataclass(kw_only=True, eq=False)
class _Pair:
    """A request that is run twice."""

    served: _Served
    runs: Mapping[str, Handle]
    """By scheme; the served one's is among them, or serves beside them."""
    shadows: Mapping[str, Handle]
    """Those of them that nobody waits for."""


class RolloutSchemes(Schemes):
    """Schemes of which the stage of a rollout chooses one, and which watch over it."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        rollout: Rollout,
        options: RolloutOptions = RolloutOptions(),
        *,
        reuse: str = "hybrid",
        cold: str = "cold",
        safe: str = "cold",
        text: Text | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes engines that are made already.

        Args:
          engines: by name of scheme. ``reuse`` and ``cold`` keep digests and have one identity.
          rollout: its state, which outlives this process where it has a file.
          options: of shadow runs, thresholds and rollbacks.
          reuse: the scheme that is rolled out.
          cold: the one that it is compared with; see ``shadow.cold_sizes``.
          safe: the one that serves otherwise.
          text: tokenizer, where prompts come as text.
          clock: seconds; never goes back.

        Raises:
          UserError: a scheme does not exist, or runs of ``reuse`` and ``cold`` cannot be compared.
        """
        super().__init__(engines, self._scheme_of)
        for name in (reuse, cold, safe):
            if name not in self.engines:
                known = ", ".join(self.engines)
                raise UserError(f"there is no scheme {name!r}: choose of {known}")
        if reuse in (cold, safe):
            raise UserError(f"scheme {reuse!r} cannot be its own safe path: name another engine")
        require_comparable(self.engines[reuse], self.engines[cold])
        self.rollout, self.options = rollout, options
        self.reuse, self.cold, self.safe = reuse, cold, safe
        self.counters = RolloutCounters(state=rollout.state, served=dict.fromkeys(self.engines, 0))
        self._runs = RolloutEngines(self.engines, self.counters, self._note_fault)
        self.told = self.counters.copy()
        """The counters as they were after the last turn, for other threads."""
        self.mismatches: collections.deque[Mismatch] = collections.deque(maxlen=KEPT)
        """The last ones, the oldest first."""
        self.judge = Judge(options.thresholds)
        self._text, self._clock = text, clock
        self._state, self._refreshed = rollout.state, clock()
        self._served: list[_Served] = []
        self._pairs: list[_Pair] = []
        self._forget = False

    @property
    def stage(self) -> RolloutStage:
        """That of the rollout; OFF while the reuse path has yet to forget what it stored, and once
        its engine is left alone.
        """
        off = self._forget or self._runs.left_alone(self.reuse)
        return RolloutStage.OFF if off else self._state.stage

    @property
    def waiting(self) -> int:
        """Requests that are served and not complete; shadow runs do not count."""
        return len(self._served)

    def shadows(self) -> tuple[Mapping[str, Handle], ...]:
        """The requests that are run twice now, the oldest first: their runs by scheme."""
        return tuple(pair.runs for pair in self._pairs)

    # Requests.

    def submit(self, request: Request) -> RolloutHandle:
        """Takes a request; see ``Engine.submit``.

        Raises:
          UserError: as the engine does that is to serve it.
        """
        self._look()
        if isinstance(request.prompt, str):
            if self._text is None:
                raise UserError("the prompt is text and there is no tokenizer: pass text=")
            request = dataclasses.replace(request, prompt=self._text.encode(request.prompt))
        request = dataclasses.replace(request, prompt=prompt_ids(request.prompt))
        scheme = self._scheme_of(request)
        try:
            inner = self._runs.submit(scheme, request, self.step)
        except UserError:
            if scheme == self.safe:
                raise
            scheme = self.safe  # which may have more room
            inner = self._runs.submit(scheme, request, self.step)
        served = _Served(
            request=request,
            tokens=inner.tasks[0].prompt,
            handle=RolloutHandle(inner.tasks, driver=self.step, cancel=self._cancel),
            inner=inner,
            scheme=scheme,
            began=self._clock(),
            marks=[(0, 0.0)] * request.samples,
        )
        served.handle.scheme = scheme
        self._served.append(served)
        self.counters.served[scheme] += 1
        if self.stage is RolloutStage.SHADOW or (self.stage in SERVES and scheme == self.reuse):
            self._maybe_twice(served)
        return served.handle

    def _scheme_of(self, request: Request) -> str:
        """Who serves a request now; for one stage and percentage always the same."""
        if self.stage is RolloutStage.FULL:
            return self.reuse
        if self.stage is not RolloutStage.PERCENT:
            return self.safe
        tokens = prompt_ids(request.prompt)
        if not np.issubdtype(tokens.dtype, np.integer):
            return self.safe  # which refuses it
        place = self.options.shadow.place("serve", request.namespace, tokens)
        return self.reuse if place < self._state.percent / 100 else self.safe

    def _cancel(self, handle: Handle) -> bool:
        """Ends a request, and its shadow runs with it; False where it had ended before."""
        for served in self._served:
            if served.handle is handle:
                ended = self._runs.cancel(served.scheme, served.inner)
                self._watch()
                return ended
        return False

    def reset(self) -> None:
        """Cancels everything and forgets every prefix; the stage stays."""
        self.counters.dropped[Dropped.CANCELLED] += len(self._pairs)
        self.counters.running -= len(self._pairs)
        self._pairs.clear()
        self._served.clear()
        for name in self.engines:
            self._runs.empty(name)
        self._forget = False

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Ends every engine; whether all that was published is stored. See ``Engine.close``."""
        return self._runs.close(timeout_s=timeout_s)

    # Running twice.

    def _maybe_twice(self, served: _Served) -> None:
        self.counters.eligible += 1
        options = self.options.shadow
        if not options.sampled(served.request.namespace, served.tokens):
            return
        self.counters.sampled += 1
        if len(self._pairs) >= options.concurrent:
            self._drop(Dropped.BUSY)
            return
        others = {self.reuse, self.cold} - {served.scheme}
        if any(self._runs.left_alone(name) for name in others):
            self._drop(Dropped.FAULT)
            return
        if not all(self._has_room(name, served.request.samples) for name in others):
            self._drop(Dropped.ROOM)
            return
        shadows: dict[str, Handle] = {}
        try:
            for name in sorted(others):
                request = self._shadow_of(served.request, name)
                shadows[name] = self._runs.submit(name, request, self.step)
        except Exception as error:
            for given, handle in shadows.items():
                self._runs.cancel(given, handle)
            # Too large for it, or it has no tokenizer for a stop string; anything else is a fault.
            refused = isinstance(error, UserError)
            self._drop(Dropped.REFUSED if refused else Dropped.FAULT)
            if not refused:
                self._runs.note(name, error)
            return
        runs = {served.scheme: served.inner, **shadows}
        self._pairs.append(_Pair(served=served, runs=runs, shadows=shadows))
        self.counters.running += 1

    def _shadow_of(self, request: Request, name: str) -> Request:
        """As it is, but last, and where nothing is to be kept of it keeping nothing."""
        return dataclasses.replace(
            request,
            priority=LOWEST,
            timeout_s=self.options.shadow.longest_s,
            logprobs=None,
            publish=Publish.NEVER if name == self.cold else request.publish,
        )

    def _has_room(self, name: str, samples: int) -> bool:
        """Whether a shadow run takes no slot from served requests; the engine may have none."""
        tasks = self._tasks_served_by(name)
        queued = sum(task.stage in QUEUED for task in tasks)
        return not tasks or self.engines[name].runner.free_slots >= queued + samples

    def _tasks_served_by(self, name: str) -> list[Task]:
        return [
            task
            for served in self._served
            if served.scheme == name
            for task in served.inner.tasks
            if not task.ended
        ]

    def _give_way(self) -> None:
        """Ends shadow runs, the newest first, where served requests wait for a slot or room."""
        for name in {name for pair in self._pairs for name in pair.shadows}:
            full = not self.engines[name].runner.free_slots
            waiting = [task for task in self._tasks_served_by(name) if task.stage in QUEUED]
            need = sum(full or task.refused_at >= 0 for task in waiting if not task.follows)
            here = [
                pair for pair in self._pairs if name in pair.shadows and not pair.shadows[name].done
            ]
            for pair in here[::-1][:need]:
                self._end_pair(pair, Dropped.ROOM)

    def _drop(self, why: Dropped) -> None:
        self.counters.dropped[why] += 1

    def _end_pair(self, pair: _Pair, why: Dropped | None = None) -> None:
        """Ends what nobody waits for."""
        for name, handle in pair.shadows.items():
            self._runs.cancel(name, handle)
        self._pairs.remove(pair)
        self.counters.running -= 1
        if why is not None:
            self._drop(why)

    # One turn.

    def step(self) -> bool:
        """One turn of every engine that serves, and now and then of the others; see above.

        Returns whether any had anything to compute.
        """
        self._look()
        self._give_way()
        serving = {served.scheme for served in self._served}
        busy = any([self._runs.turn(name) for name in self.engines if name in serving])
        counters, every = self.counters, self.options.shadow.every
        counters.served_turns += busy
        if not busy or (every and counters.served_turns % every == 0):
            others = [name for name in self.engines if name not in serving]
            worked = any([self._turn_beside(name) for name in others])
            counters.shadow_turns += busy and worked
            busy = busy or worked
        self._watch()
        self.told = self.counters.copy()
        return busy

    def _turn_beside(self, name: str) -> bool:
        """Of an engine that nobody waits for: what it raises ends its shadow runs alone."""
        busy = self._runs.turn_beside(name)
        if busy is None:
            for pair in [pair for pair in self._pairs if name in pair.shadows]:
                self._end_pair(pair, Dropped.FAULT)
        return bool(busy)

    def _note_fault(self, name: str, error: Exception) -> None:
        if name == self.reuse:
            self.judge.note_fault(Side.REUSE, type(error).__name__)
        elif name == self.cold:
            self.judge.note_fault(Side.SAFE, type(error).__name__)

    def drain(self) -> None:
        """Runs until all requests and all shadow runs have ended."""
        while self._served or self._pairs:
            self.step()

    def _look(self) -> None:
        """Whether somebody has changed the stage."""
        now = self._clock()
        if now - self._refreshed >= self.options.refresh_s:
            self._refreshed = now
            self.rollout.refresh()
        if self.rollout.state is not self._state:
            self._moved(self._state, self.rollout.state)

    def _watch(self) -> None:
        """Notes what the turn gave, compares what has ended, and goes back where it must."""
        for served in tuple(self._served):
            self._note_times(served)
            if served.handle.done:
                self._served.remove(served)
                if served.scheme == self.reuse:
                    self._note_plans(served.inner)
        for pair in tuple(self._pairs):
            self._watch_pair(pair)
        verdict = self.judge.verdict() if self._state.stage is not RolloutStage.OFF else None
        if verdict is not None:
            cause, reason = verdict
            if cause is RollbackCause.MISMATCH:
                reason = f"{reason}; {self.mismatches[-1]}"
            self.rollout.roll_back(cause, reason)
            self._moved(self._state, self.rollout.state)
        if self._forget and not self.engines[self.reuse].waiting:
            self._runs.empty(self.reuse)
            self._forget = False

    def _note_times(self, served: _Served) -> None:
        """Of requests as they were submitted: what was started over has waited twice."""
        side = {self.reuse: Side.REUSE, self.safe: Side.SAFE}[served.scheme]
        for number, task in enumerate(served.inner.tasks):
            output, (seen, at) = task.output, served.marks[number]
            count = len(output.pieces)
            if count == seen:
                continue
            served.marks[number] = (count, output.last_token_s)
            if served.handle.restarted:
                continue
            if not seen:
                self.judge.note_first(side, output.first_token_s)
            else:
                self.judge.note_between(side, (output.last_token_s - at) / (count - seen))

    def _note_plans(self, run: Handle) -> None:
        for output in run.outputs:
            self.judge.note_plan(output.plan)

    def _watch_pair(self, pair: _Pair) -> None:
        served = pair.served
        if any(output.finish in _GIVEN_UP for output in served.inner.outputs):
            self._end_pair(pair, Dropped.CANCELLED)
            return
        if not all(run.done for run in pair.runs.values()):
            return
        reuse, cold = pair.runs[self.reuse], pair.runs[self.cold]
        if self.reuse in pair.shadows:
            self._note_plans(reuse)
        found = compare(
            reuse.outputs,
            cold.outputs,
            namespace=served.request.namespace,
            tokens=served.tokens,
        )
        if found is Verdict.INEXACT:
            self._end_pair(pair, Dropped.INEXACT)
        elif found is Verdict.INCOMPLETE:
            outputs = [output for run in pair.shadows.values() for output in run.outputs]
            late = any(output.finish is Finish.TIMED_OUT for output in outputs)
            self._end_pair(pair, Dropped.LATE if late else Dropped.CANCELLED)
        else:
            self._end_pair(pair)
            self.counters.compared += 1
            self.judge.note_comparison(found is Verdict.EQUAL)
            if isinstance(found, Mismatch):
                self.counters.mismatches += 1
                self.mismatches.append(found)
                _LOG.warning("reuse gave other bits than a cold run: %s", found)

    # Another stage.

    def _moved(self, before: RolloutState, after: RolloutState) -> None:
        self._state = self.counters.state = after
        self.counters.unwritten = self.rollout.unwritten
        last = after.history[-1] if after.history else None
        went_back = ORDER.index(after.stage) < ORDER.index(before.stage)
        if went_back and last is not None and last.cause is not None:
            self.counters.rollbacks[last.cause] += 1
            self._forget |= last.cause is RollbackCause.MISMATCH and self.options.forget
        if after.stage is before.stage:
            return
        if not (before.stage in SERVES and after.stage in SERVES):
            for pair in tuple(self._pairs):
                self._end_pair(pair, Dropped.STAGE)
        if before.stage in SERVES and after.stage not in SERVES:
            for served in tuple(self._served):
                if served.scheme == self.reuse:
                    self._start_over(served)
        self.judge.clear()

    def _start_over(self, served: _Served) -> None:
        """Moves a request to the safe path, where the options say so and it takes it."""
        how, seen = self.options.under_way, any(task.output.pieces for task in served.inner.tasks)
        if how is UnderWay.FINISH or (how is UnderWay.UNSEEN and seen) or served.inner.done:
            return
        request = served.request
        if request.timeout_s is not None:
            left = request.timeout_s - (self._clock() - served.began)
            if left <= 0:
                return  # its engine is about to end it
            request = dataclasses.replace(request, timeout_s=left)
        try:
            new = self._runs.submit(self.safe, request, self.step)
        except UserError as error:
            _LOG.warning("a request ends where it is, the safe path does not take it: %s", error)
            return
        self._runs.cancel(served.scheme, served.inner)
        served.inner, served.scheme = new, self.safe
        served.marks = [(0, 0.0)] * request.samples
        served.handle.move(new.tasks, self.safe)
        self.counters.restarted += 1
