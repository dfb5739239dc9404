r"""When first tokens come: requests wait for room, loads, a slot and the tiles before theirs.

    arrival --room--> admitted --loads--> ready --slot--> tiles --> decode --> end
                                                     first token ^

One server works in turns: a decode step for every slot that decodes, then up to ``tiles_per_turn``
tile steps. Requests are admitted in order of arrival and prompts computed in the order in which
they become ready; loads of a tier go one after the other. Between two events everything is even, so
that the clock jumps from event to event; a turn that is cut by one counts by its share.
"""

import collections
import dataclasses
import heapq
import math

import numpy as np
from jaxtyping import Bool, Float64, Int64

from hybridkv.arithmetic import cdiv
from hybridkv.blocks.entries import Tier
from hybridkv.errors import UserError
from hybridkv.replay.costs import Server

NEVER = float("inf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """How the server shares its time."""

    slots: int = 64
    """Sequences that are computed or decode at once."""
    tiles_per_turn: int = 4
    """Tile steps between two decode steps."""
    rate: float = 1.0
    """Requests a second, to those of the trace: 2 halves the time between them."""

    def __post_init__(self) -> None:
        if self.slots < 1 or self.tiles_per_turn < 1:
            raise UserError(f"slots and tiles a turn must be at least 1, got {self}")
        if not 0 < self.rate < NEVER:
            raise UserError(f"a rate of {self.rate}: give a number above 0")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """What each request has to do, one array a field."""

    arrival: Float64[np.ndarray, " n"]
    """Seconds, ascending."""
    prompt: Int64[np.ndarray, " n"]
    start: Int64[np.ndarray, " n"]
    """First computed position."""
    output: Int64[np.ndarray, " n"]
    host_bytes: Int64[np.ndarray, " n"]
    """To bring from host memory first."""
    disk_bytes: Int64[np.ndarray, " n"]
    running_bytes: Int64[np.ndarray, " n"]
    """Of the devices' room while it runs."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Times:
    """What became of each request; seconds, NaN where it was refused."""

    admitted: Float64[np.ndarray, " n"]
    first_token: Float64[np.ndarray, " n"]
    end: Float64[np.ndarray, " n"]
    alone: Float64[np.ndarray, " n"]
    """To its first token on an idle server."""
    refused: Bool[np.ndarray, " n"]
    """Larger than all room: never admitted."""
    busy: float
    """Seconds in which the server computed."""
    computing: float
    """The part of ``busy`` that was prompts'."""
    span: float
    """Until the last request ended."""
    most_running: int
    """Sequences at once."""


class Simulation:
    """The state of one server over its clock."""

    def __init__(self, server: Server, options: QueueOptions, work: Work, room: float) -> None:
        count = len(work.arrival)
        self.server, self.options, self.work = server, options, work
        self.arrival = work.arrival / options.rate
        self.admitted, self.first, self.end = (np.full(count, np.nan) for _ in range(3))
        self.refused = work.running_bytes > room
        self._waiting = collections.deque(np.flatnonzero(~self.refused).tolist())
        self._room = float(room)
        self._freed = 0.0
        """When room was given back last."""
        self._blocked = -1
        """The request that was seen to wait for room."""
        self._host_free = self._disk_free = 0.0
        """When the links have done what they were given."""
        self._loading: list[tuple[float, int]] = []
        """Heap of (ready, request)."""
        self._prompts: collections.deque[int] = collections.deque()
        self._tiles_left = 0.0
        self._decoding: list[tuple[float, int]] = []
        """Heap of (turn in which it ends, request)."""
        self._context = 0.0
        """Tokens of all decoding sequences."""
        self.now = self._turn = 0.0
        self.busy = self.computing = 0.0
        self.most_running = 0

    def run(self) -> None:
        """To the end of the last request."""
        while self._waiting or self._loading or self._prompts or self._decoding:
            self._admit()
            self._seat()
            if self._prompts:
                self._compute()
            elif self._decoding:
                self._decode()
            else:
                self.now = max(self.now, self._next_event())

    # Waiting.

    def _admit(self) -> None:
        """Everything that has come and fits, in order; loads begin at once."""
        work = self.work
        while self._waiting:
            request = self._waiting[0]
            size = float(work.running_bytes[request])
            if self.arrival[request] > self.now:
                return
            if size > self._room:
                self._blocked = request
                return
            self._waiting.popleft()
            self._room -= size
            begin = float(self.arrival[request])
            if request == self._blocked:
                begin = max(begin, self._freed)
            self.admitted[request] = begin
            ready = begin
            if work.host_bytes[request]:
                seconds = self.server.move_seconds(Tier.HOST, int(work.host_bytes[request]))
                self._host_free = ready = max(begin, self._host_free) + seconds
            if work.disk_bytes[request]:
                seconds = self.server.move_seconds(Tier.DISK, int(work.disk_bytes[request]))
                self._disk_free = max(begin, self._disk_free) + seconds
                ready = max(ready, self._disk_free)
            heapq.heappush(self._loading, (ready, request))

    def _seat(self) -> None:
        while self._loading and self._loading[0][0] <= self.now and self._free_slots():
            _, request = heapq.heappop(self._loading)
            self._prompts.append(request)
            if len(self._prompts) == 1:
                self._begin()
            self.most_running = max(self.most_running, len(self._prompts) + len(self._decoding))

    def _free_slots(self) -> int:
        return self.options.slots - len(self._prompts) - len(self._decoding)

    def _next_event(self) -> float:
        """The next time at which something may be admitted or seated."""
        ready = self._loading[0][0] if self._loading and self._free_slots() else NEVER
        come = NEVER
        if self._waiting and self.work.running_bytes[self._waiting[0]] <= self._room:
            come = float(self.arrival[self._waiting[0]])
        return min(ready, come)

    # Working.

    def _begin(self) -> None:
        request = self._prompts[0]
        left = int(self.work.prompt[request] - self.work.start[request])
        self._tiles_left = float(cdiv(left, self.server.tile))

    def _decode_step(self) -> float:
        return self.server.decode_seconds(len(self._decoding), self._context)

    def _compute(self) -> None:
        """Tiles of the first prompt, until it is done or a sequence ends."""
        request, per_turn = self._prompts[0], self.options.tiles_per_turn
        tiles = self._tiles_left
        if self._decoding:
            tiles = min(tiles, max((self._decoding[0][0] - self._turn) * per_turn, 0.0))
        done = float(self.work.prompt[request]) - self._tiles_left * self.server.tile
        seconds = self.server.tiles_seconds(max(done, 0.0), tiles)
        self.computing += seconds
        seconds += tiles / per_turn * self._decode_step()
        self._pass(seconds, tiles / per_turn)
        self._tiles_left -= tiles
        if self._tiles_left <= 1e-9:
            self._prompts.popleft()
            self._answer(request)
            if self._prompts:
                self._begin()
        self._finish()

    def _answer(self, request: int) -> None:
        """The first token is there; the others are decoded."""
        self.first[request] = self.now
        more = int(self.work.output[request]) - 1
        if more < 1:
            self._leave(request)
            return
        heapq.heappush(self._decoding, (self._turn + more, request))
        self._context += self._length(request)

    def _length(self, request: int) -> float:
        """Tokens of its context, on average over its answer."""
        return float(self.work.prompt[request] + self.work.output[request] / 2)

    def _decode(self) -> None:
        """Turns without a prompt, until a sequence ends or another may come."""
        step = self._decode_step()
        turns = max(self._decoding[0][0] - self._turn, 0.0)
        until = self._next_event() - self.now
        turns = min(turns, max(math.ceil(until / step), 1)) if until < NEVER else turns
        self._pass(turns * step, turns)
        self._finish()

    def _pass(self, seconds: float, turns: float) -> None:
        self.now += seconds
        self.busy += seconds
        self._turn += turns

    def _finish(self) -> None:
        while self._decoding and self._decoding[0][0] <= self._turn + 1e-9:
            _, request = heapq.heappop(self._decoding)
            self._context -= self._length(request)
            self._leave(request)

    def _leave(self, request: int) -> None:
        self.end[request] = self._freed = self.now
        self._room += float(self.work.running_bytes[request])


def simulate(server: Server, options: QueueOptions, work: Work) -> Times:
    """Runs a trace through one server."""
    simulation = Simulation(server, options, work, server.room[Tier.DEVICE])
    simulation.run()
    served = ~simulation.refused
    rows = zip(work.start, work.prompt, work.host_bytes, work.disk_bytes, strict=True)
    alone = np.asarray(
        [
            server.prompt_seconds(int(start), int(prompt))
            + max(server.move_seconds(Tier.HOST, host), server.move_seconds(Tier.DISK, disk))
            for start, prompt, host, disk in rows
        ]
    )
    return Times(
        admitted=simulation.admitted - simulation.arrival,
        first_token=simulation.first - simulation.arrival,
        end=simulation.end - simulation.arrival,
        alone=np.where(served, alone, np.nan),
        refused=simulation.refused,
        busy=simulation.busy,
        computing=simulation.computing,
        span=float(np.nanmax(simulation.end, initial=0.0)),
        most_running=simulation.most_running,
    )
