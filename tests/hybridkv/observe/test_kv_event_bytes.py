"""The router's topic is what vLLM's own publisher sends for the same changes.

``tests/data/make_kv_events.py`` recorded that with the code of two releases.
"""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from places import REPOSITORY

from hybridkv.blocks.entries import Form, Tier
from hybridkv.observe.changes import Change, Cleared, Removed, Stored, Told
from hybridkv.observe.events import MEDIUMS, Shape, router_batch
from hybridkv.observe.publisher import StreamOptions, _Stream

RECORDED = json.loads((REPOSITORY / "tests/data/kv_events.json").read_text())
NEW, OLD = "0.33.0", "0.22.0"
TIERS: dict[str, Tier] = {medium: tier for tier, medium in MEDIUMS.items()}
SIZE = RECORDED["block_size"]


def told(digest: str, parent: str | None, position: int) -> Told:
    return Told(
        form=Form.BLOCK,
        generation=1,
        digest=bytes.fromhex(digest),
        parent=None if parent is None else bytes.fromhex(parent),
        position=position,
        kinds=1,
        tiers=frozenset(),
    )


def changes(event: dict[str, Any]) -> list[Change]:
    """What the books must have gone through for one event."""
    if event["type"] == "AllBlocksCleared":
        return [Cleared()]
    tier, hashes = TIERS[event["medium"]], event["block_hashes"]
    if event["type"] == "BlockRemoved":
        return [Removed(entry=told(each, None, SIZE), tier=tier) for each in hashes]
    found: list[Change] = []
    before = event["parent_block_hash"]
    for at, each in enumerate(hashes):
        ids = np.array(event["token_ids"][at * SIZE : (at + 1) * SIZE], np.uint32)
        entry = told(each, before, SIZE * (at + 1))
        found.append(Stored(entry=entry, tier=tier, tokens=ids if ids.size else None))
        before = each
    return found


def ours(shape: Shape) -> list[bytes]:
    """Our messages for the recorded batches."""
    made = []
    for batch in RECORDED["batches"]:
        all_of_it = [change for event in batch["events"] for change in changes(event)]
        payload = router_batch(
            all_of_it, block_tokens=SIZE, shape=shape, rank=RECORDED["rank"], ts=batch["ts"]
        )
        assert payload is not None
        made.append(payload)
    return made


def theirs(release: str, messages: str) -> list[list[bytes]]:
    return [[bytes.fromhex(frame) for frame in m] for m in RECORDED["vllm"][release][messages]]


def test_maps_are_what_vllm_sends():
    """Fields, their order and values; msgpack may write the size of a map in two ways."""
    decoded = [msgspec.msgpack.decode(payload) for _, _, payload in theirs(NEW, "live")]
    mine = [msgspec.msgpack.decode(payload) for payload in ours(Shape.MAP)]
    assert list(map(json.dumps, mine)) == list(map(json.dumps, decoded))


def test_arrays_have_the_fields_of_older_releases_in_their_places_and_no_others():
    for mine, (_, _, payload) in zip(ours(Shape.ARRAY), theirs(OLD, "live"), strict=True):
        (ts, events, rank), recorded = (msgspec.msgpack.decode(x) for x in (mine, payload))
        assert [ts, rank] == [recorded[0], recorded[2]]
        for event, other in zip(events, recorded[1], strict=True):
            assert event == other[: len(event)]
            assert not any(other[len(event) :])  # what they leave empty, and may use otherwise


@pytest.mark.parametrize("release", [NEW, OLD])
def test_frames_of_messages_and_of_replays_are_theirs(release):
    options = StreamOptions(
        endpoint="inproc://events",
        replay_endpoint="inproc://replay",
        topic=RECORDED["topic"],
        replay_topic=release == NEW,
    )
    live, replayed = theirs(release, "live"), theirs(release, "replay")
    with zmq.Context() as context:
        stream = _Stream(context, options)
        with context.socket(zmq.SUB) as reader, context.socket(zmq.DEALER) as asker:
            reader.subscribe(b"")
            reader.connect(stream.endpoint)
            for _, _, payload in live:
                stream.send(payload)
            assert [reader.recv_multipart() for _ in live] == live
            asker.connect(stream.replay_endpoint)
            asker.send_multipart([b"", (1).to_bytes(8, "big")])
            assert stream.router.poll(5000)
            stream.answer()
            assert [asker.recv_multipart() for _ in replayed] == replayed
        stream.close()
