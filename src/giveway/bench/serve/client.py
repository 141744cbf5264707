"""One request against the server: sent, its answer read, and the moment of every token noted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from giveway.bench.serve.answer_parts import UnreadableAnswerError, as_detail, read_part
from giveway.bench.serve.records import FailureKind, RequestFailure, Sighting
from giveway.bench.serve.server_events import EventParser, EventTooLongError, ServerEvent
from giveway.bench.serve.workload import PlannedRequest
from giveway.core.errors import TargetServerError

_MAX_ANSWER_BYTES = 64 << 20  # of a whole answer
_MAX_ERROR_BYTES = 16 << 10  # read of an error's body
_KEEP_ALIVE_S = 4.0  # less than the 5 s after which common servers close an idle connection: no race with them
_CONNECT_S = 30.0
_AFTER_END_S = 0.2  # for the last bytes behind [DONE], so that the connection can be used again
_PROBE_S = 5.0
_PROBE_PAUSE_S = 0.5
_DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Target:
    """The server and how to speak to it."""

    base_url: str  # without a slash at its end
    endpoint: str  # such as /v1/completions
    headers: Mapping[str, str]
    silence_s: float = 3600.0  # without a byte, after which a request has failed
    verifies_certificate: bool = True

    @property
    def is_chat(self) -> bool:
        """Return whether the endpoint takes messages instead of a prompt."""
        return "/chat/" in self.endpoint

    def url(self, path: str) -> str:
        """Return the address of a path. A base that ends in /v1 has that part of the path already."""
        base = self.base_url.rstrip("/")
        return base + (path.removeprefix("/v1") if base.endswith("/v1") else path)


class Client:
    """Sends requests over connections that are kept open."""

    def __init__(self, target: Target, session: aiohttp.ClientSession, now_s: Callable[[], float]) -> None:
        self._target = target
        self._session = session
        self._now_s = now_s
        self._url = target.url(target.endpoint)

    async def exchange(self, request: PlannedRequest, sighting: Sighting) -> None:
        """Send a request and read its answer to the end. Writes what it sees; raises RequestFailure."""
        headers = {"Content-Type": "application/json", "X-Request-Id": request.name}
        sighting.sent_s = self._now_s()
        has_answer = False
        try:
            async with self._session.post(
                self._url, data=request.body, headers=headers, allow_redirects=False
            ) as response:
                has_answer = True
                if response.status != 200:
                    detail = as_detail(await _read_at_most(response, _MAX_ERROR_BYTES))
                    raise RequestFailure(FailureKind.STATUS, detail, response.status)
                if request.is_streamed and response.content_type != "application/json":
                    await self._read_stream(response, sighting)
                else:
                    await self._read_whole(response, sighting)
        except TimeoutError:
            raise RequestFailure(FailureKind.TIMEOUT, f"nothing came for {self._target.silence_s:g} s") from None
        except (EventTooLongError, UnreadableAnswerError) as error:
            raise RequestFailure(FailureKind.BROKEN_STREAM, str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            is_lost = isinstance(error, aiohttp.ClientConnectionError | OSError) and not has_answer
            kind = FailureKind.CONNECTION if is_lost else FailureKind.BROKEN_STREAM
            raise RequestFailure(kind, as_detail(str(error) or type(error).__name__)) from error
        if not sighting.has_tokens:
            raise RequestFailure(FailureKind.EMPTY_ANSWER, "the answer ended without a token")

    async def _read_stream(self, response: aiohttp.ClientResponse, sighting: Sighting) -> None:
        parser = EventParser()
        async for piece in response.content.iter_any():
            now_s = self._now_s()
            if self._take(parser.feed(piece), sighting, now_s):
                with suppress(TimeoutError, aiohttp.ClientError, OSError):
                    async with asyncio.timeout(_AFTER_END_S):
                        await _read_at_most(response, _MAX_ERROR_BYTES)
                return
        now_s = self._now_s()
        if not self._take(parser.finish(), sighting, now_s):
            if not sighting.has_end:
                raise RequestFailure(FailureKind.BROKEN_STREAM, "the stream ended without a finish reason")
            sighting.end_s = now_s

    def _take(self, events: list[ServerEvent], sighting: Sighting, now_s: float) -> bool:
        """Note what events say; return whether the last one of the stream was among them."""
        for event in events:
            if event.data.strip() == _DONE:
                sighting.end_s = now_s
                return True
            part = read_part(event.data, is_error=event.kind == "error")
            if part.error is not None:
                raise RequestFailure(FailureKind.ERROR_EVENT, part.error)
            sighting.see(part, now_s)
        return False

    async def _read_whole(self, response: aiohttp.ClientResponse, sighting: Sighting) -> None:
        content = await _read_at_most(response, _MAX_ANSWER_BYTES + 1)
        now_s = self._now_s()
        if len(content) > _MAX_ANSWER_BYTES:
            raise UnreadableAnswerError(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
        part = read_part(content)
        if part.error is not None:
            raise RequestFailure(FailureKind.ERROR_EVENT, part.error)
        sighting.see(part, now_s)
        sighting.end_s = now_s


async def _read_at_most(response: aiohttp.ClientResponse, limit: int) -> bytes:
    content = bytearray()
    async for piece in response.content.iter_any():
        content += piece
        if len(content) >= limit:
            break
    return bytes(content[:limit])


@asynccontextmanager
async def connect(target: Target, now_s: Callable[[], float]) -> AsyncIterator[Client]:
    """Open a client, and close its connections at the end."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=target.verifies_certificate),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=target.silence_s),
        headers={"Accept-Encoding": "identity", **target.headers},  # compressing would hold tokens back
    ) as session:
        yield Client(target, session, now_s)


