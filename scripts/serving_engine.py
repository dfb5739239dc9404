r"""One thread that owns the engine, and what other threads hold of their requests.

    event loop                                    the engine's thread
    ----------                                    -------------------
    submit(requests) --> Ticket   --commands-->   between two turns: submit, cancel
      (what one iteration of the loop brings is one command)
                           ^                      turn: at most one decode step, some tiles
    news() <--one call a turn--- Update <----   what is new of every request

Everything that touches the engine runs on its thread, its making included. A cancelled request has
given back its slot before the next turn begins. A turn or a command that raises ends the requests
of that moment and empties the engine, which then goes on; several turns in a row that raise end it.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import enum
import functools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import serving_errors
from serving_backend import Backend, backend_of
from serving_updates import Began, Ended, Update

from hybridkv.engine.engine import Engine
from hybridkv.engine.handle import Handle
from hybridkv.engine.requests import Output, Request
from hybridkv.errors import UserError
from hybridkv.observe.rollout_handle import RolloutHandle
from hybridkv.observe.rollout_schemes import RolloutSchemes

T = TypeVar("T")
LOG = logging.getLogger("hybridkv.serve")
MOST_FAILURES = 3
"""Turns in a row that may raise."""
IDLE_S, IDLE_WITH_TIERS_S, STUCK_S = 1.0, 0.01, 0.001
"""How long an engine without work waits for a command before it looks again."""
MOST_RETRY_S = 60


class State(enum.Enum):
    """What the server can do."""

    STARTING = "starting"
    """Loading and compiling."""
    READY = "ready"
    STOPPING = "stopping"
    """What runs may end; nothing new is taken."""
    FAILED = "failed"
    """The engine is gone; the process should be restarted."""
    STOPPED = "stopped"


class Ticket:
    """Some requests on their way, in the hands of one event loop."""

    def __init__(self, owner: "EngineThread", choices: int, *, every_piece: bool) -> None:
        """Made by ``EngineThread.submit``.

        Args:
          owner: runs the requests.
          choices: outputs that come, over all requests.
          every_piece: whether tokens are wanted as they come, or all at the end.
        """
        self.loop = asyncio.get_running_loop()
        self.choices, self.every_piece = choices, every_piece
        self._owner = owner
        self._new: collections.deque[Update] = collections.deque()
        self._wake = asyncio.Event()
        self._left = choices
        self._error: Exception | None = None

    @property
    def ended(self) -> bool:
        """Whether all has ended and was given."""
        return not self._left and not self._new

    async def news(self) -> list[Update]:
        """What is new since the last call, once there is something; empty when all has ended.

        Raises:
          ApiError: the requests were refused or lost.
        """
        while not self._new:
            if self._error is not None:
                raise self._error
            if not self._left:
                return []
            self._wake.clear()
            await self._wake.wait()
        new = list(self._new)
        self._new.clear()
        return new

    def cancel(self) -> None:
        """Ends what has not ended. Any number of times, from any thread."""
        self._owner.cancel(self)

    def hand_out(self, updates: Sequence[Update], error: Exception | None) -> None:
        """On the event loop."""
        self._new.extend(updates)
        self._left -= sum(update.ended is not None for update in updates)
        self._error = self._error or error
        self._wake.set()


@dataclasses.dataclass(kw_only=True, eq=False)
class _Running:
    """The engine's thread's side of a ticket."""

    handles: tuple[Handle, ...]
    began: float
    given: list[int]
    """Pieces that were told, by choice; -1 once its end was."""

    @property
    def seeds(self) -> list[int]:
        return [task.sampling.seed for handle in self.handles for task in handle.tasks]

    @property
    def outputs(self) -> list[Output]:
        return [output for handle in self.handles for output in handle.outputs]

    @property
    def schemes(self) -> list[str | None]:
        return [
            handle.scheme if isinstance(handle, RolloutHandle) else None
            for handle in self.handles
            for _ in handle.tasks
        ]


_Arrived = tuple[Ticket, Sequence[Request]]


class EngineThread:
    """Runs one engine, or those of a rollout, for any number of event loops."""

    def __init__(
        self, make: Callable[[], Engine | RolloutSchemes], *, slots: int, max_waiting: int
    ) -> None:
        """Starts nothing yet.

        Args:
          make: builds what runs, warm-up included; called on the engine's thread.
          slots: choices that one engine runs at once.
          max_waiting: choices that may wait for a slot.
        """
        self._make, self._slots = make, slots
        self.places = slots + max_waiting
        self.backend: Backend | None = None
        self.state = State.STARTING
        self.unmade: BaseException | None = None
        """Why there is no engine and never will be."""
        self._commands: queue.SimpleQueue[Callable[[Backend], None]] = queue.SimpleQueue()
        self._arrived: dict[asyncio.AbstractEventLoop, list[_Arrived]] = {}
        self._running: dict[Ticket, _Running] = {}
        self._lock = threading.Lock()
        self._open: dict[Ticket, int] = {}
        self._seconds = 1.0
        """A request takes so long, lately."""
        self._failures = 0
        self._stopping = False
        self._close_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # From any thread.

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def engine(self) -> Engine | None:
        """The engine that reuses prefixes, once there is one."""
        return None if self.backend is None else self.backend.engine

    @property
    def open(self) -> int:
        """Choices that were taken and have not ended."""
        with self._lock:
            return sum(self._open.values())

    def submit(self, requests: Sequence[Request], *, every_piece: bool) -> Ticket:
        """Takes requests together, on an event loop.

        Raises:
          ApiError: the engine is not there, or too much waits.
        """
        choices = sum(request.samples for request in requests)
        ticket = Ticket(self, choices, every_piece=every_piece)
        with self._lock:
            self.require_ready()
            taken = sum(self._open.values())
            if taken + choices > self.places:
                raise serving_errors.busy(self._retry_after(taken + choices))
            self._open[ticket] = choices
            arrived = self._arrived.setdefault(ticket.loop, [])
            arrived.append((ticket, requests))
        if len(arrived) == 1:  # those that the loop is about to handle come along
            ticket.loop.call_soon(self._hand_over, ticket.loop)
        return ticket

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Gives the engine what has arrived together, so that no turn begins with the first alone.

        The wait is for work that the loop has to do anyway, never for a client.
        """
        with self._lock:
            arrived = self._arrived.pop(loop, [])

        def submit(backend: Backend) -> None:
            for ticket, requests in arrived:
                self._submit(backend, ticket, requests)

        if arrived:
            self._commands.put(submit)

    def require_ready(self) -> None:
        """Refuses while nothing can be run.

        Raises:
          ApiError: 503.
        """
        if self.state is State.READY:
            return
        starting = self.state is State.STARTING
        raise serving_errors.unavailable(
            f"the server is {self.state.value}",
            "not_ready" if starting else "unavailable",
            retry_after_s=5 if starting else None,
        )

    def cancel(self, ticket: Ticket) -> None:
        """Ends a ticket's requests before the next turn; see ``Ticket.cancel``."""
        with self._lock:
            if ticket not in self._open:
                return
        self._hand_over(ticket.loop)  # what is cancelled was submitted before
        self._commands.put(lambda backend: self._cancel(backend, ticket))

    def call(self, what: Callable[[Engine], T]) -> "concurrent.futures.Future[T]":
        """Runs a function on the engine's thread, between two turns."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run(backend: Backend) -> None:
            try:
                future.set_result(what(backend.engine))
            except Exception as error:
                future.set_exception(error)

        self._commands.put(run)
        return future

    def stop_taking(self) -> None:
        """Refuses what comes from now on."""
        with self._lock:
            self._stopping = True
            if self.state is State.READY:
                self.state = State.STOPPING

    def cancel_all(self) -> None:
        """Ends everything that runs."""
        with self._lock:
            tickets = list(self._open)
        for ticket in tickets:
            self.cancel(ticket)

    def close(self, *, timeout_s: float) -> bool:
        """Ends engine and thread: cancels what runs, then stores what was published within a time.

        Returns whether the thread has ended.
        """
        self.stop_taking()

        def end(backend: Backend) -> None:
            self._close_s = timeout_s

        if self._thread.is_alive():
            self._commands.put(end)
            self._thread.join(timeout_s + 5.0)
        return not self._thread.is_alive()

    def _retry_after(self, wanted: int) -> int:
        rounds = math.ceil(max(wanted - self._slots, 1) / self._slots)
        return min(max(math.ceil(rounds * self._seconds), 1), MOST_RETRY_S)

    # On the engine's thread.

    def _run(self) -> None:
        try:
            backend = backend_of(self._make())
        except BaseException as error:
            if not isinstance(error, UserError):  # which is one line, for whoever started this
                LOG.exception("the engine could not be made")
            self.unmade = error
            self._give_up()
            return
        self.backend, busy, end = backend, False, State.FAILED
        with self._lock:
            self.state = State.STOPPING if self._stopping else State.READY
        try:
            while self._goes_on:
                self._obey(backend, busy)
                if self._goes_on:
                    busy = self._turn(backend)
            end = self._end(backend)
        finally:  # whatever happened: nobody waits for a thread that is gone
            self._give_up(end)

    @property
    def _goes_on(self) -> bool:
        return self._close_s is None and self.state is not State.FAILED

    def _obey(self, backend: Backend, busy: bool) -> None:
        """Runs commands: those that are there, and where there is nothing to do waits for one."""
        with contextlib.suppress(queue.Empty):
            if busy:
                command = self._commands.get_nowait()
            else:
                command = self._commands.get(timeout=self._patience(backend))
            while True:
                self._guarded(backend, functools.partial(command, backend))
                command = self._commands.get_nowait()

    def _guarded(self, backend: Backend, what: Callable[[], T]) -> T | None:
        """The result; None, and the engine emptied, where it raises."""
        try:
            return what()
        except Exception:
            LOG.exception("the engine failed")
            self._mend(backend)
            return None

    def _patience(self, backend: Backend) -> float:
        if backend.waiting:
            return STUCK_S
        return IDLE_WITH_TIERS_S if backend.has_tiers else IDLE_S

    def _turn(self, backend: Backend) -> bool:
        """Whether there may be more to compute at once."""

        def turn() -> bool:
            busy = backend.step()
            self._tell()
            self._failures = 0
            return busy

        return self._guarded(backend, turn) is not False

    def _submit(self, backend: Backend, ticket: Ticket, requests: Sequence[Request]) -> None:
        handles: list[Handle] = []
        try:
            for request in requests:
                handles.append(backend.submit(request))
        except Exception as error:  # one request never ends the engine
            self._guarded(backend, lambda: [backend.cancel(handle) for handle in handles])
            if isinstance(error, UserError):
                refusal = serving_errors.invalid(str(error))
            else:
                LOG.exception("a request could not be submitted")
                refusal = serving_errors.internal("the engine could not take this request")
            self._finish(ticket, refusal)
            return
        self._running[ticket] = _Running(
            handles=tuple(handles), began=time.monotonic(), given=[0] * ticket.choices
        )

    def _cancel(self, backend: Backend, ticket: Ticket) -> None:
        running = self._running.get(ticket)
        if running is None:
            return
        for handle in running.handles:
            backend.cancel(handle)
        self._tell()

    def _tell(self) -> None:
        """Hands what is new to the event loops: one call a loop and turn."""
        told: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, list[Update]]]] = {}
        # All before any is closed: what raises leaves every ticket to be told of it.
        found = [(ticket, run, _new(ticket, run)) for ticket, run in self._running.items()]
        for ticket, running, updates in found:
            if updates:
                told.setdefault(ticket.loop, []).append((ticket, updates))
            if all(given < 0 for given in running.given):
                del self._running[ticket]
                self._close_ticket(ticket)
                self._seconds += 0.2 * (time.monotonic() - running.began - self._seconds)
        for loop, news in told.items():
            _call(loop, functools.partial(_hand_out, news))

    def _finish(self, ticket: Ticket, error: Exception) -> None:
        self._running.pop(ticket, None)
        self._close_ticket(ticket)
        _call(ticket.loop, lambda: ticket.hand_out((), error))

    def _close_ticket(self, ticket: Ticket) -> None:
        with self._lock:
            self._open.pop(ticket, None)

    def _mend(self, backend: Backend) -> None:
        """After something raised: ends what ran, forgets everything, goes on."""
        self._failures += 1
        for ticket in list(self._running):
            self._finish(ticket, serving_errors.internal("the engine failed during this request"))
        try:
            if self._failures >= MOST_FAILURES:
                raise RuntimeError(f"{self._failures} turns in a row failed")
            backend.reset()
        except Exception:
            LOG.exception("the engine is given up")
            with self._lock:
                self.state = State.FAILED

    def _end(self, backend: Backend) -> State:
        """The last state."""
        failed = self.state is State.FAILED
        try:
            stored = backend.close(timeout_s=self._close_s or 0.0)
            if not stored:
                LOG.warning("not everything was stored")
        except Exception:
            LOG.exception("the engine could not be closed")
        self._tell()
        return State.FAILED if failed else State.STOPPED

    def _give_up(self, state: State = State.FAILED) -> None:
        """Nothing is run any more: whoever waits is told so."""
        with self._lock:
            self.state = state
            tickets = list(self._open)
        for ticket in tickets:
            gone = serving_errors.unavailable(f"the server is {state.value}", "unavailable")
            self._finish(ticket, gone)


def _new(ticket: Ticket, running: _Running) -> list[Update]:
    """What was not told yet of a ticket's choices."""
    outputs = running.outputs
    if not ticket.every_piece and not all(output.finish for output in outputs):
        return []
    updates = []
    told = zip(outputs, running.seeds, running.schemes, strict=True)
    for choice, (output, seed, scheme) in enumerate(told):
        given = running.given[choice]
        if given < 0:
            continue
        pieces, ended = tuple(output.pieces[given:]), None
        running.given[choice] += len(pieces)
        if output.finish is not None:
            ended, running.given[choice] = Ended.of(output, output.finish, seed), -1
        if pieces or ended is not None:
            began = Began.of(output, scheme)
            updates.append(Update(choice=choice, pieces=pieces, began=began, ended=ended))
    return updates


def _hand_out(news: Sequence[tuple[Ticket, list[Update]]]) -> None:
    for ticket, updates in news:
        ticket.hand_out(updates, None)


def _call(loop: asyncio.AbstractEventLoop, what: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, and who waited with it
        loop.call_soon_threadsafe(what)
