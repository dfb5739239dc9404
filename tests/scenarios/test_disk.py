"""A store under faults, under pressure, and after a restart."""

import dataclasses
import shutil

import numpy as np
import pytest
import stores
from fake_device import BLOCK, MOVED, World, ids_of, pools, quick_segments
from geometries import HOMOGENEOUS, toy_geometry
from stores import LAYOUT, commit, extension, open_store
from tiered import place, stored, with_tiers

from hybridkv.blocks.entries import NONE, Form, Tier
from hybridkv.kinds import Kind
from hybridkv.prefixes.plan import Miss
from hybridkv.prefixes.policy import DENSE
from hybridkv.state.packing import block_spans, snapshot_spans
from hybridkv.tiers.faults import Fault, Planned, Point, Schedule
from hybridkv.tiers.store import Store
from hybridkv.tiers.store.records import Damaged, StoreError, StoreLayout, StoreWriteError
from hybridkv.tiers.tickets import RestoreState

IDS = ids_of(8, 1)
FLAT = dataclasses.replace(HOMOGENEOUS, cells_per_block=BLOCK)


@pytest.fixture
def quick():
    with quick_segments():
        yield


@pytest.fixture
def world(tmp_path, quick):
    """A prompt in a store, after a restart."""
    world = World(disk=pools(32, 8), path=tmp_path / "s")
    world.publish(IDS, snapshots=(4, 8))
    world.stored()
    world.restart()
    return world


@pytest.mark.parametrize("how", ["host", "disk", "restart"])
def test_b005_rows_come_back_from_every_tier_with_their_index_rows(bench, tmp_path, how):
    """Long enough that the indexer leaves rows out."""
    ids, after, namespace = bench.ids(163), bench.ids(8), bench.namespace()
    cold, runner = bench.cold(ids, after), bench.runner
    with with_tiers(runner, tmp_path / "s") as mover:
        bench.run(ids, after, namespace, policy=DENSE)
        assert mover.flush(timeout_s=300)
        tier = Tier.HOST if how == "host" else Tier.DISK
        if how != "restart":
            place(runner, np.concatenate(stored(runner, ids, namespace)), tier)
            # Nothing of what the device had is left to be read by mistake.
            bench.spoil_blocks(np.arange(runner.sizes.capacity.blocks))
            warm = bench.run(ids, after, namespace)
            assert warm.start == 160
            assert warm.continues(cold)
    if how == "restart":
        with with_tiers(runner, tmp_path / "s"):
            bench.spoil_blocks(np.arange(runner.sizes.capacity.blocks))
            warm = bench.run(ids, after, namespace)
            assert warm.start == 160
            assert warm.continues(cold)


@pytest.mark.parametrize("kind", [Kind.COMPRESSED, Kind.INDEXER, Kind.WINDOW, Kind.TAIL])
@pytest.mark.parametrize("when", ["it is made", "it is opened"])
def test_b006_a_store_without_a_kind_that_the_model_declares_is_refused(tmp_path, kind, when):
    geometry = toy_geometry()
    device = World(geometry=geometry).device

    def layout(without=None):
        """Every kind, or all but one, without a gap."""
        parts = []
        for spans in (block_spans(geometry), snapshot_spans(geometry)):
            at, kept = 0, {}
            for name, span in spans.items():
                if name is not without:
                    kept[name] = slice(at, at + span.stop - span.start)
                    at = kept[name].stop
            parts.append(kept)
        return StoreLayout(block_tokens=BLOCK, block_spans=parts[0], snapshot_spans=parts[1])

    if when == "it is opened":  # it was made by something that knew every kind
        Store.open(tmp_path / "s", identity=device.identity, layout=layout()).close()
    with pytest.raises(StoreError, match=f"no {kind.name}"):
        Store.open(tmp_path / "s", identity=device.identity, layout=layout(kind))
    assert when == "it is opened" or not (tmp_path / "s").exists()


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 0.999])
def test_b018_damage_in_one_layer_costs_the_whole_entry(world, share):
    """Layers lie one after the other in the words of an entry."""
    byte = int(share * 4 * world.device.words[Form.BLOCK])
    world.damage_disk(int(world.run(IDS)[3]), byte)
    assert world.bring(IDS).shared == MOVED * BLOCK
    assert not any(world.there(world.run(IDS)[MOVED:], Tier.DEVICE))
    world.at_rest()


