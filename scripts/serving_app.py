"""The HTTP server: routes, limits, and errors in one shape.

    Host --> key --> ready --> body, at most so large --> Body --> requests --> Ticket --> answer

Every refusal comes before anything reaches the engine. ``/health`` and ``/metrics`` take no key:
they tell counts, no text and no names.
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
import time
from collections.abc import AsyncIterator

import serving_errors
import serving_streams
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from serving_engine import EngineThread, State
from serving_errors import ApiError
from serving_prompts import Served, requests
from serving_replies import Head, Reply, TokenNames
from serving_schema import Body, ChatBody, CompletionBody, read_json
from serving_tenants import Keys
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

DISCARDED = 4
"""Times the limit that is read of a body that is too large, so that its sender hears of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Limits of the server."""

    max_body_bytes: int = 8 << 20
    body_s: float = 30.0
    """Seconds in which a body has to arrive."""
    close_s: float = 30.0
    """Seconds in which what was published is stored at the end."""
    hosts: frozenset[str] | None = None
    """Names that the Host header may have, beside this machine's own; None for any. Capitals and
    ports do not count."""


class Api:
    """The handlers of all routes."""

    def __init__(
        self, served: Served, keys: Keys, thread: EngineThread, options: ServerOptions
    ) -> None:
        self._served, self._keys, self._thread, self._options = served, keys, thread, options
        self._names, self._created = TokenNames(served.text), int(time.time())

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        return await self._answer(request, CompletionBody)

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        return await self._answer(request, ChatBody)

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        self._keys.namespace(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{name}``."""
        self._keys.namespace(request.headers.get("authorization"))
        self._require_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        """``GET /health``: 200 once requests are taken; where a rollout stands."""
        state, backend = self._thread.state, self._thread.backend
        told = {"status": "ok" if state is State.READY else state.value}
        told |= {} if backend is None else backend.health()
        return JSONResponse(told, 200 if state is State.READY else 503)

    async def metrics(self, request: Request) -> Response:
        """``GET /metrics``, in Prometheus' text format."""
        try:
            from hybridkv.observe import prometheus
        except ImportError as error:
            raise ApiError(501, str(error), type=serving_errors.SERVER) from error
        backend = self._thread.backend
        if backend is None:
            self._thread.require_ready()
        assert backend is not None
        try:
            page = await asyncio.to_thread(backend.page)
        except TimeoutError as error:
            raise serving_errors.unavailable(str(error), "not_ready", retry_after_s=1) from error
        return Response(page, media_type=prometheus.CONTENT_TYPE)

    async def _answer(self, request: Request, kind: type[Body]) -> Response:
        namespace = self._keys.namespace(request.headers.get("authorization"))
        self._thread.require_ready()
        content = await self._read(request)
        body = kind.parse(read_json(content))
        self._require_model(body.model)
        asked = await requests(self._served, body, namespace, size=len(content))
        reply = Reply(
            Head(chat=kind is ChatBody, model=self._served.name, fingerprint=self._fingerprint),
            self._names,
            choices=len(asked) * body.n,
            samples=body.n,
            logprobs=body.top() is not None,
        )
        ticket = self._thread.submit(asked, every_piece=body.stream)
        if not body.stream:
            return await serving_streams.whole(request.receive, ticket, reply)
        usage = body.usage_chunk
        return await serving_streams.stream(request.receive, ticket, reply, usage=usage)

    async def _read(self, request: Request) -> bytes:
        """The body, if it is JSON by its type, not too large, and there in time."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # pages of other origins can send this type to nobody
            raise ApiError(415, "send the body as Content-Type: application/json")
        most, size, parts = self._options.max_body_bytes, 0, []
        declared = request.headers.get("content-length", "")
        waits = "expect" in request.headers
        if declared.isdecimal() and int(declared) > most * (1 if waits else DISCARDED):
            raise serving_errors.too_large(most)
        try:
            async with asyncio.timeout(self._options.body_s):
                async for part in request.stream():
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                    elif size > most * DISCARDED:
                        break
        except TimeoutError:
            headers = {"connection": "close"}
            raise ApiError(408, "the body did not arrive in time", headers=headers) from None
        if size > most:
            raise serving_errors.too_large(most)
        return b"".join(parts)

    def _require_model(self, name: str) -> None:
        if name != self._served.name:
            raise ApiError(
                404,
                f"there is no model {name!r} here: this server has {self._served.name!r}",
                code="model_not_found",
                param="model",
            )

    def _model(self) -> dict[str, object]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "hybridkv",
            "max_model_len": self._served.context,
        }

    @property
    def _fingerprint(self) -> str:
        assert self._thread.backend is not None  # it was ready
        return self._thread.backend.fingerprint


def make_app(
    served: Served, keys: Keys, thread: EngineThread, options: ServerOptions = ServerOptions()
) -> FastAPI:
    """The application. Its start starts the engine's thread; its end closes the engine.

    Args:
      served: the model.
      keys: who may ask.
      thread: runs the engine.
      options: limits.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        thread.start()
        yield
        await asyncio.to_thread(lambda: thread.close(timeout_s=options.close_s))

    app = FastAPI(openapi_url=None, lifespan=lifespan)
    api = Api(served, keys, thread, options)
    # Plain routes: bodies are read and checked here, so that there is nothing to inject.
    app.add_route("/v1/completions", api.completions, methods=["POST"])
    app.add_route("/v1/chat/completions", api.chat, methods=["POST"])
    app.add_route("/v1/models", api.models, methods=["GET"])
    app.add_route("/v1/models/{name:path}", api.model, methods=["GET"])
    app.add_route("/health", api.health, methods=["GET"])
    app.add_route("/metrics", api.metrics, methods=["GET"])
    app.add_exception_handler(ApiError, _told)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(ClientDisconnect, _nobody)
    app.add_exception_handler(Exception, _failed)
    if options.hosts is not None:
        app.add_middleware(HostCheck, hosts=options.hosts)
    return app


class HostCheck:
    """Refuses requests that came to this machine under another name.

    A page in a browser can make its own name point here, and then read what this server says; its
    requests still carry that name.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app, self._hosts = app, frozenset(map(_host_name, hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what may come in."""
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if not self._knows(_host_name(given)):
                error = ApiError(403, f"this server does not answer to {given!r}: see --allow-host")
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, name: str) -> bool:
        if name == "localhost" or name in self._hosts:
            return True
        return is_loopback(name)


def is_loopback(host: str) -> bool:
    """Whether an address, or ``localhost``, is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(host: str) -> str:
    """The name in a Host header, or in an option: small letters, no port and no brackets."""
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:  # an option may be an IPv6 address without brackets
        host = host.partition(":")[0]
    return host.lower()


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = f"{request.method} {request.url.path}: {error.detail}"
    headers = dict(error.headers or {})
    return ApiError(error.status_code, words, code="unknown_url", headers=headers).response()


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _failed(request: Request, error: Exception) -> Response:
    return serving_errors.internal("the server failed on this request").response()
