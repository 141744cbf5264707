"""A server that runs in this process, on a free port of loopback, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx2 as httpx
import openai

from giveway.build import BuiltEngine, build_engine
from giveway.build_server import BuiltServer, ServerOptions, build_server
from giveway.engine.engine import Engine
from giveway.options import EngineOptions
from giveway.server.access import Caller, Keyring
from giveway.server.lifecycle import address_of, bind
from giveway.server.settings import ServerLimits

ANY_TIME_S = 240.0  # nothing here takes so long, on the busiest machine, unless it hangs


class Running:
    """A server under test."""

    def __init__(
        self, built: BuiltEngine, options: ServerOptions, keyring: Keyring, send_buffer_bytes: int | None
    ) -> None:
        self.built = built
        self._options = options
        self._keyring = keyring
        self._sock = bind("127.0.0.1", 0)
        if send_buffer_bytes is not None:  # connections have it from the socket that they come from
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        self.url = address_of(self._sock)
        self._is_ready = threading.Event()
        self.server: BuiltServer
        self.loop: asyncio.AbstractEventLoop
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_ready.wait(ANY_TIME_S), "the server did not start"

    def _run(self) -> None:
        async def main() -> int:
            self.loop = asyncio.get_running_loop()
            self.server = build_server(self.built, self._options, self._keyring, default_priority=10)
            return await self.server.lifecycle.run(self._sock, self._is_ready.set)

        try:
            self.exit_code = asyncio.run(main())
        finally:
            self._is_ready.set()

    @property
    def engine(self) -> Engine:
        """The engine behind it; for looking."""
        return self.built.engine

    def end(self) -> None:
        """Tell it to end, as SIGTERM does."""
        self.loop.call_soon_threadsafe(self.server.lifecycle.end)

    def close(self) -> None:
        """End it, at once if need be, and wait until it has."""
        if self._thread.is_alive():
            self.end()
            self.end()
        self.wait()

    def wait(self) -> None:
        """Wait until it has ended."""
        self._thread.join(ANY_TIME_S)
        assert not self._thread.is_alive(), "the server did not end"
        self._sock.close()

    def client(self, key: str = "unused") -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=ANY_TIME_S)

    def async_client(self, key: str = "unused") -> openai.AsyncOpenAI:
        """The official client for asyncio."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=ANY_TIME_S)

    def post(self, path: str, body: Any = None, **settings: Any) -> httpx.Response:
        """Send JSON, and look at the answer as it is."""
        if body is not None:
            settings["json"] = body
        return httpx.post(f"{self.url}{path}", timeout=ANY_TIME_S, **settings)

    def get(self, path: str, **settings: Any) -> httpx.Response:
        """Ask for something."""
        return httpx.get(f"{self.url}{path}", timeout=ANY_TIME_S, **settings)

    def until_idle(self) -> None:
        """Wait until nobody is served, and check that nothing is held."""
        wait_until(lambda: not self.engine.num_unfinished and not self.engine.has_work, "requests are left behind")
        state = self.engine.scheduler.state
        assert state.kv.device.num_owned == 0
        assert not state.kv.tables
        assert not state.kv.parked
        assert not state.kv.kept

    def wait_for_step(self) -> None:
        """Wait until one more step has been made."""
        before = self.engine.scheduler.state.next_step_id
        wait_until(lambda: self.engine.scheduler.state.next_step_id > before, "no step is made")


def wait_until(condition: Any, what: str) -> None:
    """Wait until something is so."""
    end_s = time.monotonic() + ANY_TIME_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.002)


@contextmanager
def running(
    *,
    keys: Sequence[tuple[str, Caller]] = (),
    step_s: float = 0.0,
    limits: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    send_buffer_bytes: int | None = None,
    **engine: Any,
) -> Iterator[Running]:
    """Run a server on the dry run, or on what `engine` says.

    step_s: how long its steps take at least. send_buffer_bytes: what the system keeps of a stream for a slow reader.
    """
    options = EngineOptions(**{"device": "dry", "check_invariants": True, **engine})
    built = build_engine(options)
    if step_s:
        built.engine.add_listener(lambda *_: time.sleep(step_s))
    settings = ServerOptions(
        limits=replace(ServerLimits(), **(limits or {})), **{"has_batch_api": False, **(server or {})}
    )
    served = Running(built, settings, Keyring(keys), send_buffer_bytes)
    try:
        yield served
    finally:
        served.close()


def events_of(response: httpx.Response) -> list[Any]:
    """Return the events of a stream that was read to its end, without the last word."""
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[len("data: ") :]) for line in lines[:-1]]