def test_b018_bytes_of_zeros_are_no_empty_layer(world):
    entry = int(world.snapshots(IDS)[-1])
    file = world.damage_disk(entry)
    half = file.stat().st_size // 2
    file.write_bytes(file.read_bytes()[:half] + bytes(file.stat().st_size - half))
    found = world.bring(IDS)
    assert (found.snapshot, found.shared) == (NONE, 8 * BLOCK)
    world.at_rest()


def test_b110_many_sessions_that_go_to_disk_and_come_back_are_themselves(tmp_path, quick):
    """Every word that is written to the device is compared with the session's own."""
    world = World(
        device=pools(16, 4), host=pools(8, 2), disk=pools(200, 64), path=tmp_path / "s", debug=False
    )
    rng, sessions = np.random.default_rng(0), []
    shared = ids_of(1, 500, rest=0)
    for number in range(30):
        ids = np.concatenate([shared, ids_of(2, number)])  # all begin alike
        sessions.append((ids, f"tenant {number % 7}"))
    for ids, namespace in sessions:
        world.publish(ids, snapshots=(3,), namespace=namespace)
        world.stored()
        world.evict()
    for number in rng.permutation(30).tolist():
        ids, namespace = sessions[number]
        assert world.start_of(ids, namespace) == 3 * BLOCK
        assert world.start_of(ids, "nobody") == 0
        world.publish(ids_of(1, 1000 + number), namespace=namespace)  # noise
    assert world.mover.counters.loaded[Tier.DISK] > 60
    assert world.mover.counters.failed_loads == 0
    world.at_rest()


def test_b150_what_cannot_be_used_is_tried_once_and_removed(world):
    file = world.damage_disk(int(world.run(IDS)[0]))
    assert isinstance(world.bring(IDS), Miss)
    world.at_rest()
    assert world.mover.counters.failed_loads == 1
    for _ in range(3):
        assert not len(getattr(world.plan(IDS), "loads", ()))
        world.bring(IDS)
    assert world.mover.counters.failed_loads == 1
    assert not file.exists()
    world.restart()
    assert isinstance(world.bring(IDS), Miss)
    assert world.mover.counters.failed_loads == 0
    world.publish(IDS, snapshots=(8,))
    world.stored()
    world.restart()
    assert world.start_of(IDS) == 8 * BLOCK


def test_b169_a_hit_keeps_everything_of_its_prefix_on_every_tier(tmp_path, quick):
    """Of two that are as old, the one that is hit stays, whole; others come and go."""
    world = World(device=pools(16, 4), host=pools(9, 3), disk=pools(13, 4), path=tmp_path / "s")
    hot, cold = ids_of(4, 1), ids_of(4, 2)
    for ids in (hot, cold):
        world.publish(ids, snapshots=(4,))
        world.stored()
    world.evict()
    for seed in range(10, 16):
        assert world.start_of(hot) == 4 * BLOCK
        world.publish(ids_of(4, seed), snapshots=(4,))
        world.stored()
        world.evict()
        entries = np.concatenate([world.run(hot), world.snapshots(hot)])
        assert len(entries) == 5
        assert all(world.there(entries, Tier.HOST)) or all(world.there(entries, Tier.DISK))
    assert len(world.run(cold)) == 0
    world.at_rest()


WRITES = [
    *[(Point.WRITE_SEGMENT, nth) for nth in (1, 2, 3)],
    *[(Point.WRITE_SNAPSHOT, nth) for nth in (1, 2)],
    (Point.WRITE_MANIFEST, 1),
]


