"""How HTTP is read: by httptools where it is installed, which takes less time, else by h11.

httptools reads heads of any size; here they have h11's limit, so that nobody fills memory with one.
"""

import asyncio

MOST_HEAD_BYTES = 64 << 10
"""Of a request's head, beyond what one read from the socket brings."""


def http_protocol() -> type[asyncio.Protocol] | str:
    """As uvicorn takes it."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class BoundedHead(HttpToolsProtocol):
        """Ends a connection whose request's head does not end."""

        head: int | None = None
        """Bytes of a head that has not ended; None within a body and between two requests."""

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.head = 0

        def on_headers_complete(self) -> None:
            self.head = None
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            began = self.head is not None
            super().data_received(data)
            if self.head is None:
                return
            self.head += len(data) if began else 0
            if self.head > MOST_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too large.")

    return BoundedHead


def event_loop() -> str:
    """The name of uvloop where it is installed, else asyncio's; uvloop writes once an iteration."""
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return "asyncio"
    return "uvloop"
