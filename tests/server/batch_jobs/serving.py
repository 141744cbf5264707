"""The Batch API alone behind uvicorn on a port of its own, with an engine that echoes."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from openai import OpenAI

from giveway.server.batch_jobs.jobs import BatchJobs, RunLine
from giveway.server.batch_jobs.limits import BatchLimits
from giveway.server.batch_jobs.records import BatchLine, LineAnswer
from giveway.server.batch_jobs.router import batch_router
from giveway.server.batch_jobs.store import BatchStore
from giveway.server.http_errors import ApiError, answer_api_error
from tests.server.batch_jobs.sample_lines import CHAT, answer_of, lines_of


async def echo(line: BatchLine) -> LineAnswer:
    return answer_of(line)


def owner_of(request: Request) -> str:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    if kind != "Bearer" or not key:
        raise ApiError(401, "a key is needed")
    return key


@dataclass(frozen=True, slots=True)
class Served:
    """A running server, from the outside."""

    url: str
    jobs: BatchJobs
    loop: asyncio.AbstractEventLoop

    def client(self, key: str = "alice") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=240)

    def call(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run something in the server's event loop."""

        async def run() -> Any:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)


@contextmanager
def serving(
    data_dir: Path,
    run_line: RunLine = echo,
    *,
    limits: BatchLimits | None = None,
    max_outstanding: int = 4,
    clock: Callable[[], float] = time.time,
) -> Iterator[Served]:
    """Serve until the block ends; then the server is stopped gracefully, by its own handle."""
    loops: list[asyncio.AbstractEventLoop] = []
    with BatchStore(data_dir, limits, clock=clock) as store:
        jobs = BatchJobs(
            store, run_line, max_outstanding=max_outstanding, tick_s=0.05, first_pause_s=0.01, longest_pause_s=0.05
        )

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            loops.append(asyncio.get_running_loop())
            async with jobs:
                yield

        app = FastAPI(lifespan=lifespan)
        app.add_exception_handler(ApiError, answer_api_error)
        app.include_router(batch_router(jobs, owner_of))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            try:
                until(lambda: server.started or not thread.is_alive())
                assert server.started
                yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", jobs, loops[0])
            finally:
                server.should_exit = True
                thread.join()


def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so. The time at which it gives up is far beyond any machine's pace."""
    end_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end_s, "it does not happen"
        time.sleep(0.005)


def until_ended(client: OpenAI, batch_id: str) -> Any:
    """Wait for the end of a batch and return it."""
    ended = ("completed", "failed", "expired", "cancelled")
    until(lambda: client.batches.retrieve(batch_id).status in ended)
    return client.batches.retrieve(batch_id)


def num_completed(client: OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def create_batch(client: OpenAI, content: bytes, window: str = "24h", **options: Any) -> Any:
    """Upload an input and create a batch with it."""
    source = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=source.id,
        endpoint=CHAT,
        completion_window=window,  # type: ignore[arg-type]  # the official types know of 24h alone
        **options,
    )


def content_of(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of a file; none if there is no file."""
    return [] if file_id is None else lines_of(client.files.content(file_id).content)
