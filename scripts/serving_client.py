"""Clients for measuring the server, in a process of their own: standard library only.

Reads a line of JSON after the other: ``{"port": ..., "path": ..., "bodies": [...], "offsets":
[...]}``. Sends each body at its offset (seconds from a common moment) on a connection of its own
that is open already, and answers with the moments of each (``{"requests": [...]}``): when it was
sent and when the first and the last byte of its answer's body came, by ``time.perf_counter``, which
all processes of a machine share; with the seconds that the server says its engine took; and with
the processor time of all. Sockets without an event loop, and nothing parsed before the end: what a
client computes is taken from the server where they share cores.
"""

import dataclasses
import json
import selectors
import socket
import sys
import time
from typing import Any

HEAD = "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HEAD += "Content-Length: {size}\r\nConnection: close\r\n\r\n"
READ = 1 << 16
LEAD_S = 0.05
"""From connecting to offset 0, so that all are connected by then."""


@dataclasses.dataclass(kw_only=True)
class Exchange:
    """One request and its answer."""

    sock: socket.socket
    data: bytes
    at: float
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    answer: bytearray = dataclasses.field(default_factory=bytearray)

    def send(self) -> None:
        """Notes when."""
        self.sent = time.perf_counter()
        self.sock.sendall(self.data)

    def read(self) -> bool:
        """Takes what has come; False at the end."""
        data, now = self.sock.recv(READ), time.perf_counter()
        if not data:
            return False
        self.answer += data
        self.last = now
        if not self.first:
            _, end, body = self.answer.partition(b"\r\n\r\n")
            self.first = now if end and body else 0.0
        return True

    def told(self) -> dict[str, float | int]:
        """For whoever asked."""
        status = int(self.answer.split(b" ", 2)[1])
        engine = float(self.answer.rpartition(b'"engine_s":')[2].partition(b"}")[0] or 0)
        times = {"sent": self.sent, "first": self.first, "last": self.last}
        return {"status": status, "engine_s": engine, **times}


def connect(port: int, path: str, body: str, at: float) -> Exchange:
    """A connection, and what is to be sent on it."""
    data = body.encode()
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Exchange(sock=sock, data=HEAD.format(path=path, size=len(data)).encode() + data, at=at)


def ask_all(asked: dict[str, Any]) -> list[dict[str, float | int]]:
    """Sends each at its moment, and reads all to their ends."""
    began = time.perf_counter() + LEAD_S
    pairs = zip(asked["bodies"], asked["offsets"], strict=True)
    all_ = [
        connect(asked["port"], asked["path"], json.dumps(body), began + offset)
        for body, offset in pairs
    ]
    due, open_ = sorted(all_, key=lambda each: -each.at), len(all_)
    with selectors.DefaultSelector() as selector:
        while open_:
            while due and due[-1].at <= time.perf_counter():
                due[-1].send()
                selector.register(due[-1].sock, selectors.EVENT_READ, due.pop())
            wait = max(due[-1].at - time.perf_counter(), 0.0) if due else None
            for key, _ in selector.select(wait):
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    key.data.sock.close()
                    open_ -= 1
    return [each.told() for each in all_]


def main() -> None:
    """Answers line by line."""
    for line in sys.stdin:
        asked, told, began = json.loads(line), [], time.process_time()
        if "bodies" in asked:
            told = ask_all(asked)
        cpu = time.process_time() - began
        print(json.dumps({"requests": told, "cpu_s": cpu}), flush=True)


if __name__ == "__main__":
    main()
