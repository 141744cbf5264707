"""What every request passes before a route sees it: its size, its origin, its name, and errors that nobody expected."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from giveway.server.access import Caller
from giveway.server.http_errors import CLIENT_CLOSED, ApiError, error_body
from giveway.server.refused_body import pass_over, pieces_of

logger = logging.getLogger("giveway.server")

REQUEST_ID_HEADER = "X-Request-Id"
_PASS_OVER_BYTES, _PASS_OVER_S, _PAUSE_S = 64 << 20, 10.0, 1.0  # of a body that was refused
SAFE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})

OPEN_PATHS = frozenset({"/health", "/metrics", "/version", "/openapi.json"})  # as with vLLM's server

Seen = Callable[[str, int], None]  # route template and status of every answer


class Edge:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        body_timeout_s: float,
        identify: Callable[[str | None], Caller],
        max_http_requests: int | None = None,
        upload_paths: Collection[str] = (),
        allowed_hosts: Collection[str] | None = None,
        allowed_origins: Collection[str] = (),
        seen: Seen | None = None,
        rejected: Callable[[ApiError], None] | None = None,
    ) -> None:
        """Wrap an application.

        identify: who sends an `Authorization` header; raises ApiError 401. allowed_hosts: names in `Host`; None: any.
        upload_paths: whose bodies have a limit of their own. What a request passes on is `request.state.caller`.
        """
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._identify = identify
        self._upload_paths = frozenset(upload_paths)
        self._allowed_hosts = None if allowed_hosts is None else frozenset(allowed_hosts)
        self._allowed_origins = frozenset(allowed_origins)
        self._max_http_requests = max_http_requests
        self._num_open = 0
        self._seen = seen
        self._rejected = rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = headers.get(REQUEST_ID_HEADER, "")
        scope.setdefault("state", {})["request_id"] = name = name if SAFE_ID.fullmatch(name) else uuid.uuid4().hex
        status: int | None = None

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).setdefault(REQUEST_ID_HEADER, name)
            await send(message)

        self._num_open += 1
        try:
            self._check_sender(headers)
            if self._max_http_requests is not None and self._num_open > self._max_http_requests:
                raise _too_many(self._max_http_requests)
            if scope["path"] not in OPEN_PATHS:  # before the body is read: a stranger's is not
                scope["state"]["caller"] = self._identify(headers.get("authorization"))
            await self._check_length(scope["path"], headers, receive)
            await self._app(scope, self._bounded(scope, receive), send_named)
        except ApiError as error:  # from here: the routes' own are answered inside
            if self._rejected is not None:
                self._rejected(error)
            await _answer(send_named, error.status, error.body(), error.headers)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("request %s failed", name)
            if status is not None:
                raise  # too late for an answer: the connection is closed, and the client sees a broken one
            body = error_body(500, f"an internal error; the log has it as request {name}", code="internal_error")
            await _answer(send_named, 500, body, {})
        finally:
            self._num_open -= 1
            if self._seen is not None:
                self._seen(route_of(scope), status or CLIENT_CLOSED)

    def _check_sender(self, headers: Headers) -> None:
        """Keep web pages of strangers out: those that name another host, and those that come from another origin."""
        host = headers.get("host", "")
        if self._allowed_hosts is not None and _without_port(host) not in _LOCAL_NAMES | self._allowed_hosts:
            raise ApiError(
                403,
                f"host {host[:100]!r} is not served here: without API keys only local names are "
                "(--allowed-host adds one)",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and origin not in self._allowed_origins and urlsplit(origin).netloc != host:
            raise ApiError(
                403,
                f"web pages of {origin[:100]!r} may not ask here (--allowed-origin adds one)",
                code="origin_not_allowed",
            )

    async def _check_length(self, path: str, headers: Headers, receive: Receive) -> None:
        """Refuse a body that says itself that it is too large."""
        length = headers.get("content-length", "")
        if path in self._upload_paths or not length.isdigit() or int(length[:19]) <= self._max_body_bytes:
            return
        if headers.get("expect", "").lower() != "100-continue":  # who asks first has not sent anything yet
            await _pass_over(receive)
        raise _too_large(self._max_body_bytes)

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """Return a `receive` that refuses a body which is too large or too slow."""
        limit: int | None = None if scope["path"] in self._upload_paths else self._max_body_bytes
        has_all, num_bytes = False, 0
        clock = asyncio.get_running_loop().time
        end_s = clock() + self._body_timeout_s

        async def receive_bounded() -> Message:
            nonlocal has_all, num_bytes
            if has_all:
                return await receive()
            # An upload may take long, as long as something comes.
            left_s = self._body_timeout_s if limit is None else end_s - clock()
            try:
                async with asyncio.timeout(left_s):
                    message = await receive()
            except TimeoutError as error:
                late = f"the body has not come within {self._body_timeout_s:g} s (--body-timeout-s)"
                raise HTTPException(408, late, {"Connection": "close"}) from error
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                has_all = not message.get("more_body", False)
                if limit is not None and num_bytes > limit:
                    if not has_all:
                        await _pass_over(receive)
                    raise HTTPException(413, _too_large(limit).message, {"Connection": "close"})
            return message

        return receive_bounded


async def _pass_over(receive: Receive) -> None:
    await pass_over(pieces_of(receive), max_bytes=_PASS_OVER_BYTES, wait_s=_PASS_OVER_S, pause_s=_PAUSE_S)


def _too_many(limit: int) -> ApiError:
    return ApiError(
        503,
        f"{limit} HTTP requests are in progress, which is the limit (--max-http-requests)",
        code="too_many_requests",
        headers={"Retry-After": "1"},
    )


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has more than {limit} bytes (--max-body-size)",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def _without_port(host: str) -> str:
    """Return the name in a `Host` header: names have no case, and may end in a dot."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower().removesuffix(".")


def route_of(scope: Scope) -> str:
    """Return the template of the route that served a request; never the path itself, which is the client's."""
    route: Any = scope.get("route")
    return str(getattr(route, "path", "none"))


async def _answer(send: Send, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
    from starlette.responses import JSONResponse

    response = JSONResponse(body, status, headers)
    await send({"type": "http.response.start", "status": status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})
