"""What is preempted comes back with its own bits, in whatever slot and blocks are free."""

import dataclasses

import jax
import numpy as np
import pytest
from engines import PER_SEQUENCE, TILE, ids_of, same, task_of

from hybridkv.blocks.entries import Tier
from hybridkv.engine.parking import park, parked_bytes
from hybridkv.engine.requests import Finish
from hybridkv.engine.sampling import SamplingOptions
from hybridkv.engine.scheduler import Stage
from hybridkv.errors import UserError
from hybridkv.prefixes.policy import DENSE

LOW, NEW = ids_of(2 * TILE + 3, seed=1), 40
PENALISED = SamplingOptions(temperature=1.3, repetition_penalty=1.4, seed=11)


def fillers(lab, count=2, new=60):
    """Requests that are never preempted here and keep slots busy."""
    handles = [lab.submit(ids_of(5, seed=50 + i), new, priority=9) for i in range(count)]
    lab.until(lambda: all(task_of(h).stage is Stage.DECODING for h in handles))
    return handles


def places(lab, task):
    entries = np.concatenate([task.sequence.shared.entries, task.sequence.own.entries])
    return lab.engine.runner.allocator.entries.place[Tier.DEVICE, entries].tolist()


@pytest.mark.parametrize("sampling", [SamplingOptions(), PENALISED], ids=["greedy", "penalised"])
@pytest.mark.parametrize("evict", [False, True], ids=["kept", "evicted"])
def test_it_goes_on_in_another_slot_with_other_blocks_as_if_never_parked(lab, evict, sampling):
    """Also when its prompt's shared blocks were evicted meanwhile."""
    alone = lab.alone(LOW, NEW, sampling)
    lab.submit(LOW, 1).result()  # so that it shares blocks
    others = fillers(lab)
    low = lab.submit(LOW, NEW, sampling=sampling)
    task = task_of(low)
    lab.until(lambda: len(low.output.pieces) == 10)
    assert low.output.reused == 2 * TILE
    slot, before = task.sequence.slot, places(lab, task)
    high = lab.submit(ids_of(30, seed=3), 20, priority=9)
    lab.until(lambda: task.stage is Stage.PARKED)
    assert lab.engine.counters.preemptions == low.output.preemptions == 1
    assert lab.engine.seating.parked_bytes == task.parked.nbytes
    assert task.parked.nbytes == parked_bytes(lab.engine.runner, task.parked.computed)
    if evict:
        lab.engine.runner.allocator.evict(blocks=2)
    others[0].cancel()
    lab.until(lambda: task.stage is Stage.DECODING)
    assert task.sequence.slot != slot
    after = places(lab, task)
    assert (after[:2] == before[:2]) == (not evict)
    assert len(task.sequence.shared.entries) == (0 if evict else 2)
    assert after[2:] != before[2:]
    lab.finish(low, high)
    assert same(low.output, alone)
    assert low.output.exact
    others[1].cancel()


def test_at_every_phase_of_the_open_cells(lab):
    """A preemption after each decoded token: every place modulo every ratio."""
    alone = lab.alone(LOW, NEW)
    others, low = fillers(lab, new=120), lab.submit(LOW, NEW)
    task, phases = task_of(low), set()
    for number in range(1, 2 * TILE):
        lab.until(lambda number=number: len(low.output.pieces) >= number, 10)
        high = lab.submit(ids_of(3, seed=number), 1, priority=5)
        lab.until(lambda: task.stage is Stage.PARKED, 3)
        phases.add(task.parked.computed % TILE)
        lab.finish(high)
    lab.finish(low)
    assert phases == set(range(TILE))
    assert low.output.preemptions >= 30
    assert same(low.output, alone)
    assert lab.engine.counters.lost_states == 0
    for other in others:
        other.cancel()


@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_a_prompt_that_is_preempted_starts_over_from_its_blocks(lab, tiles):
    ids = ids_of(5 * TILE + 2, seed=2)
    alone = lab.alone(ids, 6)
    others = fillers(lab)
    low = lab.submit(ids, 6)
    task = task_of(low)
    lab.until(lambda: task.sequence is not None and task.sequence.computed == tiles * TILE)
    high = lab.submit(ids_of(30, seed=3), 8, priority=5)
    lab.until(lambda: task.stage is Stage.WAITING, 2)
    assert low.output.preemptions == 1
    lab.finish(low, high)
    assert same(low.output, alone)
    # Nobody else had a part of this prompt: what it found is its own work, and no reuse.
    assert low.output.reused == 0
    assert lab.engine.counters.reused_tokens == 0
    assert len(ids) <= low.output.computed <= len(ids) + tiles * TILE
    for other in others:
        other.cancel()


def damage(task, leaf):
    """Flips one bit of the parked bytes."""
    if leaf == "state":
        leaves = task.parked.state.window.layers
        changed = np.array(leaves[0])
        changed.view(np.uint8).reshape(-1)[3] ^= 1
        window = dataclasses.replace(task.parked.state.window, layers=(changed, *leaves[1:]))
        state = dataclasses.replace(task.parked.state, window=window)
        task.parked = dataclasses.replace(task.parked, state=state)
        return
    leaves, shape = jax.tree.flatten(task.parked.moves)
    leaves[0] = np.array(leaves[0])
    leaves[0].view(np.uint8).reshape(-1)[3] ^= 1
    task.parked = dataclasses.replace(task.parked, moves=jax.tree.unflatten(shape, leaves))


