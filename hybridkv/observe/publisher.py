r"""Events over ZeroMQ: two streams that a slow subscriber can't slow.

    engine's thread:  turn --> flush differences --> queue (bounded) --+
                               queue full: stays dirty, told later     |
    one thread:       encode, number, PUB [topic, seq, payload] <------+     subscribers
                      keep the last ``kept`` payloads, ROUTER <-- start seq -- who saw a gap

A subscriber that can't follow is skipped by its own high-water mark: it sees a gap in the sequence
numbers, 8 bytes, big-endian, and asks the replay socket from the first that it misses. The answer
is ``[b"", topic, seq, payload]`` for each that is still kept and ends with the sequence number -1,
as vLLM 0.33 and SGLang 0.5.23 answer; vLLM 0.22 leaves the topic out. Who has missed more than is
kept asks for everything anew: ``EventPublisher.announce_all``. Numbers begin at 0 with each
publisher, so that whoever follows an engine that was restarted has to subscribe anew.
"""

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence

from hybridkv.engine.engine import Engine
from hybridkv.errors import UserError
from hybridkv.observe.changes import Change, Changes
from hybridkv.observe.events import Resuming, Shape, entries_batch, router_batch

try:
    import zmq
except ImportError as error:
    raise ImportError("events need msgspec and pyzmq: pip install -e '.[observe]'") from error

_LOG = logging.getLogger(__name__)
END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """One stream. Endpoints are ZeroMQ's; port ``*`` takes a free one."""

    endpoint: str
    """Where subscribers connect."""
    replay_endpoint: str | None = None
    """Where gaps are asked for; None for nowhere."""
    topic: str = ""
    """The first frame of each message."""
    high_water_mark: int = 100_000
    """Messages that wait for one slow subscriber at most."""
    kept: int = 10_000
    """Messages that can be asked for again."""
    replay_topic: bool = True
    """Whether answers to that have the topic as messages do. Routers that were made for vLLM 0.22
    and before expect none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventOptions:
    """What is told, and where; every address is of this machine unless said otherwise.

    Raises:
      UserError: nothing would be told, or a size is not positive.
    """

    router: StreamOptions | None = StreamOptions(
        endpoint="tcp://127.0.0.1:5557",
        replay_endpoint="tcp://127.0.0.1:5558",
        topic="kv-events",
    )
    """For prefix-aware routers, in the shape of vLLM's KV events."""
    entries: StreamOptions | None = StreamOptions(
        endpoint="tcp://127.0.0.1:5559",
        replay_endpoint="tcp://127.0.0.1:5560",
        topic="hybridkv-events",
    )
    """Ours: blocks and snapshots, where one can resume and what that costs."""
    shape: Shape = Shape.MAP
    whole_hashes: bool = False
    """Whether the router's topic has hashes of 32 bytes, as vLLM's has where
    ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`` is 0."""
    rank: int | None = None
    """``data_parallel_rank`` of the batches."""
    queue: int = 64
    """Batches that wait to be sent at most; more are told together later."""

    def __post_init__(self) -> None:
        if self.router is None and self.entries is None:
            raise UserError("no stream: give router=, entries= or both")
        streams = [each for each in (self.router, self.entries) if each is not None]
        sizes = [self.queue, *(x.high_water_mark for x in streams), *(x.kept for x in streams)]
        if min(sizes) < 1:
            raise UserError("queue, high_water_mark and kept must be at least 1")


