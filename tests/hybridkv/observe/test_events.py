"""Events say what the directory shows, in a shape that routers read, and slow nobody."""

import collections
import contextlib
import struct
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from bookkeeping import give_up
from engines import TILE, ids_of
from tiered_lab import lab_with_tiers

from hybridkv.blocks.entries import NONE, Form, Tier
from hybridkv.blocks.transitions import TierState
from hybridkv.errors import UserError
from hybridkv.observe import publisher
from hybridkv.observe.events import (
    EntriesBatch,
    EntriesRemoved,
    EntriesStored,
    Shape,
    router_hash,
)
from hybridkv.observe.publisher import END, EventOptions, EventPublisher, StreamOptions
from hybridkv.observe.routing import PrefixIndex, Router
from hybridkv.observe.subscriber import Gap, Message, Subscriber
from hybridkv.prefixes.plan import Plan
from hybridkv.prefixes.policy import DENSE, NEVER

LONG = ids_of(5 * TILE + 3, seed=1)
ANYWHERE = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}


# A consumer's own types, as routers have them for vLLM 0.33; test_kv_event_bytes.py has what that
# publisher really sends.


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


def options(**changes: Any) -> EventOptions:
    router = StreamOptions(**ANYWHERE, topic="kv-events")
    entries = StreamOptions(**ANYWHERE, topic="hybridkv-events")
    return EventOptions(**({"router": router, "entries": entries} | changes))


@contextlib.contextmanager
def publishing(engine, **changes):
    with EventPublisher(engine, options(**changes)) as events:
        yield events


def subscriber(events, stream, **more):
    return Subscriber(events.endpoint(stream), events.endpoint(stream, replay=True), **more)


def all_of(events, stream, reader):
    """Payloads of everything that was told; asks for what has not come."""
    events.flush()
    assert events.drain()
    found = list(reader.receive())
    found += reader.catch_up()
    assert [x.seq for x in found] == list(range(found[0].seq, events.sent(stream)))
    return [x.payload for x in found]


def truth(runner):
    """By digest: tiers of the block, tiers of the snapshot on it."""
    columns, found = runner.allocator.entries, {}
    names = [tier.name.lower() for tier in Tier]

    def where(entry):
        here = columns.state[:, entry] == TierState.PRESENT
        return frozenset(name for name, there in zip(names, here, strict=True) if there)

    for entry in np.flatnonzero(columns.published & (columns.form == Form.BLOCK)):
        standing = columns.snapshot[entry]
        snapshot = where(standing) if standing != NONE else frozenset()
        found[columns.digest[entry].tobytes()] = (where(entry), snapshot)
    return found


def busy(lab, rounds=12, after=lambda n: None):
    """More prompts than fit: blocks and snapshots come, go, and come back."""
    heads = [ids_of(70, seed=100 + n) for n in range(4)]
    for n in range(rounds):
        ids = np.concatenate([heads[n % 4][: 16 * (1 + n % 5)], ids_of(30, seed=n)])
        policy = (DENSE, NEVER, None)[n % 3]
        lab.finish(lab.submit(ids, 3, policy=policy), lab.submit(heads[n % 3], 2))
        after(n)
    lab.engine.drain()


def test_a_batch_that_cannot_be_sent_is_told_and_leaves_a_gap(lab, monkeypatch, caplog):
    def broken(*_, **__):
        raise ValueError("no such event")

    lab.engine.reset()
    with publishing(lab.engine) as events:
        monkeypatch.setattr(publisher, "router_batch", broken)
        lab.finish(lab.submit(LONG, 2))
        events.flush()
        assert events.drain()
        assert events.sent("router") == events.failed > 0
    assert "a batch of the stream router could not be sent" in caplog.text
    assert "no such event" in caplog.text


def test_the_stream_replayed_is_exactly_the_directory(lab, tmp_path):
    """After every request, on all tiers, through evictions, loads, a reset and what was stored."""
    with lab_with_tiers(lab, tmp_path) as mover, publishing(lab.engine) as events:
        index, runner = PrefixIndex(), lab.engine.runner
        with subscriber(events, "entries") as reader:

            def same(_):
                events.flush()
                assert events.drain()
                for message in (*reader.receive(), *reader.catch_up()):
                    index.take_entries(message.payload)
                assert index.content() == truth(runner)

            busy(lab, 10, same)
            assert mover.flush(timeout_s=300)
            same(0)
            assert {"device", "host", "disk"} == {
                t for ts, _ in index.content().values() for t in ts
            }
            give_up(runner.allocator, Tier.DEVICE)
            same(0)
            assert all("device" not in tiers for tiers, _ in index.content().values())
            busy(lab, 3, same)
            assert mover.flush(timeout_s=300)
            before = truth(runner)
            lab.engine.reset()  # the store has its prefixes, and publishes them again
            same(0)
            assert 0 < len(index.content()) <= len(before)
            assert {("disk",)} == {tuple(t) for t, _ in index.content().values()}


