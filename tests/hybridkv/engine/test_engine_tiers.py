"""Requests whose prefix is on the host or on disk: cold bits, no compilation, nobody waits."""

import dataclasses
import threading
import time

import pytest
from bookkeeping import give_up
from engines import BLOCKS, SLOTS, TILE, ids_of, same, task_of
from hand_workers import Hook
from tiered_lab import lab_with_tiers

from hybridkv.blocks.entries import Form, Tier
from hybridkv.engine.requests import Finish
from hybridkv.engine.saving import SavedPrefix
from hybridkv.engine.scheduler import Stage
from hybridkv.engine.steps import MOVED_BLOCKS
from hybridkv.prefixes.policy import DENSE
from hybridkv.tiers.faults import NO_FAULTS, Point

IDS, NEW = ids_of(5 * TILE + 3, seed=1), 6
OTHER = ids_of(20, seed=2)


def put(lab, mover, tier):
    """Computes the prompt and leaves it on one tier."""
    lab.finish(lab.submit(IDS, NEW, policy=DENSE))
    lab.engine.drain()
    assert mover.flush(timeout_s=300)
    give_up(lab.engine.runner.allocator, *(faster for faster in Tier if faster < tier))
    counters = lab.engine.counters
    counters.restores = counters.reused_tokens = 0
    mover.counters.loaded = dict.fromkeys(Tier, 0)


class Gate:
    """Holds a worker where it reads."""

    def __init__(self, mover, point=Point.HOST_LOAD):
        self.open, self.reached = threading.Event(), threading.Event()
        self.mover = mover
        mover._bringer._faults = Hook(point, self.wait)

    def wait(self, nth):
        del nth
        self.reached.set()
        assert self.open.wait(30)

    def free(self):
        self.open.set()
        self.mover._bringer._faults = NO_FAULTS


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_restored_prompt_has_the_bits_of_a_cold_one_and_compiles_nothing(lab, tmp_path, tier):
    alone = lab.alone(IDS, NEW)
    with lab_with_tiers(lab, tmp_path) as mover:
        put(lab, mover, tier)
        handle = lab.submit(IDS, NEW)
        lab.steps(1)
        assert task_of(handle).stage is Stage.RESTORING
        lab.finish(handle)
        assert same(handle.output, alone)
        assert (handle.output.reused, handle.output.exact) == (5 * TILE, True)
        assert mover.counters.loaded[tier] == 6
        counters = lab.engine.counters
        assert (counters.restores, counters.failed_restores, counters.late_restores) == (1, 0, 0)
        assert counters.compilations == 0


def test_another_process_goes_on_from_the_store(lab, tmp_path):
    alone = lab.alone(IDS, NEW)
    with lab_with_tiers(lab, tmp_path) as mover:
        put(lab, mover, Tier.DISK)
    with lab_with_tiers(lab, tmp_path) as mover:
        handle = lab.submit(IDS, NEW)
        lab.finish(handle)
        assert same(handle.output, alone)
        assert handle.output.reused == 5 * TILE
        assert mover.counters.loaded[Tier.DISK] == 6
        # And once more, from the device.
        again = lab.submit(IDS, NEW)
        lab.finish(again)
        assert same(again.output, alone)
        assert mover.counters.loads == 1


def test_the_batch_goes_on_while_a_prefix_is_read(lab, tmp_path):
    alone, other = lab.alone(IDS, NEW), lab.alone(OTHER, 8)
    with lab_with_tiers(lab, tmp_path) as mover:
        put(lab, mover, Tier.HOST)
        gate = Gate(mover)
        handle = lab.submit(IDS, NEW)
        lab.steps(1)
        assert gate.reached.wait(30)
        others = [lab.submit(OTHER, 8) for _ in range(SLOTS)]
        lab.finish(*others, limit=60)
        assert all(same(each.output, other) for each in others)
        assert task_of(handle).stage is Stage.RESTORING
        assert not handle.output.tokens
        gate.free()
        lab.finish(handle)
        assert same(handle.output, alone)
        assert handle.output.reused == 5 * TILE


@pytest.mark.parametrize("step_in_moves", [0.0, 0.1, 41.0])
def test_writes_beside_a_decode_step_take_a_share_of_its_time(lab, tmp_path, step_in_moves):
    with lab_with_tiers(lab, tmp_path) as mover:
        runner, limits = lab.engine.runner, []
        size = MOVED_BLOCKS * runner.model.geometry.block_bytes
        costs = dataclasses.replace(runner.plan_options.cost, bytes_per_second={Tier.HOST: size})
        before, runner.plan_options = (
            runner.plan_options,
            dataclasses.replace(runner.plan_options, cost=costs),
        )
        mover.turn = lambda **limit: limits.append(limit)  # one move takes a second
        try:
            runner.turn(decode_seconds=step_in_moves)
        finally:
            del mover.turn
            runner.plan_options = before
        share = mover.options.decode_share
        assert limits == [{"allowance": step_in_moves * share} if step_in_moves else {}]