# Before the run


async def wait_until_ready(target: Target, *, timeout_s: float, now_s: Callable[[], float]) -> None:
    """Return as soon as the server answers on /v1/models, or /health. Raises TargetServerError at the timeout.

    A server that refuses the question or knows neither path is there: whether it takes requests, they will show.
    """
    ends_s = now_s() + timeout_s
    while True:
        problem = await _find_problem(target)
        if problem is None:
            return
        if now_s() >= ends_s:
            raise TargetServerError(
                f"{target.base_url} is not ready after {timeout_s:g} s: {problem}. Start the server, name another with "
                "--base-url, or wait longer with --ready-check-timeout-sec."
            )
        await asyncio.sleep(_PROBE_PAUSE_S)


async def first_model(target: Target) -> str:
    """Return the first model that the server lists. Raises TargetServerError if it lists none."""
    problem = "no model in its answer"
    try:
        async with _probing(target) as session, session.get(target.url("/v1/models")) as response:
            content = await _read_at_most(response, _MAX_ANSWER_BYTES)
            if response.status == 200:
                models = json.loads(content)["data"]
                name = models[0]["id"]
                if isinstance(name, str):
                    return name
            else:
                problem = f"status {response.status}: {as_detail(content)}"
    except (aiohttp.ClientError, OSError) as error:
        problem = as_detail(str(error) or type(error).__name__)
    except (ValueError, LookupError, TypeError, RecursionError):
        problem = f"no list of models: {as_detail(content)}"
    raise TargetServerError(f"{target.url('/v1/models')}: {problem}. Name the model with --model.")


async def _find_problem(target: Target) -> str | None:
    """Return why the server is not ready; None: it is. /health decides where there is no /v1/models."""
    problem = ""
    for path in ("/v1/models", "/health"):
        try:
            async with _probing(target) as session, session.get(target.url(path)) as response:
                if response.status == 404:
                    continue
                return None if response.status < 500 else f"status {response.status} for {path}"
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            problem = as_detail(str(error) or type(error).__name__)
    return problem or None


@asynccontextmanager
async def _probing(target: Target) -> AsyncIterator[aiohttp.ClientSession]:
    """Open connections of their own: none is left behind that the first request would find open or closed."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=target.verifies_certificate),
        timeout=aiohttp.ClientTimeout(total=_PROBE_S),
        headers=target.headers,
    ) as session:
        yield session


def check_headers(headers: Mapping[str, Any]) -> None:
    """Refuse what HTTP cannot carry, before it breaks every request. Raises ValueError; a value is never shown."""
    for name, value in headers.items():
        if not name or not all(33 <= ord(letter) < 127 and letter != ":" for letter in name):
            raise ValueError(f"header name {name!r}: printable ASCII without blanks and colons is needed")
        if not all(letter.isprintable() for letter in value):
            raise ValueError(f"header {name}: its value holds a character that cannot be sent")
