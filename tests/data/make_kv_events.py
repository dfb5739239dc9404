"""Writes ``kv_events.json``: what vLLM's own publisher sends, byte for byte.

    pip download --no-deps -d wheels vllm==0.33.0 && pip download --no-deps -d wheels vllm==0.22.0
    python tests/data/make_kv_events.py wheels/vllm-*.whl

Nothing is installed: ``vllm/distributed/kv_events.py`` is read from each wheel and run with other
modules for its four imports from vLLM, none of which is about the messages. Its classes encode
the batches below, and its publisher sends them and answers a replay from the second one on.
"""

import ast
import hashlib
import json
import logging
import pathlib
import re
import sys
import types
import zipfile
from typing import Any

import zmq

OUT = pathlib.Path(__file__).with_name("kv_events.json")
TOPIC, RANK, SIZE = "kv-events", 2, 4
EVENTS, REPLAY = "inproc://events", "inproc://replay"


def _digest(*tokens: int) -> str:
    return hashlib.sha256(bytes(tokens)).hexdigest()


def _stored(digests: list[str], parent: str | None, tokens: list[int], medium: str) -> Any:
    return {
        "type": "BlockStored",
        "block_hashes": digests,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "medium": medium,
    }


A, B, C = _digest(1), _digest(1, 2), _digest(1, 2, 3)
BATCHES = [
    {"ts": 1.5, "events": [_stored([A, B], None, [7, 8, 9, 10, 11, 12, 13, 14], "GPU")]},
    {
        "ts": 2.25,
        "events": [
            _stored([C], B, [70000, 2, 3, 4], "GPU"),
            _stored([A], None, [7, 8, 9, 10], "CPU"),
            _stored([B], A, [], "DISK"),
        ],
    },
    {
        "ts": 3.0,
        "events": [
            {"type": "BlockRemoved", "block_hashes": [C, B], "medium": "GPU"},
            {"type": "BlockRemoved", "block_hashes": [A], "medium": "CPU"},
        ],
    },
    {"ts": 4.0, "events": [{"type": "AllBlocksCleared"}]},
]
"""As plain as can be; hashes are digests here, and what vLLM makes of digests in its events."""


def _module(name: str, **content: Any) -> None:
    parts = name.split(".")
    for end in range(1, len(parts)):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(parts[end - 1]))
    module = types.ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module


def _load(wheel: zipfile.ZipFile) -> Any:
    """The module of vLLM's events."""
    _module("vllm.config.kv_events", KVEventsConfig=types.SimpleNamespace)
    _module("vllm.logger", init_logger=logging.getLogger)
    names = ("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path")
    _module("vllm.utils.network_utils", **dict.fromkeys(names))
    _module("vllm.v1.core.kv_cache_utils", ExternalBlockHash=bytes | int)
    module = types.ModuleType("vllm_kv_events")
    sys.modules[module.__name__] = module
    exec(wheel.read("vllm/distributed/kv_events.py"), module.__dict__)
    return module


def _hash(wheel: zipfile.ZipFile) -> Any:
    """Its function from a digest to the hash in an event, with its default setting."""
    default = re.search(
        r"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES: bool = (\w+)", wheel.read("vllm/envs.py").decode()
    )
    assert default is not None
    tree = ast.parse(wheel.read("vllm/v1/core/kv_cache_utils.py"))
    (found,) = (
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "maybe_convert_block_hash"
    )
    found.returns = found.args.args[0].annotation = None
    envs = types.SimpleNamespace(VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=default[1] == "True")
    inside = {"envs": envs}
    exec(ast.unparse(found), inside)
    return inside["maybe_convert_block_hash"]


def _events(module: Any, convert: Any, batch: dict[str, Any]) -> Any:
    """A batch of its classes."""
    made = []
    for event in batch["events"]:
        fields = {name: value for name, value in event.items() if name != "type"}
        if "block_hashes" in fields:
            fields["block_hashes"] = [convert(bytes.fromhex(x)) for x in fields["block_hashes"]]
        if event["type"] == "BlockStored":
            parent = fields["parent_block_hash"]
            fields["parent_block_hash"] = None if parent is None else convert(bytes.fromhex(parent))
            fields |= {"block_size": SIZE, "lora_id": None, "lora_name": None}
        made.append(getattr(module, event["type"])(**fields))
    return module.KVEventBatch(ts=batch["ts"], events=made)


def record(path: str) -> dict[str, Any]:
    """Frames of one release, as hexadecimal digits."""
    with zipfile.ZipFile(path) as wheel:
        module, convert = _load(wheel), _hash(wheel)
    context = zmq.Context.instance()
    publisher = module.ZmqEventPublisher(RANK, EVENTS, REPLAY, topic=TOPIC)
    ends = [f"{each}_dp{RANK}" for each in (EVENTS, REPLAY)]
    with context.socket(zmq.SUB) as reader, context.socket(zmq.DEALER) as asker:
        reader.subscribe(b"")
        reader.connect(ends[0])
        asker.connect(ends[1])
        live = []
        for batch in BATCHES:
            publisher.publish(_events(module, convert, batch))
            live.append(reader.recv_multipart())
        asker.send_multipart([b"", (1).to_bytes(8, "big")])
        replay = [asker.recv_multipart() for _ in range(len(BATCHES))]  # one less, and the end
        assert not asker.poll(200)
    publisher.shutdown()
    return {
        name: [[frame.hex() for frame in message] for message in messages]
        for name, messages in (("live", live), ("replay", replay))
    }


def main() -> None:
    """Records each wheel."""
    releases = {pathlib.Path(path).name.split("-")[1]: record(path) for path in sys.argv[1:]}
    content = {"topic": TOPIC, "rank": RANK, "block_size": SIZE, "batches": BATCHES}
    OUT.write_text(json.dumps(content | {"vllm": releases}, indent=1) + "\n")
    print(f"{OUT.name}: {', '.join(releases)}")


if __name__ == "__main__":
    main()
