"""What routers and dashboards are told is what is there, tier by tier and kind by kind."""

import msgspec
import numpy as np
from bookkeeping import give_up
from engines import TILE, ids_of
from tiered_lab import lab_with_tiers

from hybridkv.blocks.entries import Form, Tier
from hybridkv.kinds import Kind
from hybridkv.observe.changes import Changes
from hybridkv.observe.events import router_batch
from hybridkv.observe.numbers import measure
from hybridkv.observe.publisher import EventOptions, EventPublisher, StreamOptions
from hybridkv.observe.subscriber import Subscriber
from hybridkv.prefixes.plan import Plan
from hybridkv.prefixes.policy import DENSE, NEVER
from scenarios.runs import counting_runner, joined, request, tokens

LONG = ids_of(8 * TILE + 3, seed=1)
EVERYWHERE = {"GPU", "CPU", "DISK"}


class Believer:
    """A router that has only the events: it takes every block that follows another for whole."""

    def __init__(self):
        self.behind = {}
        self.where = {}

    def take(self, payload):
        for event in msgspec.msgpack.decode(payload)[1]:
            medium = event["medium"]
            if event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    self.where[block].remove(medium)
                continue
            size, parent = event["block_size"], event["parent_block_hash"]
            ids = event["token_ids"]
            assert len(ids) == size * len(event["block_hashes"])
            for at, block in enumerate(event["block_hashes"]):
                self.behind[parent, tuple(ids[at * size : (at + 1) * size])] = block
                assert medium not in self.where.setdefault(block, set())
                self.where[block].add(medium)
                parent = block

    def run(self, ids, mediums):
        """Blocks of a prompt that it believes in."""
        parent, found = None, []
        for start in range(0, len(ids) - TILE + 1, TILE):
            parent = self.behind.get((parent, tuple(ids[start : start + TILE].tolist())))
            if parent is None or not self.where[parent] & mediums:
                break
            found.append(parent)
        return found


def test_b066_a_router_believes_no_prefix_that_is_not_whole():
    """Sparse kinds, states that come and go, and withdrawn blocks leave no prefix to believe in."""
    runner, router = counting_runner(blocks=14, snapshots=4), Believer()
    changes, heads = Changes(runner), [tokens(70, seed) for seed in range(3)]
    seen = {"all": 0, "part": 0, "replayed": 0}
    for n in range(24):
        head = heads[n % 3][: 16 * (1 + n % 4)]
        request(runner, joined(head, tokens(20, 10 + n)), policy=DENSE if n % 2 else NEVER)
        if n % 5 == 4:  # as for an index row that is not what was written
            run = runner.directory.find(runner.chain(heads[0])).entries
            runner.directory.withdraw(runner.directory.above(run[1:2]), "by hand")
        payload = router_batch(changes.flush(), block_tokens=TILE)
        if payload is not None:
            router.take(payload)
        for head in heads:
            found = runner.directory.find(runner.chain(head)).entries
            assert len(router.run(head, {"GPU"})) == len(found)
            assert (runner.allocator.entries.form[found] == Form.BLOCK).all()
            plan = runner.plan(runner.chain(head))
            reused = plan.reused if isinstance(plan, Plan) else 0
            assert reused <= TILE * len(found)
            seen["all"] += len(found) == 4
            seen["part"] += 0 < len(found) < 4
            seen["replayed"] += reused < TILE * len(found)
    assert min(seen.values()) > 3, seen


def test_b221_what_came_from_a_tier_is_counted_there_and_nowhere_else(lab, tmp_path):
    with lab_with_tiers(lab, tmp_path) as mover:
        runner = lab.engine.runner
        lab.finish(lab.submit(LONG, 2, policy=DENSE))
        lab.engine.drain()
        assert mover.flush(timeout_s=300)  # the host and the disk have everything too
        runner.allocator.evict(snapshots=4, tier=Tier.DEVICE)
        runner.allocator.evict(blocks=3, tier=Tier.DEVICE)
        handle = lab.submit(joined(LONG, ids_of(40, seed=2)), 2)
        lab.finish(handle)
        restored = measure(lab.engine).prompts.restored
    assert handle.output.plan.shared == 8 * TILE
    for kind in (Kind.COMPRESSED, Kind.INDEXER):
        counts = [restored.get((kind, tier), 0) for tier in Tier]
        assert counts == [5 * TILE, 3 * TILE, 0]


def test_b225_every_tier_tells_a_router_what_comes_and_what_goes(lab, tmp_path):
    """Of two engines that a router follows, one has a prompt, wherever its bytes are."""
    here = StreamOptions(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
    options = EventOptions(router=here, entries=None)
    one, other = Believer(), Believer()
    with (
        lab_with_tiers(lab, tmp_path) as mover,
        EventPublisher(lab.engine, options) as events,
        Subscriber(events.endpoint("router"), events.endpoint("router", replay=True)) as reader,
    ):

        def told():
            events.flush()
            assert events.drain()
            for message in (*reader.receive(), *reader.catch_up()):
                one.take(message.payload)
            assert reader.expected == events.sent("router")
            assert not other.run(LONG, EVERYWHERE)
            return [len(one.run(LONG, {medium})) for medium in ("GPU", "CPU", "DISK")]

        assert told() == [0, 0, 0]
        lab.finish(lab.submit(LONG, 2))
        lab.engine.drain()
        assert mover.flush(timeout_s=300)
        assert told() == [8, 8, 8]
        give_up(lab.engine.runner.allocator, Tier.DEVICE)
        assert told() == [0, 8, 8]
        give_up(lab.engine.runner.allocator, Tier.HOST)
        assert told() == [0, 0, 8]
        assert len(one.run(LONG, EVERYWHERE)) == 8
        lab.finish(lab.submit(np.append(LONG, 1), 2))
        assert told() == [8, 0, 8]