@pytest.mark.parametrize("fault", [Fault.NO_SPACE, Fault.SHORT_WRITE, Fault.FLIPPED_BIT])
@pytest.mark.parametrize(("point", "nth"), WRITES)
def test_b201_a_write_that_failed_is_not_there(tmp_path, quick, point, nth, fault):
    path = tmp_path / "s"
    before, after = extension(stores.tokens(3, 1)), extension(stores.tokens(7, 2), snapshots=[3, 7])
    with open_store(path) as store:
        commit(store, before)
        files = set(stores.files(path))
        store._faults = Schedule([Planned(point=point, fault=fault, nth=nth)])
        with pytest.raises(StoreWriteError):
            commit(store, after)
        assert store.find(after.digest(0)) is None
        with open_store(path, writable=False) as reader:
            assert stores.read(reader) == ({before.digest(i) for i in range(3)}, set())
        assert set(stores.files(path)) == files
        commit(store, after)
    with open_store(path, writable=False) as reader:
        assert len(stores.read(reader)[0]) == 10


@pytest.mark.parametrize("damage", ["short", "gone"])
def test_b202_a_short_or_lost_file_is_a_miss(world, damage):
    file = world.damage_disk(int(world.run(IDS)[0]))
    if damage == "short":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        shutil.rmtree(file.parent)
    assert isinstance(world.bring(IDS), Miss)
    assert world.mover.counters.failed_loads == 1
    world.at_rest()


def test_b202_cleaning_up_does_not_delete_what_came_in_its_place(tmp_path, quick):
    what = extension(stores.tokens(3, 1), snapshots=[3])
    with open_store(tmp_path / "s") as store:
        old = commit(store, what)
        (tmp_path / "s" / "segments" / old.blocks[0].segment / "blocks").write_bytes(b"short")
        with pytest.raises(Damaged):
            stores.read(store)
        store.remove(old.blocks, old.snapshot_ids)
        new = commit(store, what)
        store.remove(old.blocks, old.snapshot_ids)  # somebody else who saw the damage, late
        store.remove(old.blocks, old.snapshot_ids, with_children=True)
        assert store.find(what.digest(0)) == new.blocks[0]
        assert len(stores.read(store)[0]) == 3


def test_b202_a_reader_that_saw_damage_deletes_nothing(world):
    reader = World(disk=pools(32), path=world.options.path, writable=False)
    world.damage_disk(int(world.run(IDS)[0]))
    before = stores.files(world.options.path)
    assert isinstance(reader.bring(IDS), Miss)
    reader.at_rest()
    assert stores.files(world.options.path) == before
    # The writer finds it too, and what it puts there instead is what the reader gets.
    world.bring(IDS)
    world.at_rest()
    world.publish(IDS, snapshots=(8,))
    world.stored()
    reader.mover.refresh()
    assert reader.start_of(IDS) == 8 * BLOCK
    reader.at_rest()


def test_b206_saving_what_leaves_does_not_take_what_comes(tmp_path, quick):
    """The disk is full of the prompt that is asked for when another one is to be stored."""
    world = World(device=pools(20, 4), disk=pools(6, 0), path=tmp_path / "s")
    wanted, old = ids_of(6, 1), ids_of(6, 2)
    world.publish(wanted)
    world.stored()
    world.evict()
    world.publish(old)  # waits to be stored
    hold, ticket = world.begin(wanted)
    world.settle(lambda: ticket.state() is not RestoreState.PENDING)
    assert ticket.state() is RestoreState.READY
    assert all(world.there(world.run(wanted), Tier.DISK))
    assert world.mover.counters.no_room[Tier.DISK] > 0
    world.end(hold, ticket)
    assert world.use(wanted).shared == 6 * BLOCK
    world.at_rest()


def test_b212_kinds_that_a_model_lacks_are_absent_after_a_restart_and_not_empty(tmp_path, quick):
    world = World(disk=pools(16, 0), path=tmp_path / "s", geometry=FLAT)
    for ids in (ids_of(4, 1), ids_of(4, 2, rest=0)):  # without a rest too
        world.publish(ids)
    world.stored()
    world.restart()
    assert set(world.mover.store.layout.block_spans) == {Kind.COMPRESSED}
    assert not world.mover.store.layout.snapshot_spans
    assert world.start_of(ids_of(4, 1)) == 4 * BLOCK
    assert world.start_of(ids_of(4, 2, rest=0)) == 3 * BLOCK
    assert len(world.run(ids_of(4, 2, rest=0))) == 4
    world.at_rest()


