"""From an open socket to the last answer: the HTTP server beside the engine, signals, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from giveway.engine.async_engine import AsyncEngine
from giveway.server.generation import GenerationDesk

logger = logging.getLogger("giveway.server")

EXIT_FAILED = 1
MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0  # for the head of a request, and for a connection that says nothing at all
_LAST_WORDS_S = 2.0  # for telling clients that their requests were ended
_CONNECTIONS_S = 5.0  # for connections to close
_LOOK_S = 0.2  # how often the engine and the drain are looked at
_SAME_SIGNAL_S = 0.5  # `timeout` signals the process and its group: one wish, told twice


class Jobs(Protocol):
    """Work that is kept over restarts: the Batch API."""

    async def start(self) -> None:
        """Go on with what an earlier server left."""

    async def stop(self) -> None:
        """Stop; what is under way runs again next time. Questions are still answered."""

    async def close(self) -> None:
        """Answer no questions any more."""


class Store(Protocol):
    """Where such work is kept."""

    def close(self) -> None:
        """Let another server have it."""


class PatientProtocol(HttpToolsProtocol):
    """HTTP/1.1, with limits on the size of a request's head and on how long a client may take over it."""

    _head_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._await_head()

    def on_message_begin(self) -> None:
        """Begin to wait for the rest of a head, also of a later request."""
        super().on_message_begin()
        self._num_head_bytes = 0
        self._await_head()

    def on_url(self, url: bytes) -> None:
        """Take in a part of the address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take in a header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head of the request is too large")  # uvicorn answers 400 and closes the connection

    def on_headers_complete(self) -> None:
        """Stop waiting."""
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._stop_waiting()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _HttpServer(uvicorn.Server):
    """uvicorn's server, without its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `Lifecycle`."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that owns an address and does not listen yet. port: 0 for any that is free. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def address_of(sock: socket.socket) -> str:
    """Return the address of a listening socket as a URL."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Lifecycle:
    """Runs the server until a signal or a failure of the engine ends it."""

    def __init__(
        self,
        app: ASGIApp,
        engine: AsyncEngine,
        desk: GenerationDesk,
        jobs: Jobs | None,
        store: Store | None,
        *,
        drain_timeout_s: float,
    ) -> None:
        """drain_timeout_s: for requests in progress when the server is told to end."""
        self._engine = engine
        self._desk = desk
        self._jobs = jobs
        self._store = store
        self._drain_timeout_s = drain_timeout_s
        self._is_ending = asyncio.Event()
        self._is_hurried = asyncio.Event()
        self._first_signal_s: float | None = None  # of the loop's clock
        self._server = _HttpServer(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                http=PatientProtocol,
                ws="none",
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(_CONNECTIONS_S),
                h11_max_incomplete_event_size=64 << 10,
            )
        )

    async def run(self, sock: socket.socket, ready: Callable[[], None]) -> int:
        """Serve; return the exit code. ready: called when requests are answered."""
        with self._signals():
            serving = asyncio.ensure_future(self._server.serve(sockets=[sock]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.005)
            if self._jobs is not None:
                await self._jobs.start()
            gc.collect()
            gc.freeze()  # the model and the libraries are here to stay: no later collection need look at them
            if self._server.started:
                ready()
            code = await self._until_end(serving)
            await self._drain()
            self._server.should_exit = True
            await serving
            if self._jobs is not None:
                await self._jobs.close()
        await self._engine.close()
        if self._store is not None:
            self._store.close()
        gc.unfreeze()  # the last collection must see everything, or the kernels complain of leaks
        return code

    def end(self) -> None:
        """Stop taking requests, and end when those in progress have; told twice, end them at once."""
        if self._is_ending.is_set():
            self._is_hurried.set()
        self._is_ending.set()

    def take_signal(self) -> None:
        """End as `end` does; a second signal that comes with the first is the same one told twice."""
        now_s = asyncio.get_running_loop().time()
        if self._first_signal_s is None:
            self._first_signal_s = now_s
        elif now_s - self._first_signal_s < _SAME_SIGNAL_S:
            return
        self.end()

    def _signals(self) -> AbstractContextManager[None]:
        if threading.current_thread() is not threading.main_thread():
            return contextlib.nullcontext()  # signals reach the main thread alone
        return _handling((signal.SIGTERM, signal.SIGINT), self.take_signal)

    async def _until_end(self, serving: asyncio.Future[Any]) -> int:
        while not self._is_ending.is_set():
            if not self._engine.is_running:
                logger.critical("the engine has stopped: %r; the server ends", self._engine.failure)
                self._is_hurried.set()
                return EXIT_FAILED
            if serving.done():
                return EXIT_FAILED
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_ending.wait(), _LOOK_S)
        return 0

    async def _drain(self) -> None:
        """Let requests in progress end, up to the time limit; batch work stops at once and is kept."""
        self._desk.is_draining = True
        logger.info("no requests are taken any more; %d are in progress", self._desk.num_open)
        if self._jobs is not None:
            await self._jobs.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._until_empty(), self._drain_timeout_s)
        if self._desk.num_open:
            logger.warning("%d requests are ended before they are complete", self._desk.num_open)
            self._desk.end_all()
            self._is_hurried.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._until_empty(), _LAST_WORDS_S)

    async def _until_empty(self) -> None:
        while self._desk.num_open and not self._is_hurried.is_set():
            await asyncio.sleep(_LOOK_S / 4)


@contextlib.contextmanager
def _handling(signals: tuple[signal.Signals, ...], handler: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for each in signals:
        loop.add_signal_handler(each, handler)
    try:
        yield
    finally:
        for each in signals:
            loop.remove_signal_handler(each)


def raise_file_limit() -> None:
    """Allow this process as many open files, and so connections, as the system lets it have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 1 << 20
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
