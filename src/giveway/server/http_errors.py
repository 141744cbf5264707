"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}` with a status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

CLIENT_CLOSED = 499  # what nginx logs for a client that went away; nobody sees this answer

# What the type of an error is called, by status.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_MAX_MESSAGE_CHARACTERS = 2000


class ApiError(Exception):
    """An answer that is an error; raised anywhere below a route."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Make an error. param: the field that is wrong, such as `messages.0.role`. code: a word for programs."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return error_body(self.status, self.message, param=self.param, code=self.code)


def shutting_down() -> ApiError:
    """Return the answer to whoever wants something new from a server that ends."""
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "10"})


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's shape; text that no encoding can carry is shown with escapes."""
    shown = message.encode("utf-8", "backslashreplace").decode()
    if len(shown) > _MAX_MESSAGE_CHARACTERS:
        shown = shown[: _MAX_MESSAGE_CHARACTERS - 3] + "..."
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    field = None if param is None else param.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": shown, "type": kind, "param": field, "code": code}}


async def answer_api_error(request: Request, error: Exception) -> JSONResponse:
    """Handle an ApiError that a route raised."""
    del request
    if not isinstance(error, ApiError):
        raise error
    return JSONResponse(error.body(), error.status, error.headers)