def test_a_store_that_is_there_already_is_told_with_its_tokens(lab, tmp_path):
    with lab_with_tiers(lab, tmp_path) as mover:
        lab.finish(lab.submit(LONG, 2, policy=DENSE))
        lab.engine.drain()
        assert mover.flush(timeout_s=300)
        lab.engine.reset()
        with publishing(lab.engine) as events, subscriber(events, "router") as reader:
            index = PrefixIndex()
            for payload in all_of(events, "router", reader):
                index.take_router(payload)
                (event,) = DECODER.decode(payload).events
            assert event.medium == "DISK"
            assert event.token_ids == LONG[: 5 * TILE].tolist()


def test_a_consumer_of_kv_events_reads_blocks_tokens_and_parents(lab):
    with publishing(lab.engine, rank=3) as events, subscriber(events, "router") as reader:
        lab.finish(lab.submit(LONG[:40], 2))
        lab.finish(lab.submit(LONG, 2))
        batches = [DECODER.decode(payload) for payload in all_of(events, "router", reader)]
        chain = lab.engine.runner.chain(LONG)
    assert all(batch.data_parallel_rank == 3 for batch in batches)
    assert all(abs(batch.ts - time.time()) < 60 for batch in batches)
    first, second = (event for batch in batches for event in batch.events)
    names = [int.from_bytes(digest.tobytes()[-8:], "big") for digest in chain.digests]
    rest = (TILE, None, "GPU", None)
    assert first == BlockStored(names[:2], None, LONG[:32].tolist(), *rest)
    assert second == BlockStored(names[2:], names[1], LONG[32:80].tolist(), *rest)


def test_removed_blocks_are_told_and_a_snapshot_alone_is_not_a_block(lab):
    with publishing(lab.engine) as events, subscriber(events, "router") as reader:
        lab.finish(lab.submit(LONG, 2, policy=DENSE))
        allocator = lab.engine.runner.allocator
        names = {router_hash(x.tobytes()) for x in lab.engine.runner.chain(LONG).digests}
        assert len(all_of(events, "router", reader)) == 1
        allocator.evict(snapshots=allocator.evictable(Form.SNAPSHOT))
        assert len(list(reader.receive(timeout_s=0.1))) == 0
        allocator.evict(blocks=2)
        events.flush()
        (message,) = reader.receive(timeout_s=5)
        (event,) = DECODER.decode(message.payload).events
        assert isinstance(event, BlockRemoved)
        assert len(event.block_hashes) == 2
        assert set(event.block_hashes) < names
        lab.engine.reset()
        events.flush()
        (message,) = reader.receive(timeout_s=5)
        assert DECODER.decode(message.payload).events == [AllBlocksCleared()]


def test_a_router_learns_every_copy_of_a_block_with_its_tokens(lab, tmp_path):
    """Routers that index by tokens drop an event that has none: also when a copy comes back."""
    with (
        lab_with_tiers(lab, tmp_path) as mover,
        publishing(lab.engine) as events,
        subscriber(events, "router") as reader,
    ):
        lab.finish(lab.submit(LONG, 2, policy=DENSE))
        assert mover.flush(timeout_s=300)
        give_up(lab.engine.runner.allocator, Tier.DEVICE)
        events.flush()
        lab.finish(lab.submit(LONG, 2, policy=DENSE))
        events.announce_all()
        told = [
            event
            for payload in all_of(events, "router", reader)
            for event in DECODER.decode(payload).events
            if isinstance(event, BlockStored)
        ]
    names = [router_hash(x.tobytes()) for x in lab.engine.runner.chain(LONG).digests]
    by_name = {n: LONG[at * TILE : (at + 1) * TILE].tolist() for at, n in enumerate(names)}
    for event in told:
        assert event.token_ids == [token for n in event.block_hashes for token in by_name[n]]
    copies = collections.Counter(e.medium for e in told for _ in e.block_hashes)
    assert copies == {"GPU": 3 * len(names), "CPU": 2 * len(names), "DISK": 2 * len(names)}


