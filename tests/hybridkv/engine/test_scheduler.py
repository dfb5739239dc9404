"""The scheduler alone, on a virtual clock."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.engine.scheduler import (
    Candidate,
    Job,
    Room,
    SchedulerOptions,
    Stage,
    arrange,
    select,
)

OPTIONS = SchedulerOptions(aging_s=10.0, patience_s=1.0)
ROOM = Room(slots=1, blocks=100, version=7)


def job(id: int, stage: Stage = Stage.WAITING, *, arrived: float = 0.0, **more: object) -> Job:
    return Job(id=id, stage=stage, arrived=arrived, **{"blocks": 4, **more})


def admitted(jobs, room=ROOM, now=0.5, options=OPTIONS):
    return tuple(c.id for c in arrange(jobs, room, now, options).admit)


def test_who_came_first_goes_first_and_ids_break_ties():
    assert admitted([job(2, arrived=0.2), job(1, arrived=0.2), job(3, arrived=0.1)]) == (3, 1, 2)


def test_priority_goes_first_until_waiting_makes_up_for_it():
    old, new = job(1, arrived=0.0), job(2, arrived=9.0, priority=1)
    assert admitted([old, new], now=9.0) == (2, 1)
    late = dataclasses.replace(new, arrived=11.0)
    assert admitted([old, late], now=11.0) == (1, 2)


def test_one_without_room_lets_smaller_ones_pass_for_its_patience():
    refused = job(1, refused_at=7)
    assert admitted([refused, job(2)], now=0.9) == (2,)
    assert admitted([refused, job(2)], now=1.0) == ()


def test_one_without_room_is_asked_again_when_something_was_given_back():
    refused = job(1, refused_at=7)
    assert admitted([refused], room=dataclasses.replace(ROOM, version=8), now=5.0) == (1,)


def test_one_past_its_patience_is_strict():
    jobs = [job(1), job(2, arrived=0.5)]
    assert arrange(jobs, ROOM, 1.2, OPTIONS).admit == (
        Candidate(id=1, strict=True),
        Candidate(id=2, strict=False),
    )


def test_followers_are_not_asked():
    assert admitted([job(1, follows=True), job(2)]) == (2,)


@pytest.mark.parametrize("stage", list(Stage))
def test_every_stage_expires_at_its_time(stage):
    one = job(1, stage, expires=3.0)
    assert arrange([one], ROOM, 2.9, OPTIONS).expired == ()
    late = arrange([one], ROOM, 3.0, OPTIONS)
    assert late.expired == (1,)
    assert late.admit == ()
    assert late.park == ()


def test_a_restoring_one_gives_up_at_its_deadline():
    one = job(1, Stage.RESTORING, restore_by=2.0)
    assert arrange([one], ROOM, 1.9, OPTIONS).late == ()
    assert arrange([one], ROOM, 2.0, OPTIONS).late == (1,)


FULL = Room(slots=0, blocks=0, version=7)


def test_the_lowest_and_newest_is_preempted():
    running = [
        job(1, Stage.DECODING, arrived=0.0),
        job(2, Stage.DECODING, arrived=0.3),
        job(3, Stage.PREFILLING, arrived=0.2, priority=1),
    ]
    arranged = arrange([*running, job(4, arrived=0.4, priority=2)], FULL, 0.4, OPTIONS)
    assert arranged.park == (2,)
    assert arranged.admit[0].id == 4


def test_as_many_are_preempted_as_room_takes():
    running = [job(i, Stage.DECODING, blocks=3) for i in range(4)]
    big = job(9, priority=5, blocks=8, refused_at=7)
    assert len(arrange([*running, big], FULL, 0.1, OPTIONS).park) == 3


def test_nobody_is_preempted_where_it_would_not_help():
    running = [job(i, Stage.DECODING, blocks=3) for i in range(2)]
    big = job(9, priority=5, blocks=8, refused_at=7)
    assert arrange([*running, big], FULL, 0.1, OPTIONS).park == ()


def test_equals_and_those_who_waited_long_are_not_preempted():
    newcomer = job(2, arrived=0.1, priority=1)
    assert arrange([job(1, Stage.DECODING, priority=1), newcomer], FULL, 0.1, OPTIONS).park == ()
    newcomer = dataclasses.replace(newcomer, arrived=11.0)
    assert arrange([job(1, Stage.DECODING), newcomer], FULL, 11.0, OPTIONS).park == ()


def test_what_cannot_be_parked_stays():
    running = job(1, Stage.DECODING, park_bytes=1)
    assert arrange([running, job(2, priority=3)], FULL, 0.1, OPTIONS).park == ()


def test_what_is_parked_together_fits_its_memory_together():
    running = [job(i, Stage.DECODING, blocks=3, park_bytes=10) for i in range(3)]
    starting = job(3, Stage.PREFILLING, blocks=3)
    room = dataclasses.replace(FULL, park_bytes=19)
    big = job(9, priority=5, blocks=6, refused_at=7)
    assert len(arrange([*running, big], room, 0.1, OPTIONS).park) == 0
    assert sorted(arrange([*running, starting, big], room, 0.1, OPTIONS).park)[-1] == 3
    room = dataclasses.replace(FULL, park_bytes=20)
    assert len(arrange([*running, big], room, 0.1, OPTIONS).park) == 2


def test_nobody_is_preempted_while_there_is_room():
    running = job(1, Stage.DECODING)
    assert arrange([running, job(2, priority=3)], ROOM, 0.1, OPTIONS).park == ()


def test_a_turn_decodes_all_and_computes_one_tile_at_least():
    jobs = [job(1, Stage.DECODING), job(2, Stage.DECODING), job(3, Stage.PREFILLING, tiles=5)]
    work = select(jobs, 0.0, OPTIONS, lanes=2, tile=16)
    assert work.decode == (1, 2)
    assert work.tiles == ((3,),)


def test_the_budget_left_by_decoding_is_filled_with_tiles():
    jobs = [job(1, Stage.DECODING), job(3, Stage.PREFILLING, tiles=5)]
    options = dataclasses.replace(OPTIONS, token_budget=1 + 3 * 16)
    assert select(jobs, 0.0, options, lanes=1, tile=16).tiles == ((3,),) * 3
    options = dataclasses.replace(OPTIONS, token_budget=3 * 16)
    assert select(jobs, 0.0, options, lanes=1, tile=16).tiles == ((3,),) * 2


def test_lanes_take_different_prompts_the_first_first():
    jobs = [job(i, Stage.PREFILLING, tiles=i + 1, arrived=i) for i in range(3)]
    options = dataclasses.replace(OPTIONS, token_budget=4 * 32)
    work = select(jobs, 3.0, options, lanes=2, tile=16)
    assert work.tiles == ((0, 1), (1, 2), (2,), (2,))


def test_nothing_to_do_is_no_work():
    work = select(
        [job(1), job(2, Stage.PARKED), job(3, Stage.RESTORING)], 0.0, OPTIONS, lanes=1, tile=8
    )
    assert (work.tiles, work.decode) == ((), ())


# Progress, on a simulated engine.

TURN_S = 0.1
SLOTS, BLOCKS = 3, 12


@dataclasses.dataclass(kw_only=True)
class Simulated:
    """One request of the simulation; it holds ``blocks`` while it is seated."""

    id: int
    arrives: float
    priority: int
    blocks: int
    tiles: int
    tokens: int
    restores: bool
    cancelled_at: float | None
    stage: Stage | None = None
    refused_at: int = -1
    restore_by: float = float("inf")
    seated_at: float | None = None
    ended_at: float | None = None

    @property
    def turns(self) -> int:
        return self.tiles + self.tokens


class World:
    """Slots, blocks, a clock that only turns move; no arithmetic."""

    def __init__(self, requests):
        self.requests, self.now, self.version = requests, 0.0, 0
        self.served = {r.id: [r.tiles, r.tokens] for r in requests}

    def _holders(self):
        seated = (Stage.PREFILLING, Stage.DECODING)
        return [r for r in self.requests if r.stage in (*seated, Stage.RESTORING)]

    def room(self) -> Room:
        seated = [r for r in self.requests if r.stage in (Stage.PREFILLING, Stage.DECODING)]
        used = sum(r.blocks for r in self._holders())
        assert len(seated) <= SLOTS
        assert used <= BLOCKS
        return Room(slots=SLOTS - len(seated), blocks=BLOCKS - used, version=self.version)

    def jobs(self):
        return [
            Job(
                id=r.id,
                stage=r.stage,
                arrived=r.arrives,
                priority=r.priority,
                blocks=r.blocks,
                tiles=self.served[r.id][0],
                refused_at=r.refused_at,
                restore_by=r.restore_by,
            )
            for r in self.requests
            if r.stage is not None
        ]

    def end(self, r):
        r.stage, r.ended_at = None, self.now
        self.version += 1

    def admit(self, r) -> bool:
        room = self.room()
        if room.blocks < r.blocks or (room.slots == 0 and not r.restores):
            r.refused_at = self.version
            return False
        if r.restores:
            r.restores, r.stage, r.restore_by = False, Stage.RESTORING, self.now + 0.5
            return True
        r.stage = Stage.PREFILLING if self.served[r.id][0] else Stage.DECODING
        r.seated_at = self.now if r.seated_at is None else r.seated_at
        return True

    def turn(self):
        for r in self.requests:
            if r.stage is None and r.ended_at is None and r.arrives <= self.now:
                r.stage = Stage.WAITING
            if r.stage is not None and r.cancelled_at is not None and r.cancelled_at <= self.now:
                self.end(r)
        by_id = {r.id: r for r in self.requests}
        arrangement = arrange(self.jobs(), self.room(), self.now, OPTIONS)
        for id_ in arrangement.late:
            by_id[id_].stage, by_id[id_].restore_by = Stage.WAITING, float("inf")
            self.version += 1
        for id_ in arrangement.park:
            r = by_id[id_]
            r.stage = Stage.PARKED if r.stage is Stage.DECODING else Stage.WAITING
            self.version += 1
        for number, candidate in enumerate(arrangement.admit):
            fits = self.admit(by_id[candidate.id])
            assert fits or not (arrangement.park and number == 0), "preempted for nothing"
            if not fits and candidate.strict:
                break
        work = select(self.jobs(), self.now, OPTIONS, lanes=1, tile=16)
        seated = [r for r in self.requests if r.stage in (Stage.PREFILLING, Stage.DECODING)]
        assert bool(seated) == bool(work.tiles or work.decode)
        for ids in work.tiles:
            for id_ in ids:
                self.served[id_][0] -= 1
        for r in seated:
            if r.id in work.decode:
                self.served[r.id][1] -= 1
                if not self.served[r.id][1]:
                    self.end(r)
            elif r.stage is Stage.PREFILLING and not self.served[r.id][0]:
                r.stage = Stage.DECODING
        self.now += TURN_S


def wait_bound(requests, one) -> float:
    """Seconds within which a request has its seat.

    After ``own`` nobody who arrives outranks it and nobody may pass it, so what can be served
    before it are those who arrived by then; each turn serves one of them at least one unit.
    """
    highest = max(r.priority for r in requests)
    own = one.arrives + max((highest - one.priority) * OPTIONS.aging_s, OPTIONS.patience_s)
    before = [r for r in requests if r.arrives <= own + TURN_S]
    # A restore takes up to 0.5 s, in which nothing else need be served.
    return own + sum(r.turns + 2 + 5 * r.restores + 1 for r in before) * TURN_S


requests_ = st.lists(
    st.builds(
        dict,
        gap=st.sampled_from([0.0, 0.0, 0.1, 0.5, 3.0]),
        priority=st.integers(0, 3),
        blocks=st.integers(1, BLOCKS),
        tiles=st.integers(1, 6),
        tokens=st.integers(1, 12),
        restores=st.booleans(),
        cancelled_after=st.sampled_from([None, None, None, 0.0, 0.3, 2.0]),
    ),
    min_size=1,
    max_size=24,
)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(requests_)
def test_every_request_is_served_within_its_bound(drawn):
    at, requests = 0.0, []
    for number, fields in enumerate(drawn):
        at += fields.pop("gap")
        after = fields.pop("cancelled_after")
        cancelled = None if after is None else at + after
        requests.append(Simulated(id=number, arrives=at, cancelled_at=cancelled, **fields))
    bounds = {r.id: wait_bound(requests, r) for r in requests}
    world = World(requests)
    limit = at + 10 + 3 * OPTIONS.aging_s + sum(r.turns + 10 for r in requests) * TURN_S
    while any(r.ended_at is None for r in requests):
        world.turn()
        assert world.now < limit, "no end in sight"
    for r in requests:
        if r.cancelled_at is None:
            assert r.seated_at is not None
            assert r.seated_at <= bounds[r.id]
    assert world.room() == Room(slots=SLOTS, blocks=BLOCKS, version=world.version)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(1, BLOCKS), st.integers(1, 4))
def test_a_stream_of_important_requests_cannot_starve_a_large_humble_one(priority, blocks, tokens):
    humble = Simulated(
        id=0,
        arrives=0.0,
        priority=0,
        blocks=blocks,
        tiles=3,
        tokens=tokens,
        restores=False,
        cancelled_at=None,
    )
    stream = [
        Simulated(
            id=i + 1,
            arrives=0.15 * i,
            priority=priority,
            blocks=4,
            tiles=1,
            tokens=5,
            restores=False,
            cancelled_at=None,
        )
        for i in range(150 * priority)
    ]
    world = World([humble, *stream])
    while humble.ended_at is None:
        world.turn()
        assert world.now < 60 * priority, "starved"
    # Without aging it would come after the whole stream, which is more than the world can serve.
    assert any(r.seated_at is None for r in stream)