def test_one_that_comes_too_late_is_computed_and_what_comes_then_hurts_nobody(lab, tmp_path):
    alone = lab.alone(IDS, NEW)
    with lab_with_tiers(lab, tmp_path, restore_s=10.0) as mover:
        put(lab, mover, Tier.HOST)
        gate = Gate(mover)
        handle = lab.submit(IDS, NEW)
        lab.steps(1)
        assert gate.reached.wait(30)
        lab.time.now += 10.0
        lab.finish(handle)
        assert same(handle.output, alone)
        assert handle.output.reused == 0
        assert lab.engine.counters.late_restores == 1
        gate.free()
        again = lab.submit(IDS, NEW)
        lab.finish(again)
        assert same(again.output, alone)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_one_that_is_cancelled_gives_its_room_back_at_once(lab, tmp_path, tier):
    with lab_with_tiers(lab, tmp_path) as mover:
        put(lab, mover, tier)
        gate = Gate(mover, Point.HOST_LOAD if tier == Tier.HOST else Point.DISK_LOAD)
        handle = lab.submit(IDS, NEW)
        lab.steps(1)
        assert gate.reached.wait(30)
        assert handle.cancel()
        allocator = lab.engine.runner.allocator
        assert allocator.available(Form.BLOCK) == BLOCKS
        assert not allocator.reservations.left
        assert not mover._loads
        gate.free()
        assert handle.output.finish is Finish.CANCELLED
        assert mover.flush(timeout_s=300)


def test_two_requests_for_one_prefix_read_it_once(lab, tmp_path):
    alone = lab.alone(IDS, NEW)
    with lab_with_tiers(lab, tmp_path) as mover:
        put(lab, mover, Tier.HOST)
        gate = Gate(mover)
        first, second = lab.submit(IDS, NEW), lab.submit(IDS, NEW)
        lab.steps(1)
        assert gate.reached.wait(30)
        first.cancel()
        gate.free()
        lab.finish(second)
        assert same(second.output, alone)
        assert mover.counters.loaded[Tier.HOST] == 6


def test_what_a_waiting_request_needs_is_read_ahead(lab, tmp_path):
    alone = lab.alone(IDS, NEW)
    with lab_with_tiers(lab, tmp_path) as mover:
        put(lab, mover, Tier.DISK)
        handle = lab.submit(IDS, NEW)  # and no turn
        end = time.monotonic() + 30
        while not mover._prefetched.bytes_used:
            assert time.monotonic() < end
            time.sleep(1e-3)
        read = mover.counters.prefetched
        assert read > 0
        lab.finish(handle)
        assert same(handle.output, alone)
        assert handle.output.reused == 5 * TILE
        assert mover._prefetched.bytes_used == 0


def test_damage_costs_a_hit_and_no_bit(lab, tmp_path):
    alone = lab.alone(IDS, NEW)
    with lab_with_tiers(lab, tmp_path) as mover:
        put(lab, mover, Tier.DISK)
        for file in (tmp_path / "store" / "segments").rglob("c/*/*"):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        handle = lab.submit(IDS, NEW)
        lab.finish(handle)
        assert same(handle.output, alone)
        assert mover.counters.spoiled[Tier.DISK] > 0
        assert lab.engine.counters.failed_restores == 1
        again = lab.submit(IDS, NEW)
        lab.finish(again)
        assert same(again.output, alone)


@pytest.mark.parametrize("when", ["before", "while it is restored"])
def test_an_engine_outlives_tiers_that_fail_in_every_turn(lab, tmp_path, monkeypatch, when):
    alone = lab.alone(IDS, NEW)
    with lab_with_tiers(lab, tmp_path, restore_s=0.05) as mover:
        put(lab, mover, Tier.HOST)

        def broken():
            raise OSError("the host is gone")

        handle = None
        if when != "before":
            gate = Gate(mover)
            handle = lab.submit(IDS, NEW)
            lab.steps(1)
            assert gate.reached.wait(30)
            gate.free()
        with monkeypatch.context() as patch:
            patch.setattr(mover, "turn", broken)
            handle = handle or lab.submit(IDS, NEW)
            lab.finish(handle)
        assert same(handle.output, alone)
        assert lab.engine.counters.failed_restores > 0
        assert lab.engine.counters.last_restore_error == "OSError: the host is gone"
        again = lab.submit(IDS, NEW)
        lab.finish(again)
        assert same(again.output, alone)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_prefix_is_saved_from_where_it_is(lab, tmp_path, tier):
    """Not one of its bytes is on the device, and its bits are those of a cold run."""
    alone = lab.alone(IDS, NEW)
    with lab_with_tiers(lab, tmp_path) as mover:
        put(lab, mover, tier)
        saved = SavedPrefix(lab.engine, IDS)
        assert len(saved.tokens) == 5 * TILE
        assert 5 * TILE in saved.positions
        assert mover.counters.loaded == dict.fromkeys(Tier, 0)
    lab.engine.reset()
    assert saved.restore(lab.engine) == 5 * TILE
    again = lab.submit(IDS, NEW)
    lab.finish(again)
    assert again.output.reused == 5 * TILE
    assert same(again.output, alone)