def test_older_consumers_find_whole_hashes_in_arrays(lab):
    old = {"shape": Shape.ARRAY, "whole_hashes": True}
    with publishing(lab.engine, **old) as events, subscriber(events, "router") as reader:
        lab.finish(lab.submit(LONG, 2))
        (payload,) = all_of(events, "router", reader)
        index = PrefixIndex()
        index.take_router(payload)
        digests = [x.tobytes() for x in lab.engine.runner.chain(LONG).digests]
    name, hashes, parent, tokens, *_ = msgspec.msgpack.decode(payload)[1][0]
    assert (name, hashes, parent) == ("BlockStored", digests, None)
    assert tokens == LONG[: 5 * TILE].tolist()
    assert set(index._behind.values()) == set(map(router_hash, digests))


def test_our_events_say_kinds_positions_and_what_resuming_costs(lab):
    with publishing(lab.engine) as events, subscriber(events, "entries") as reader:
        lab.finish(lab.submit(LONG, 2))
        told = [
            event
            for payload in all_of(events, "entries", reader)
            for event in msgspec.msgpack.decode(payload, type=EntriesBatch).events
        ]
        runner = lab.engine.runner
        runner.allocator.evict(snapshots=1)
        events.flush()
        (message,) = reader.receive(timeout_s=5)
        (gone,) = msgspec.msgpack.decode(message.payload, type=EntriesBatch).events
        geometry = runner.model.geometry
    blocks, snapshot = told
    assert isinstance(blocks, EntriesStored)
    assert (blocks.form, blocks.tier) == ("block", "device")
    assert blocks.kinds == ["compressed", "indexer"]
    assert blocks.positions == [16, 32, 48, 64, 80]
    far = geometry.replay_tokens(80)
    starts = [max(p - far, 0) // TILE * TILE for p in blocks.positions]
    assert blocks.replay_tokens == [p - s for p, s in zip(blocks.positions, starts, strict=True)]
    assert blocks.restorable == 80
    assert (snapshot.form, snapshot.kinds) == ("snapshot", ["window", "tail"])
    assert (snapshot.positions, snapshot.replay_tokens, snapshot.restorable) == ([80], [0], 80)
    assert snapshot.block_hashes == blocks.block_hashes[-1:]
    assert isinstance(gone, EntriesRemoved)
    assert (gone.form, gone.block_hashes) == ("snapshot", snapshot.block_hashes)


def test_a_router_promises_what_the_planner_then_reuses(lab):
    """On mixed traffic, for every prompt: the boundary is that of the plan, not the match."""
    with publishing(lab.engine) as events, contextlib.ExitStack() as readers:
        router = Router(["only"])
        index = router.indexes["only"]
        streams = [
            (readers.enter_context(subscriber(events, name)), take)
            for name, take in (("router", index.take_router), ("entries", index.take_entries))
        ]
        outcomes = collections.Counter()

        def right(n):
            events.flush()
            assert events.drain()
            for reader, take in streams:
                for message in (*reader.receive(), *reader.catch_up()):
                    take(message.payload)
            runner = lab.engine.runner
            for seed in range(4):
                ids = np.concatenate([ids_of(70, seed=100 + seed), ids_of(7, seed=n)])
                chain = runner.chain(ids)
                plan = runner.plan(chain)
                reused = plan.reused if isinstance(plan, Plan) else 0
                score = index.score(ids)
                assert router.choose(ids) == ("only", score)
                assert score == index.score(ids, hashes=[d.tobytes() for d in chain.digests])
                assert score.reused == reused
                assert score.matched == TILE * len(runner.directory.find(chain).entries)
                outcomes["shorter"] += score.reused < score.matched
                outcomes["replayed"] += score.replayed > 0
                outcomes["all"] += 0 < score.reused == score.matched

        busy(lab, 9, right)
    assert all(outcomes[each] > 2 for each in ("shorter", "replayed", "all")), outcomes


# Gaps and slow readers.


def send_many(events, lab, count):
    """One batch a turn: a block that comes and goes."""
    allocator = lab.engine.runner.allocator
    for n in range(count):
        lab.finish(lab.submit(ids_of(17, seed=n), 1, policy=NEVER))
        allocator.evict(blocks=allocator.evictable(Form.BLOCK))
        events.flush()
    assert events.drain()


def test_who_comes_late_or_misses_some_asks_and_has_everything(lab):
    with publishing(lab.engine) as events:
        send_many(events, lab, 4)
        with subscriber(events, "entries") as reader:
            assert not list(reader.receive(timeout_s=0.2))
            send_many(events, lab, 1)
            deadline, found = time.monotonic() + 10, []
            while len(found) < events.sent("entries") and time.monotonic() < deadline:
                found += reader.receive(timeout_s=0.2)
            assert [x.seq for x in found] == list(range(events.sent("entries")))
            assert reader.replayed >= 8
            reader.expected += 3  # as if it had seen messages of another life: nothing comes twice
            assert list(reader.catch_up()) == []


def test_a_whole_replay_comes_though_one_was_read_just_before(lab):
    """What ZeroMQ still counts as unread of the first must not cost the second its end."""
    few = StreamOptions(**ANYWHERE, topic="entries", kept=4)
    with publishing(lab.engine, entries=few) as events, subscriber(events, "entries") as reader:
        send_many(events, lab, 4)
        for _ in range(4):
            reader.expected = events.sent("entries") - 4
            assert len(list(reader.catch_up())) == 4
            assert reader._replay.poll(0) == 0
        assert reader.replayed == 16


def test_what_is_no_longer_kept_is_a_gap_and_can_be_announced_again(lab):
    small = StreamOptions(**ANYWHERE, topic="entries", kept=3)
    with publishing(lab.engine, entries=small) as events, subscriber(events, "entries") as reader:
        send_many(events, lab, 5)
        lab.finish(lab.submit(LONG, 1))
        events.flush()
        assert events.drain()
        time.sleep(0.1)
        reader.expected = 0
        got = list(reader.catch_up())
        assert isinstance(got[0], Gap)
        assert got[0].first == 0
        assert got[0].count == events.sent("entries") - 3
        assert [type(x) for x in got[1:]] == [Message] * 3
        events.announce_all()
        index = PrefixIndex()
        assert events.drain()
        for message in reader.catch_up():
            index.take_entries(message.payload)
        assert index.content() == truth(lab.engine.runner)


def test_a_full_queue_delays_and_loses_nothing(lab, monkeypatch):
    """The sender is stuck: turns go on, memory is bounded, and the truth comes out in the end."""
    stuck, free = threading.Event(), threading.Event()
    real = EventPublisher._send

    def send(self, *given):
        stuck.set()
        assert free.wait(30)
        real(self, *given)

    monkeypatch.setattr(EventPublisher, "_send", send)
    with publishing(lab.engine, queue=2) as events, subscriber(events, "entries") as reader:
        busy(lab, 6)
        assert stuck.wait(5)
        assert len(events._queue) <= 2
        assert events.postponed > 3
        free.set()
        index = PrefixIndex()
        deadline = time.monotonic() + 10
        while events.changes.pending and time.monotonic() < deadline:
            events.flush()
            time.sleep(0.01)
        for payload in all_of(events, "entries", reader):
            index.take_entries(payload)
        assert index.content() == truth(lab.engine.runner)


def test_a_subscriber_that_does_not_read_slows_nobody_and_sees_a_gap(lab):
    narrow = StreamOptions(**ANYWHERE, high_water_mark=1, kept=10_000)
    payload = b"x" * 100_000
    with (
        publishing(lab.engine, entries=narrow) as events,
        subscriber(events, "entries", high_water_mark=1) as reader,
    ):
        stream = events._streams["entries"]
        deadline = time.monotonic() + 10
        while not reader._sub.poll(50) and time.monotonic() < deadline:
            stream.send(payload)  # until the subscription has arrived
        began = time.perf_counter()
        for _ in range(300):
            stream.send(payload)
        assert time.perf_counter() - began < 5.0
        frames = []
        while reader._sub.poll(200):
            frames.append(int.from_bytes(reader._sub.recv_multipart()[1], "big"))
        assert len(frames) < 300  # the rest was dropped for it alone
        reader.expected = 0
        assert [x.seq for x in reader.catch_up()] == list(range(stream.next))


def test_a_malformed_replay_request_is_not_answered_and_ends_nothing(lab):
    with (
        publishing(lab.engine) as events,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
    ):
        socket.connect(events.endpoint("router", replay=True))
        for frames in ([b""], [b"", b"123"], [b"", b"12345678", b"more"]):
            socket.send_multipart(frames)
        socket.send_multipart([b"", struct.pack(">Q", 0)])
        assert socket.poll(5000)
        assert socket.recv_multipart() == [b"", b"", END, b""]
        assert not socket.poll(100)


def test_an_address_that_is_taken_is_refused_and_nothing_is_left(lab):
    with publishing(lab.engine) as events:
        taken = StreamOptions(endpoint=events.endpoint("router"))
        callbacks = len(lab.engine.on_turn)
        with pytest.raises(UserError, match="cannot bind"):
            EventPublisher(lab.engine, options(entries=taken))
        assert len(lab.engine.on_turn) == callbacks
    runner = lab.engine.runner
    assert events.flush not in lab.engine.on_turn
    assert runner.allocator.on_touched == []
    assert runner.directory.on_publish == []
    assert runner.on_reset == []
    with pytest.raises(UserError, match="no stream"):
        EventOptions(router=None, entries=None)