@pytest.mark.parametrize("leaf", ["state", "blocks"])
@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
def test_one_whose_bytes_are_damaged_says_so_and_completes(lab, leaf, room):
    alone = lab.alone(LOW, NEW)
    others, low = fillers(lab), lab.submit(LOW, NEW)
    task = task_of(low)
    lab.until(lambda: len(low.output.pieces) == 10)
    high = lab.submit(ids_of(30, seed=3), 12, priority=5)
    lab.until(lambda: task.stage is Stage.PARKED)
    damage(task, leaf)
    if not room:  # its slot is free again and its room is not
        runner = lab.engine.runner
        high.cancel()
        held = runner.allocator.reserve(blocks=12)
        lab.steps(3)
        assert lab.engine.counters.lost_states == 1
        runner.allocator.cancel(held)
        lab.engine.seating.version += 1
    lab.finish(low)
    output = low.output
    assert (output.finish, output.exact) == (Finish.LENGTH, False)
    assert lab.engine.counters.lost_states == 1
    assert lab.engine.seating.parked_bytes == 0
    assert len(output.tokens) == NEW
    assert output.tokens[:10] == alone.tokens[:10]
    if room:
        lab.finish(high)
    for other in others:
        other.cancel()
    lab.engine.drain()
    # What it published was made by tile steps: others may read it.
    assert same(lab.submit(LOW, NEW).result(), alone)


def test_samples_of_a_lost_prompt_never_wait_for_each_other(lab):
    """The first of them is in the queue again, and so is one that was computing its prompt."""
    ids = ids_of(4 * TILE + 3, seed=9)
    engine, allocator = lab.engine, lab.engine.runner.allocator
    handle = lab.submit(ids, 30, samples=2)
    first, second = task_of(handle, 0), task_of(handle, 1)
    lab.until(lambda: len(first.output.pieces) == 1)
    engine.seating.preempt(first)
    damage(first, "state")
    first.refused_at = engine.seating.version
    allocator.evict(blocks=4)
    held = allocator.reserve(blocks=16)  # room for one of them
    lab.until(lambda: second.stage is Stage.PREFILLING, 3)
    for _ in range(2):  # its state is lost, there is no room; then there is somebody to follow
        first.refused_at = -1
        lab.steps(1)
    assert first.leader is second
    engine.seating.preempt(second)
    allocator.cancel(held)
    lab.finish(handle, limit=300)
    assert all(output.finish is Finish.LENGTH for output in handle.outputs)


def test_nothing_that_decodes_is_preempted_where_parking_has_no_memory(lab):
    lab.change(park_bytes=0)
    others, low = fillers(lab), lab.submit(LOW, NEW)
    lab.until(lambda: len(low.output.pieces) == 3)
    high = lab.submit(ids_of(30, seed=3), 4, priority=5)
    lab.finish(low)
    assert lab.engine.counters.preemptions == 0
    assert not high.output.tokens or high.output.queued_s >= 0
    lab.finish(high)
    assert same(low.output, lab_alone(lab, others))


def lab_alone(lab, others):
    for other in others:
        other.cancel()
    lab.engine.drain()
    return lab.alone(LOW, NEW)


def test_parked_bytes_stay_within_their_memory(lab):
    """Two would have to be preempted for one large request, and memory takes one."""
    one = parked_bytes(lab.engine.runner, len(LOW) + 5)
    lab.change(park_bytes=one + one // 2)
    lows = [lab.submit(LOW, 60), lab.submit(ids_of(len(LOW), seed=7), 60)]
    lab.until(lambda: all(len(h.output.pieces) >= 3 for h in lows))
    high = lab.submit(ids_of(PER_SEQUENCE * TILE - 20, seed=8), 20, priority=5)
    big = lab.submit(ids_of(PER_SEQUENCE * TILE - 20, seed=9), 20, priority=5)
    for _ in range(400):
        lab.engine.step()
        assert lab.engine.seating.parked_bytes <= lab.engine.options.park_bytes
        if high.done and big.done and all(h.done for h in lows):
            break
    lab.finish(high, big, *lows)


def test_a_prompt_that_is_not_computed_is_not_parked(lab):
    runner = lab.engine.runner
    sequence = runner.start(LOW, max_new_tokens=3)
    with pytest.raises(UserError, match="while it decodes"):
        park(runner, sequence)
    runner.release(sequence)


def test_one_with_snapshots_not_yet_published_leaves_none_behind(lab):
    others = fillers(lab)
    low = lab.submit(LOW, NEW, publish=None, policy=DENSE)
    lab.until(lambda: len(low.output.pieces) == 20)
    high = lab.submit(ids_of(9, seed=3), 2, priority=5)
    lab.finish(high, low)
    assert low.output.preemptions == 1
    for other in others:
        other.cancel()


def test_seconds_in_the_queue_are_those_before_the_first_seat(lab):
    others, low = fillers(lab), lab.submit(LOW, NEW)
    lab.until(lambda: len(low.output.pieces) == 3)
    assert low.output.queued_s == 0.0
    high = lab.submit(ids_of(30, seed=3), 2, priority=5)
    lab.time.now += 3.0
    lab.finish(high, low)
    assert low.output.preemptions == 1
    assert low.output.queued_s == 0.0
    assert low.output.last_token_s >= 3.0
    for other in others:
        other.cancel()
