r"""Reading a stream of events, gaps included.

    SUB [topic, seq, payload] --seq as expected--> payload
                             \--seq too large--> DEALER: from the first missing --> payloads
                                                    \-- no longer kept --> Gap

A payload is decoded by whoever knows its topic. One thread.
"""

import dataclasses
import time
from collections.abc import Iterator

from hybridkv.observe.publisher import END

try:
    import zmq
except ImportError as error:
    raise ImportError("events need msgspec and pyzmq: pip install -e '.[observe]'") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """One batch, in order and once."""

    seq: int
    payload: bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gap:
    """Batches that are lost for ever: whatever was known is not sure any more."""

    first: int
    count: int


class Subscriber:
    """One subscription."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        high_water_mark: int = 100_000,
        replay_s: float = 2.0,
    ) -> None:
        """Connects; messages from the very first on are asked for with the first that comes.

        Args:
          endpoint: of the stream.
          replay_endpoint: of its replay socket; None to only see gaps.
          topic: the beginning of the topics to read.
          high_water_mark: messages that wait here at most.
          replay_s: how long a replay may take.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.set_hwm(high_water_mark)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._sub.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self._replay = self._dealer()
        self._replay_s = replay_s
        self.expected = 0
        """The next sequence number."""
        self.replayed = 0
        """Messages that came from the replay socket."""

    def _dealer(self) -> "zmq.Socket[bytes] | None":
        if self._replay_endpoint is None:
            return None
        socket = self._context.socket(zmq.DEALER)
        socket.connect(self._replay_endpoint)
        return socket

    def receive(self, *, timeout_s: float = 0.0) -> Iterator[Message | Gap]:
        """All that has come, waiting so long for the first."""
        wait = int(timeout_s * 1000)
        while self._sub.poll(wait):
            wait = 0
            _, number, payload = self._sub.recv_multipart()
            seq = int.from_bytes(number, "big")
            yield from self._missing(seq)
            if seq == self.expected:  # else it came by a replay before
                self.expected = seq + 1
                yield Message(seq=seq, payload=payload)

    def catch_up(self) -> Iterator[Message | Gap]:
        """Asks for all that is kept from the expected number on, without waiting for a message."""
        yield from self._asked()

    def _missing(self, seq: int) -> Iterator[Message | Gap]:
        if seq > self.expected:
            yield from self._asked()
        if seq > self.expected:
            gap = Gap(first=self.expected, count=seq - self.expected)
            self.expected = seq
            yield gap

    def _asked(self) -> Iterator[Message | Gap]:
        """What the replay socket has from the expected number on."""
        if self._replay is None:
            return
        self._replay.send_multipart([b"", self.expected.to_bytes(8, "big")])
        end = time.monotonic() + self._replay_s
        while self._replay.poll(max(int((end - time.monotonic()) * 1000), 0)):
            *_, number, payload = self._replay.recv_multipart()  # with the topic or without
            if number == END:
                return
            seq = int.from_bytes(number, "big")
            if seq < self.expected:
                continue
            if seq > self.expected:
                yield Gap(first=self.expected, count=seq - self.expected)
            self.expected = seq + 1
            self.replayed += 1
            yield Message(seq=seq, payload=payload)
        # The rest may still come: not as the answer to the next question.
        self._replay.close(linger=0)
        self._replay = self._dealer()

    def close(self) -> None:
        """Gives the sockets back."""
        self._sub.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)
        self._context.term()

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
