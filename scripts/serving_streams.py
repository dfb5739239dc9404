"""Answers on their way to a client that may go away: then what it asked for is cancelled.

An answer begins once there is a token, so that what fails before has a status of its own; what
fails later is an event ``{"error": ...}``, after which nothing follows.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response
from serving_engine import Ticket
from serving_errors import ApiError
from serving_replies import Reply
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is given up when the client goes.

    Args:
      receive: of a request whose body was read.
      work: what is done.

    Raises:
      ClientDisconnect: the client is gone.
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole(receive: Receive, ticket: Ticket, reply: Reply) -> Response:
    """The answer in one piece.

    Raises:
      ApiError: it is none.
      ClientDisconnect: nobody waits for it.
    """

    async def collect() -> None:
        while new := await ticket.news():
            reply.take(new)

    try:
        await unless_gone(receive, collect())
    finally:
        ticket.cancel()
    return JSONResponse(reply.whole(), headers=reply.headers())


async def stream(receive: Receive, ticket: Ticket, reply: Reply, *, usage: bool) -> Response:
    """The answer as server-sent events.

    Args:
      receive: of the request.
      ticket: what was asked.
      reply: to fill.
      usage: whether the usage comes last.

    Raises:
      ApiError: there is no first token.
      ClientDisconnect: nobody waits for it.
    """
    try:
        first = await unless_gone(receive, ticket.news())
        reply.take(first)
    except BaseException:
        ticket.cancel()
        raise

    async def events() -> AsyncIterator[bytes]:
        """All events of a turn at once: one write to the socket."""
        new, chunks = first, reply.opening(usage=usage)
        try:
            while not ticket.ended:
                yield _events([*chunks, *reply.chunks(new, usage=usage)])
                chunks, new = [], await ticket.news()
                reply.take(new)
        except ApiError as error:
            yield _events([error.body()])
            return
        chunks += reply.chunks(new, usage=usage)
        yield _events([*chunks, reply.usage_chunk()] if usage else chunks) + DONE

    return EventResponse(ticket, events(), headers=reply.headers())


class EventResponse(Response):
    """Sends events while there are some and somebody listens."""

    media_type = "text/event-stream"

    def __init__(
        self, ticket: Ticket, events: AsyncIterator[bytes], headers: Mapping[str, str]
    ) -> None:
        """Of a stream.

        Args:
          ticket: cancelled when the client goes.
          events: to send.
          headers: beside those of a stream.
        """
        self.status_code, self.background = 200, None
        self._ticket, self._events = ticket, events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs until all is sent or the client is gone."""
        try:
            await unless_gone(receive, self._send(send))
        except ClientDisconnect:
            pass  # there is nobody to tell
        finally:
            self._ticket.cancel()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _events(chunks: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(f"data: {_JSON.encode(chunk)}\n\n" for chunk in chunks).encode()