class _Stream:
    """One PUB and its ROUTER; of the sending thread, once it is bound."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", options: StreamOptions) -> None:
        self._topic = options.topic.encode()
        self._ahead = [b"", self._topic] if options.replay_topic else [b""]
        self._last = [b"", b""] if options.replay_topic else [b""]
        self._kept: collections.deque[tuple[int, bytes]] = collections.deque(maxlen=options.kept)
        self.next = 0
        """The next sequence number."""
        self.publisher = context.socket(zmq.PUB)
        self.publisher.set_hwm(options.high_water_mark)
        self.router: zmq.Socket[bytes] | None = None
        try:
            self.publisher.bind(options.endpoint)
            self.endpoint = _bound(self.publisher)
            self.replay_endpoint: str | None = None
            if options.replay_endpoint is not None:
                self.router = context.socket(zmq.ROUTER)
                # A whole replay waits for its reader. What was read is taken off the count only
                # every half mark, so that as much may still be on it from the replay before.
                self.router.set_hwm(2 * (options.kept + 1))
                self.router.bind(options.replay_endpoint)
                self.replay_endpoint = _bound(self.router)
        except zmq.ZMQError as error:
            self.close()
            raise UserError(f"cannot bind {options.endpoint} for events: {error}") from error

    def send(self, payload: bytes) -> None:
        seq, self.next = self.next, self.next + 1
        self.publisher.send_multipart([self._topic, seq.to_bytes(8, "big"), payload])
        self._kept.append((seq, payload))

    def answer(self) -> None:
        """One request on the replay socket; a malformed one is not answered."""
        assert self.router is not None
        frames = self.router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        for seq, payload in list(self._kept):
            if seq >= start:
                number = seq.to_bytes(8, "big")
                self.router.send_multipart([client, *self._ahead, number, payload])
        self.router.send_multipart([client, *self._last, END, b""])

    def close(self) -> None:
        self.publisher.close(linger=0)
        if self.router is not None:
            self.router.close(linger=0)


def _bound(socket: "zmq.Socket[bytes]") -> str:
    """The address that a socket really has."""
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()


_Batch = tuple[float, Sequence[Change]]
_POLL_MS = 50


class EventPublisher:
    """The events of one engine. Make it before the first request, and close it at the end."""

    def __init__(self, engine: Engine, options: EventOptions = EventOptions()) -> None:
        """Binds the sockets and registers itself at ``engine.on_turn``.

        Raises:
          UserError: an address is taken or is none.
        """
        runner = engine.runner
        self.options, self._engine = options, engine
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._streams: dict[str, _Stream] = {}
        try:
            for name in ("router", "entries"):
                stream = getattr(options, name)
                if stream is not None:
                    self._streams[name] = _Stream(self._context, stream)
        except UserError:
            self._close_sockets()
            raise
        self._block = runner.model.geometry.block_tokens
        self._resuming = Resuming(
            geometry=runner.model.geometry, tile=runner.options.tile, replay=runner.sizes.replay
        )
        self._changes = Changes(runner)
        self._queue: collections.deque[_Batch] = collections.deque()
        self._ready, self._closing = threading.Event(), False
        self.postponed = 0
        """Turns whose changes had to wait because the queue was full."""
        self.failed = 0
        """Batches that could not be sent; their sequence numbers were used up, so it shows."""
        self._sending = threading.Lock()
        engine.on_turn.append(self.flush)
        self._thread = threading.Thread(target=self._run, name="hybridkv-events", daemon=True)
        self._thread.start()

    def endpoint(self, stream: str, *, replay: bool = False) -> str | None:
        """Where a stream, ``router`` or ``entries``, really is; None where there is none."""
        found = self._streams.get(stream)
        if found is None:
            return None
        return found.replay_endpoint if replay else found.endpoint

    def sent(self, stream: str) -> int:
        """Messages of a stream so far: its next sequence number."""
        return self._streams[stream].next

    @property
    def changes(self) -> Changes:
        """What was told; of the engine's thread."""
        return self._changes

    def flush(self) -> None:
        """Tells what has changed. On the engine's thread; after every turn by itself."""
        if not self._changes.pending or self._closing:
            return
        if len(self._queue) >= self.options.queue:
            self.postponed += 1
            return
        changes = self._changes.flush()
        if changes:
            self._queue.append((time.time(), changes))
            self._ready.set()

    def announce_all(self) -> None:
        """Tells again that everything is gone, and then all that is there.

        On the engine's thread.
        """
        self._changes.forget()
        self.flush()

    def drain(self, *, timeout_s: float = 5.0) -> bool:
        """Waits until all that was told is handed to ZeroMQ; whether it was, in time."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if not self._queue and self._sending.acquire(timeout=0.01):
                self._sending.release()
                return True
            time.sleep(1e-3)
        return False

    def close(self) -> None:
        """Tells what is left and gives thread and sockets back. On the engine's thread."""
        if self._closing:
            return
        self.flush()
        self._closing = True
        self._engine.on_turn.remove(self.flush)
        self._changes.close()
        self._ready.set()
        self._thread.join()
        self._close_sockets()

    def __enter__(self) -> "EventPublisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_sockets(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._context.term()

    # The sending thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        answers: dict[zmq.Socket[bytes], Callable[[], None]] = {}
        for stream in self._streams.values():
            if stream.router is not None:
                poller.register(stream.router, zmq.POLLIN)
                answers[stream.router] = stream.answer
        while True:
            closing = self._closing
            self._send_all()
            for socket, _ in poller.poll(0) if answers else ():
                answers[socket]()
            if closing:
                return
            # Replays may wait a little; events do not.
            self._ready.wait(_POLL_MS / 1000)
            self._ready.clear()

    def _send_all(self) -> None:
        while self._queue:
            with self._sending:
                ts, changes = self._queue.popleft()
                for name, stream in self._streams.items():
                    self._send(name, stream, ts, changes)

    def _send(self, name: str, stream: _Stream, ts: float, changes: Sequence[Change]) -> None:
        options = self.options
        try:
            if name == "entries":
                stream.send(entries_batch(changes, self._resuming, rank=options.rank, ts=ts))
                return
            payload = router_batch(
                changes,
                block_tokens=self._block,
                shape=options.shape,
                whole_hashes=options.whole_hashes,
                rank=options.rank,
                ts=ts,
            )
            if payload is not None:
                stream.send(payload)
        except Exception:  # whatever goes wrong here, requests go on; the gap tells subscribers
            _LOG.exception("a batch of the stream %s could not be sent", name)
            self.failed += 1
            stream.next += 1
