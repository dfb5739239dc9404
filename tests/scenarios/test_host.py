"""Host memory between the device and the disk: what is copied, when, and what may go."""

import numpy as np
import pytest
from fake_device import BLOCK, World, ids_of, pools, quick_segments
from geometries import FLASH, HOMOGENEOUS, PRO, SHARED, V41, toy_geometry
from tiered import place, stored, with_tiers

from hybridkv.blocks.entries import NONE, EntryError, Form, Tier, kind_bits
from hybridkv.blocks.pools import NoRoom
from hybridkv.blocks.transitions import TierState
from hybridkv.kinds import Kind
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds
from hybridkv.prefixes.policy import DENSE
from hybridkv.state.packing import block_spans, snapshot_spans, words_of
from hybridkv.tiers.tickets import RestoreState


@pytest.fixture(autouse=True)
def quick():
    with quick_segments():
        yield


@pytest.mark.parametrize(
    "geometry", [toy_geometry(), HOMOGENEOUS, SHARED, FLASH, PRO, V41], ids=range(6)
)
def test_b009_every_kind_that_a_model_declares_is_in_the_words_that_tiers_move(geometry):
    for spans, declared in (
        (block_spans(geometry), block_kinds(geometry)),
        (snapshot_spans(geometry), snapshot_kinds(geometry)),
    ):
        assert set(spans) == set(declared)
        assert sum(span.stop - span.start for span in spans.values()) == words_of(spans)
        assert all(span.stop > span.start for span in spans.values())


@pytest.mark.parametrize("kind", [Kind.COMPRESSED, Kind.INDEXER])
def test_b009_a_copy_with_one_kind_left_out_is_refused(kind):
    world, ids = World(host=pools(8)), ids_of(1)
    world.publish(ids)
    entries, allocator = world.run(ids), world.allocator
    receipt = allocator.fill(allocator.reserve(blocks=1, tier=Tier.HOST), entries)
    fewer = world.device.kinds[Form.BLOCK] & ~kind_bits((kind,))
    with pytest.raises(EntryError, match="has other kinds"):
        allocator.commit(entries, fewer, Tier.HOST)
    allocator.abort(entries, Tier.HOST)
    allocator.release(receipt)


@pytest.mark.parametrize("length", [64, 150])
def test_b026_everything_comes_back_from_the_host_with_its_bits(bench, tmp_path, length):
    ids, after, namespace = bench.ids(length + 3), bench.ids(24), bench.namespace()
    cold, runner = bench.cold(ids, after), bench.runner
    with with_tiers(runner, tmp_path / "s") as mover:
        bench.run(ids, after, namespace, policy=DENSE)
        assert mover.flush(timeout_s=300)
        blocks, snapshots = stored(runner, ids, namespace)
        for times in (1, 2):
            place(runner, np.concatenate([blocks, snapshots]), Tier.HOST)
            warm = bench.run(ids, after, namespace)
            assert warm.start == length // 16 * 16
            assert warm.continues(cold)
            assert mover.counters.loaded[Tier.HOST] == times * (len(blocks) + 1)


def test_b101_the_host_keeps_what_is_being_copied():
    world, ids = World(host=pools(6)), ids_of(6, 1)
    world.publish(ids)
    world.stored()
    world.evict()
    hold, ticket = world.begin(ids)
    assert world.allocator.evictable(Form.BLOCK, Tier.HOST) == 0
    world.publish(ids_of(6, 2))  # would like its places
    world.mover.turn()
    with pytest.raises(NoRoom):
        world.allocator.evict(blocks=1, tier=Tier.HOST)
    world.settle(lambda: ticket.state() is RestoreState.READY)
    world.end(hold, ticket)
    assert world.use(ids).shared == 6 * BLOCK  # every word compared
    world.at_rest()


def test_b101_a_source_that_is_given_up_all_the_same_is_still_the_same_bytes():
    """The worker holds an array that nobody writes, whatever becomes of its place."""
    world, ids = World(host=pools(3, 0)), ids_of(3, 1)
    world.publish(ids)
    world.stored()
    world.evict()
    hold, ticket = world.begin(ids)
    for place_ in range(3):
        world.mover._host.dropped(Tier.HOST, Form.BLOCK, np.array([place_], np.int32))
    world.settle(lambda: ticket.state() is RestoreState.READY)
    world.end(hold, ticket)
    world.device.check()


def test_b104_what_is_stored_before_it_is_computed_has_its_final_bytes(bench, tmp_path):
    """Copies are asked for as soon as steps are dispatched; nobody waits for the device."""
    ids, after, namespace = bench.ids(67), bench.ids(4), bench.namespace()
    cold, runner = bench.cold(ids, after), bench.runner
    with with_tiers(runner, tmp_path / "s") as mover:
        sequence = runner.start(ids, max_new_tokens=1, namespace=namespace, policy=DENSE)
        while sequence.tokens_left:
            runner.tile(sequence)
            runner.publish(sequence)
            mover.turn()
        runner.finish(sequence)
        assert mover.flush(timeout_s=300)
        for tier in (Tier.HOST, Tier.DISK):
            entries = np.concatenate(stored(runner, ids, namespace))
            place(runner, entries, tier)
            assert bench.run(ids, after, namespace).continues(cold)


