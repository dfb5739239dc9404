"""What to do next: pure functions over what every request is and what is free.

    submit --> WAITING --> (RESTORING) --> PREFILLING --> DECODING --> end
                 ^   ^           |              |           |  ^
                 |   +--late-----+              |           v  |
                 +------------preempted---------+         PARKED

``arrange`` decides who comes and who goes, ``select`` what the next turn computes. Neither reads a
clock nor changes anything: the engine passes the time, carries out the answer and asks again.

Why nobody waits for ever:
- a request's level rises while it waits (``aging_s``), so newer ones overtake it only for a time;
- one that does not fit lets smaller ones pass for ``patience_s`` at most; then what runs drains,
  which it does because every request has a limit of tokens, and it fits because nothing is admitted
  that can never fit;
- only a request of lower level than the newcomer's priority is preempted, and ages out of that;
- a turn with something to decode decodes, and a turn with a prompt computes a tile of one.
"""

import dataclasses
import enum
from collections.abc import Iterable, Sequence


class Stage(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    RESTORING = "restoring"
    """What its prefix needs is on its way; its room is reserved and it has no slot."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PARKED = "parked"


QUEUED = (Stage.WAITING, Stage.PARKED)
SEATED = (Stage.PREFILLING, Stage.DECODING)
FOREVER = float("inf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One request as the scheduler sees it. Times are seconds of one clock."""

    id: int
    stage: Stage
    arrived: float
    priority: int = 0
    """Larger goes first."""
    expires: float = FOREVER
    restore_by: float = FOREVER
    """When a restoring one gives up and recomputes."""
    blocks: int = 0
    """Queued: room it needs at most. Seated: room that parking it frees at least."""
    tiles: int = 0
    """Tiles of its prompt that are left."""
    follows: bool = False
    """Waits for another prompt to publish a prefix that it shares."""
    refused_at: int = -1
    """``Room.version`` when it last found no room."""
    park_bytes: int = 0
    """Host memory that preempting it takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """What is free."""

    slots: int
    blocks: int
    """Blocks that are free or can be evicted."""
    version: int
    """Counts up whenever something is given back."""
    park_bytes: int = 0
    """Host memory that is left for what is preempted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Who waits how long."""

    token_budget: int = 0
    """Tokens of one turn, each decoded one and each place of a tile counting once. What decoding
    leaves is filled with tile steps, always with one at least while there is a prompt: more means
    prompts are done sooner and tokens come less evenly."""
    aging_s: float = 10.0
    """Seconds of waiting that are worth one step of priority."""
    patience_s: float = 1.0
    """How long a request that does not fit lets smaller ones pass."""

    def level(self, job: Job, now: float) -> float:
        """What a job competes with: its priority, and how long ago it arrived."""
        return job.priority + (now - job.arrived) / self.aging_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One to admit, if it fits."""

    id: int
    strict: bool
    """Where it does not fit, nobody behind it may go first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Who comes and who goes, to be carried out in this order."""

    expired: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    """Restoring ones past their deadline."""
    park: tuple[int, ...] = ()
    """To preempt, so that the first candidate fits."""
    admit: tuple[Candidate, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one turn computes."""

    tiles: tuple[tuple[int, ...], ...] = ()
    """Tile steps in order, each with the requests of its lanes."""
    decode: tuple[int, ...] = ()


def arrange(jobs: Iterable[Job], room: Room, now: float, options: SchedulerOptions) -> Arrangement:
    """Who comes and who goes now."""
    jobs = tuple(jobs)
    expired = tuple(job.id for job in jobs if now >= job.expires)
    alive = [job for job in jobs if now < job.expires]
    late = (x.id for x in alive if x.stage is Stage.RESTORING and now >= x.restore_by)
    queue = _in_order((x for x in alive if x.stage in QUEUED and not x.follows), now, options)
    park = _to_park(queue, alive, room, now, options)
    return Arrangement(
        expired=expired,
        late=tuple(late),
        park=park,
        admit=_candidates(queue, room, now, options, forced=bool(park)),
    )


def _in_order(jobs: Iterable[Job], now: float, options: SchedulerOptions) -> list[Job]:
    return sorted(jobs, key=lambda job: (-options.level(job, now), job.arrived, job.id))


def _candidates(
    queue: Sequence[Job], room: Room, now: float, options: SchedulerOptions, *, forced: bool
) -> tuple[Candidate, ...]:
    """Those to try; asking again is useless until something has been given back."""
    chosen = []
    for number, job in enumerate(queue):
        strict = now - job.arrived >= options.patience_s
        if job.refused_at < room.version or (forced and number == 0):
            chosen.append(Candidate(id=job.id, strict=strict))
        elif strict:
            break
    return tuple(chosen)


def _to_park(
    queue: Sequence[Job],
    jobs: Iterable[Job],
    room: Room,
    now: float,
    options: SchedulerOptions,
) -> tuple[int, ...]:
    """Whom to preempt for the first in the queue: the fewest that help, or nobody."""
    if not queue:
        return ()
    head = queue[0]
    fits = room.slots > 0 and (head.refused_at < room.version or head.blocks <= room.blocks)
    if fits:
        return ()
    lower = [job for job in jobs if job.stage in SEATED and options.level(job, now) < head.priority]
    lower.sort(key=lambda job: (options.level(job, now), -job.arrived, -job.id))
    slots, blocks, memory, chosen = room.slots, room.blocks, room.park_bytes, []
    for job in lower:
        if slots > 0 and blocks >= head.blocks:
            break
        if job.park_bytes > memory:
            continue
        memory -= job.park_bytes
        chosen.append(job.id)
        slots, blocks = slots + 1, blocks + job.blocks
    return tuple(chosen) if slots > 0 and blocks >= head.blocks else ()


def select(
    jobs: Iterable[Job], now: float, options: SchedulerOptions, *, lanes: int, tile: int
) -> Work:
    """What the next turn computes: every decoding request's token, and tiles of prompts."""
    jobs = tuple(jobs)
    decode = tuple(job.id for job in jobs if job.stage is Stage.DECODING)
    prompts = _in_order((x for x in jobs if x.stage is Stage.PREFILLING), now, options)
    steps = max((options.token_budget - len(decode)) // (lanes * tile), 1)
    left = {job.id: job.tiles for job in prompts}
    tiles = []
    for _ in range(steps):
        lane = tuple(id_ for id_, count in left.items() if count > 0)[:lanes]
        if not lane:
            break
        tiles.append(lane)
        for id_ in lane:
            left[id_] -= 1
    return Work(tiles=tuple(tiles), decode=decode)
