"""Errors of the HTTP server, in OpenAI's shape.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Nothing in a message comes from another request, and none holds a key.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse, Response

INVALID, SERVER = "invalid_request_error", "server_error"


@dataclasses.dataclass(eq=False)
class ApiError(Exception):
    """What a client is told instead of a result."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    type: str = INVALID
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """As JSON. Names in a client's JSON may hold halves of characters: they are spelled out."""
        fields = {
            "message": _whole(self.message),
            "type": self.type,
            "param": None if self.param is None else _whole(self.param),
            "code": self.code,
        }
        return {"error": fields}

    def response(self) -> Response:
        """As a response."""
        return JSONResponse(self.body(), self.status, headers=dict(self.headers))


def _whole(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be answered as it is: 400."""
    return ApiError(400, message, code=code, param=param)


def unsupported(param: str, why: str) -> ApiError:
    """A parameter that would change the answer and that this server does not have: 400."""
    return invalid(f"{param} is not supported: {why}", param=param, code="unsupported_parameter")


def too_long(prompt: int, new: int, context: int, param: str) -> ApiError:
    """A prompt that does not fit with what is to follow it: 400."""
    return invalid(
        f"the prompt has {prompt} tokens and {new} are to follow, but the context of this model "
        f"is {context} tokens: shorten the prompt or ask for fewer tokens",
        param=param,
        code="context_length_exceeded",
    )


def too_large(most: int) -> ApiError:
    """A body beyond the limit: 413. The connection ends with it."""
    return ApiError(
        413,
        f"the request body is larger than {most} bytes, the limit of this server",
        code="request_too_large",
        headers={"connection": "close"},
    )


def busy(retry_after_s: int) -> ApiError:
    """The queue is full: 429."""
    return ApiError(
        429,
        f"too many requests are waiting: try again in {retry_after_s} s",
        code="rate_limit_exceeded",
        type="rate_limit_error",
        headers={"retry-after": str(retry_after_s)},
    )


def unavailable(message: str, code: str, *, retry_after_s: int | None = None) -> ApiError:
    """The engine is not there (yet, any more): 503."""
    headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    return ApiError(503, message, code=code, type=SERVER, headers=headers)


def internal(message: str) -> ApiError:
    """Something failed that is not the client's fault: 500."""
    return ApiError(500, message, code="internal_error", type=SERVER)
