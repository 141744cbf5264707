"""A server that speaks OpenAI's protocol with delays that are known, and breaks it in every way that is asked for."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web

MODEL = "fake-model"


@dataclass(frozen=True, slots=True)
class Script:
    """How one request is answered."""

    first_s: float = 0.0  # before the first token
    gap_s: float = 0.0  # before each further one
    num_tokens: int | None = None  # None: max_tokens of the request
    tokens_per_event: int = 1
    has_usage: bool = True
    has_done: bool = True
    has_finish_reason: bool = True
    status: int = 200
    raw: tuple[bytes, ...] | None = None  # sent instead of everything, as it is
    breaks_after: int | None = None  # events, after which the connection is cut
    error_after: int | None = None  # events, after which an error event comes and the stream ends
    waits_for_seen: int = 0  # requests that the server must have seen before this one gets its first token
    hangs: bool = False  # after the first token, until the client goes away


Chooser = Callable[[int, dict[str, Any]], Script]


@dataclass(slots=True)
class Seen:
    """One request as the server saw it."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    is_cut: bool = False  # the client went away before the end


@dataclass(slots=True)
class FakeServer:
    """Runs in a thread of its own while entered."""

    choose: Chooser = lambda number, body: Script()
    ready_after: int = 0  # questions about readiness that are answered with 503
    seen: list[Seen] = field(default_factory=list)
    num_probes: int = 0
    url: str = ""
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    _stop: asyncio.Event | None = None

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)))
        self._thread.start()
        assert started.wait(30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._stop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [each.body for each in self.seen]

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        self.num_probes += 1
        if self.num_probes <= self.ready_after:
            return web.Response(status=503)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen = Seen(request.path, body, {name.lower(): value for name, value in request.headers.items()})
        self.seen.append(seen)
        script = self.choose(len(self.seen) - 1, body)
        try:
            return await self._play(request, body, script)
        except ConnectionResetError:
            seen.is_cut = True
            return web.Response()  # nobody reads it
        except asyncio.CancelledError:
            seen.is_cut = True
            raise

    async def _play(self, request: web.Request, body: dict[str, Any], script: Script) -> web.StreamResponse:
        if script.status != 200:
            return web.json_response({"error": {"message": f"no {script.status} today"}}, status=script.status)
        wanted = body["max_tokens"] if script.num_tokens is None else script.num_tokens
        usage = {"prompt_tokens": _num_prompt_tokens(body), "completion_tokens": wanted}
        if not body["stream"]:
            await asyncio.sleep(script.first_s)
            return web.json_response(_chunk(body, "x" * wanted, "length") | {"usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if script.raw is not None:
            for piece in script.raw:
                await response.write(piece)
                await asyncio.sleep(0)
            return response
        while len(self.seen) < script.waits_for_seen:
            await asyncio.sleep(0.001)
        num_events = -(-wanted // script.tokens_per_event)
        for number in range(num_events):
            if number == script.breaks_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            if number == script.error_after:
                await response.write(_event({"error": {"message": "the model fell over", "code": 500}}))
                return response
            await asyncio.sleep(script.gap_s if number else script.first_s)
            is_last = number == num_events - 1
            reason = "length" if is_last and script.has_finish_reason else None
            await response.write(_event(_chunk(body, "word ", reason)))
            if script.hangs:
                await asyncio.sleep(3600)
        if script.has_usage:
            await response.write(_event({"choices": [], "usage": usage}))
        if script.has_done:
            await response.write(b"data: [DONE]\n\n")
        return response


def _chunk(body: dict[str, Any], text: str, reason: str | None) -> dict[str, Any]:
    kind = "delta" if body["stream"] else "message"
    content = {kind: {"content": text}} if "messages" in body else {"text": text}
    return {"id": "x", "model": MODEL, "choices": [{"index": 0, "finish_reason": reason, **content}]}


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _num_prompt_tokens(body: dict[str, Any]) -> int:
    prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)