def test_b104_a_place_that_is_used_again_before_the_worker_comes_changes_no_copy():
    world, ids, other = World(device=pools(7), host=pools(12)), ids_of(6, 1), ids_of(6, 2)
    world.publish(ids)
    for _ in range(2):
        world.mover.turn()  # gathered, and no worker came
    filled = world.run(ids)
    assert world.allocator.evictable(Form.BLOCK) == 0  # not before the copy ends
    for place_ in world.entries.place[Tier.DEVICE, filled].tolist():
        world.device.pool[Form.BLOCK][place_] = np.zeros(1, np.uint32)
    world.stored()
    world.evict()
    world.publish(other)
    world.evict()
    assert world.bring(ids).shared == 6 * BLOCK
    world.at_rest()


def test_b145_many_long_hits_take_no_host_memory_that_they_do_not_give_back(tmp_path):
    """Twenty prompts that are on disk in full; the host has room for little more than one."""
    blocks = 10
    world = World(
        device=pools(24, 4),
        host=pools(12, 2),
        disk=pools(256, 32),
        path=tmp_path / "s",
        debug=False,
        prefetch_bytes=2 * 3 * World().device.geometry.block_bytes,
    )
    prompts = [ids_of(blocks, seed) for seed in range(20)]
    for ids in prompts:
        world.publish(ids, snapshots=(blocks,))
        world.stored()
        world.evict()
    waiting, running, most, ended = list(prompts), [], 0, 0
    for ids in prompts:
        world.mover.wanted(world.plan(ids))
    for _ in range(600):
        while waiting:
            try:
                running.append((waiting[0], *world.begin(waiting[0])))
            except NoRoom:
                break
            waiting.pop(0)
        most = max(most, len(running))
        for each in list(running):
            ids, hold, ticket = each
            if ticket is None or ticket.state() is not RestoreState.PENDING:
                world.end(hold, ticket)
                assert world.use(ids).start == blocks * BLOCK
                running.remove(each)
                ended += 1
        world.mover.turn()
        for worker in world.workers:
            worker.step()
        assert world.mover._prefetched.bytes_used <= world.options.prefetch_bytes
        assert (
            world.mover.host_bytes
            <= 12 * world.device.geometry.block_bytes + 2 * 4 * (world.device.words[Form.SNAPSHOT])
        )
        if ended == 20:
            break
    assert ended == 20
    assert 1 <= most <= 2
    world.at_rest()


def test_b204_prefixes_that_are_copied_in_time_all_come_back(tmp_path):
    """Five of them, each nearly as large as the host; the disk has room for all."""
    world = World(device=pools(12), host=pools(8), disk=pools(64, 8), path=tmp_path / "s")
    prompts = [ids_of(6, seed) for seed in range(5)]
    for ids in prompts:
        world.publish(ids, snapshots=(6,))
        world.stored()
    world.evict()
    assert [world.start_of(ids) for ids in prompts] == [6 * BLOCK] * 5


def test_b204_what_went_before_it_was_stored_is_not_said_to_be_there():
    world = World(device=pools(7, 1), host=pools(32))
    prompts = [ids_of(6, seed) for seed in range(5)]
    for ids in prompts:
        world.publish(ids, snapshots=(6,))  # nobody has time to copy
    world.stored()
    for ids in prompts[:-1]:
        assert len(world.run(ids)) <= 1
        assert world.start_of(ids) == 0
    assert world.start_of(prompts[-1]) == 6 * BLOCK
    world.at_rest()


def test_b204_what_is_being_copied_is_not_evicted_until_it_is():
    world, ids = World(device=pools(7), host=pools(8)), ids_of(6, 1)
    world.publish(ids)
    for _ in range(2):
        world.mover.turn()
    with pytest.raises(NoRoom):
        world.publish(ids_of(6, 2))
    world.stored()
    world.publish(ids_of(6, 2))
    assert world.bring(ids).shared == 6 * BLOCK


@pytest.mark.parametrize("seed", range(3))
def test_b205_no_block_is_kept_whose_ancestors_are_not(tmp_path, seed):
    """On disk all of them are; elsewhere each is on that tier or a slower one, or on the device."""
    world = World(
        device=pools(14, 2), host=pools(9, 2), disk=pools(12, 2), path=tmp_path / "s", debug=False
    )
    rng = np.random.default_rng(seed)
    trunk = ids_of(3, 99, rest=0)
    prompts = [np.concatenate([trunk, ids_of(int(rng.integers(1, 5)), n)]) for n in range(6)]
    stored_somewhere = 0
    for _ in range(60):
        ids = prompts[int(rng.integers(len(prompts)))]
        match int(rng.integers(4)):
            case 0:
                try:
                    world.publish(ids, snapshots=(len(ids) // BLOCK,))
                except NoRoom:
                    continue
            case 1:
                world.evict(Tier(int(rng.integers(2))))
            case 2:
                world.bring(ids)
            case _:
                world.mover.turn()
                for worker in world.workers:
                    worker.step()
        columns = world.entries
        blocks = columns.published & (columns.form == Form.BLOCK)
        on_disk = blocks & (columns.state[Tier.DISK] == TierState.PRESENT)
        anywhere = blocks & (columns.state == TierState.PRESENT).any(axis=0)
        for whole in (on_disk, anywhere):
            above = columns.parent[np.flatnonzero(whole)]
            assert whole[above[above != NONE]].all()
        stored_somewhere += int(on_disk.sum())
    assert stored_somewhere > 50
    world.at_rest()
