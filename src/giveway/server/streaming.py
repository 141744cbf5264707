"""Answers over HTTP to clients that may leave at any moment: event streams, and single answers watched over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from giveway.server.generation import ClientGoneError
from giveway.server.http_errors import ApiError

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_Value = TypeVar("_Value")


def event(body: Mapping[str, Any]) -> bytes:
    """Return one server-sent event with JSON in it."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed its connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _Value]) -> _Value:
    """Return what `work` returns; the moment that the client goes away it is cancelled, and ClientGoneError raised."""
    worker, watcher = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientGoneError("the client has closed its connection")
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


class EventStream(Response):
    """A stream of events. What it is made from is freed at its end, and at once when the client goes away."""

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[bytes], holding: AsyncExitStack, headers: Mapping[str, str] | None = None
    ) -> None:
        """chunks: whole events, or comments; an ApiError raised by it is told to the client as an event.

        holding: closed at the end, with the error if there was one. An iterator that waits long must yield KEEP_ALIVE.
        """
        self.status_code = 200
        self.background = None
        self._chunks = chunks
        self._holding = holding
        # Proxies must neither store a stream nor collect it.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        del scope
        try:
            async with self._holding:
                await unless_gone(receive, self._send_all(send))
        except ClientGoneError:
            return
        except ApiError as error:
            await _send(send, event(error.body()))
        await _send(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await _send(send, chunk)


async def _send(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})


def events(bodies: Iterable[Mapping[str, Any]]) -> bytes:
    """Return several events as one piece: one write for all that a step gave."""
    return b"".join(map(event, bodies))