def test_b212_an_empty_kind_and_an_absent_one_are_two_things(tmp_path, quick):
    spans = {"block_spans": {Kind.COMPRESSED: slice(0, 4), Kind.INDEXER: slice(4, 4)}}
    empty = dataclasses.replace(LAYOUT, **spans, snapshot_spans={Kind.WINDOW: slice(0, 0)})
    what = extension(stores.tokens(2, 1), snapshots=[2])
    with open_store(tmp_path / "s", layout=empty) as store:
        commit(store, what)
    with open_store(tmp_path / "s", layout=empty, writable=False) as store:
        assert store.layout.block_spans == empty.block_spans
        assert store.layout.snapshot_spans == {Kind.WINDOW: slice(0, 0)}
        assert stores.read(store) == ({what.digest(0), what.digest(1)}, {what.digest(1)})
    absent = dataclasses.replace(empty, block_spans={Kind.COMPRESSED: slice(0, 4)})
    with pytest.raises(StoreError):
        open_store(tmp_path / "s", layout=absent)


def test_b212_blocks_without_snapshots_and_snapshots_without_blocks_are_extensions(tmp_path, quick):
    ids = stores.tokens(4, 1)
    with open_store(tmp_path / "s") as store:
        commit(store, extension(ids))
        commit(store, extension(ids, first=4, snapshots=[2, 4]))
    with open_store(tmp_path / "s") as store:
        blocks, snapshots = stores.read(store)
        assert (len(blocks), len(snapshots)) == (4, 2)


def test_b213_a_shutdown_stores_first_what_is_worth_most(tmp_path, quick):
    world = World(device=pools(64), disk=pools(64), path=tmp_path / "s")
    prompts = [ids_of(blocks, seed) for seed, blocks in enumerate((1, 9, 2, 5))]
    for ids in prompts:
        world.publish(ids)
    assert not world.mover.flush(timeout_s=0.01)  # only one write gets done
    assert world.workers[2].step()
    world.mover.turn()
    kept = [all(world.there(world.run(ids), Tier.DISK)) for ids in prompts]
    assert kept == [False, True, False, False]


def test_b213_a_shutdown_ends_in_its_time(tmp_path, quick):
    world = World(device=pools(64), disk=pools(64), path=tmp_path / "s")
    world.publish(IDS)
    assert not world.mover.close(timeout_s=0.05)
    world = World(disk=pools(64), path=tmp_path / "s")  # and has given the lock back
    assert isinstance(world.bring(IDS), Miss)


def test_b214_one_prefix_that_is_asked_to_be_stored_twice_fails_nothing(tmp_path, quick):
    world = World(device=pools(64), disk=pools(64), path=tmp_path / "s")
    branch = np.concatenate([IDS[: 5 * BLOCK], ids_of(4, 7)])
    for ids in (IDS, IDS, branch, IDS):
        world.publish(ids, snapshots=())
    world.stored()
    assert world.mover.counters.failed_stores[Tier.DISK] == 0
    assert world.mover.store.blocks == 8 + 4
    world.restart()
    for ids in (IDS, branch):
        assert world.bring(ids).shared == len(ids) // BLOCK * BLOCK


def test_b214_a_batch_with_something_that_is_there_already_stores_the_rest(tmp_path, quick):
    ids = stores.tokens(6, 1)
    with open_store(tmp_path / "s") as store:
        commit(store, extension(ids[: 4 * stores.BLOCK], snapshots=[2]))
        again = commit(store, extension(ids, snapshots=[2, 6]))
        assert (store.blocks, store.snapshots) == (6, 2)
        assert len(again.blocks) == 6
        assert stores.files(tmp_path / "s").keys() >= {f"manifests/{again.id}.json"}
        stores.read(store)
        with pytest.raises(StoreError, match="another writer"):
            open_store(tmp_path / "s")
