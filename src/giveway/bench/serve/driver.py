"""Sends every request at its moment, keeps closed loops full, and ends what is left when the run is over."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from giveway.bench.serve.records import Outcome, RequestFailure, RequestRecord, Sighting
from giveway.bench.serve.workload import PlannedRequest, Source

PAUSE_AFTER_FAILURE_S = 0.5  # of a place in a closed loop: a server that refuses is not asked again at once

_MAX_AHEAD_REQUESTS = 512
_MAX_AHEAD_BYTES = 32 << 20
_SPARE_S = 0.005  # until the next request is due: time to prepare another


class Exchange(Protocol):
    """Whoever sends one request."""

    async def exchange(self, request: PlannedRequest, sighting: Sighting) -> None:
        """Send it and write what is seen; raise RequestFailure."""


class Watcher(Protocol):
    """Whoever is told how a run goes."""

    def began(self, request: PlannedRequest) -> None:
        """Hear of a request that is due now."""

    def ended(self, record: RequestRecord) -> None:
        """Hear of a request that is over."""


class NoWatcher:
    """Is told and does nothing."""

    def began(self, request: PlannedRequest) -> None:
        """Do nothing."""

    def ended(self, record: RequestRecord) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a run gave."""

    started_s: float
    ended_s: float  # from here on, whoever was left was cut off
    records: tuple[RequestRecord, ...]  # in the order in which they ended
    is_interrupted: bool  # ended from outside, before its time


class _Ahead:
    """Requests prepared before their moment: making a long prompt takes milliseconds that nobody may wait for."""

    def __init__(self, requests: Iterator[PlannedRequest]) -> None:
        self._requests = requests
        self._ready: deque[PlannedRequest] = deque()
        self._num_bytes = 0

    def prepare_one(self) -> bool:
        """Make one more, if there is room; return whether it was made."""
        if len(self._ready) >= _MAX_AHEAD_REQUESTS or self._num_bytes >= _MAX_AHEAD_BYTES:
            return False
        request = next(self._requests, None)
        if request is None:
            return False
        self._ready.append(request)
        self._num_bytes += len(request.body)
        return True

    def prepare(self, number: int = _MAX_AHEAD_REQUESTS) -> None:
        """Make so many, before the run."""
        for _ in range(number):
            if not self.prepare_one():
                return

    def pop(self) -> PlannedRequest | None:
        """Return the next; None: there are no more."""
        if not self._ready and not self.prepare_one():
            return None
        request = self._ready.popleft()
        self._num_bytes -= len(request.body)
        return request


class Driver:
    """One run of sources against one server."""

    def __init__(
        self,
        client: Exchange,
        now_s: Callable[[], float],
        *,
        max_concurrency: int | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        """max_concurrency: requests of open loops under way at the same time; None: no limit."""
        self._client = client
        self._now_s = now_s
        self._places = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._watcher = watcher or NoWatcher()
        self._records: list[RequestRecord] = []
        self._started_s = 0.0
        self._duration_s: float | None = None

    async def run(self, sources: Sequence[Source], *, duration_s: float | None, stop: asyncio.Event) -> Run:
        """Send everything; return when all but the endless sources are done, or `stop` is set.

        duration_s: how long endless sources run where there are no others; closed loops with a number of requests begin
        none later. None: no such limit.
        """
        self._duration_s = duration_s
        ahead = [_Ahead(source.requests) for source in sources]
        for each in ahead:
            each.prepare()
        self._started_s = self._now_s()
        pairs = list(zip(sources, ahead, strict=True))
        endless = [asyncio.create_task(self._serve(*pair)) for pair in pairs if pair[0].is_endless]
        others = [asyncio.create_task(self._serve(*pair)) for pair in pairs if not pair[0].is_endless]
        end = asyncio.create_task(_all_of(others) if others else asyncio.sleep(duration_s or 0.0))
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([end, stopped, *endless], return_when=asyncio.FIRST_COMPLETED)
            ended_s = self._now_s()
        finally:
            for task in (end, stopped, *endless, *others):
                task.cancel()
            await asyncio.gather(end, stopped, *endless, *others, return_exceptions=True)
        for task in done:
            task.result()  # what is raised here is a bug, or a trace that has changed since it was looked through
        return Run(self._started_s, ended_s, tuple(self._records), is_interrupted=stopped in done and end not in done)

    async def warm_up(self, requests: Iterator[PlannedRequest]) -> list[RequestRecord]:
        """Send requests one after another, before the run; return their records, which are not part of it."""
        for request in requests:
            await self._one(request, self._now_s())
        records, self._records = self._records, []
        return records

    async def _serve(self, source: Source, ahead: _Ahead) -> None:
        if source.concurrency is None:
            await self._serve_open(ahead)
            return
        await self._sleep_until(self._started_s + source.start_s)
        ends_s = None if source.is_endless or self._duration_s is None else self._started_s + self._duration_s
        async with asyncio.TaskGroup() as group:
            for _ in range(source.concurrency):
                group.create_task(self._keep_place(ahead, ends_s))

    async def _serve_open(self, ahead: _Ahead) -> None:
        async with asyncio.TaskGroup() as group:
            while (request := ahead.pop()) is not None:
                due_s = self._started_s + (request.due_s or 0.0)
                while due_s - self._now_s() > _SPARE_S and ahead.prepare_one():
                    await asyncio.sleep(0)  # answers that came meanwhile get their moment
                await self._sleep_until(due_s)
                group.create_task(self._one(request, due_s, self._places))

    async def _keep_place(self, ahead: _Ahead, ends_s: float | None) -> None:
        """Send one request after another. ends_s: none is begun later; None: until there are no more."""
        while ends_s is None or self._now_s() < ends_s:
            request = ahead.pop()
            if request is None:
                return
            record = await self._one(request, self._now_s())
            if record.outcome is Outcome.FAILED:
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)

    async def _one(
        self, request: PlannedRequest, due_s: float, places: AbstractAsyncContextManager[None] | None = None
    ) -> RequestRecord:
        sighting = Sighting(request, due_s)
        self._watcher.began(request)
        try:
            async with places or nullcontext():
                await self._client.exchange(request, sighting)
        except RequestFailure as failure:
            return self._note(sighting.close(Outcome.FAILED, self._now_s(), failure))
        except asyncio.CancelledError:
            self._note(sighting.close(Outcome.CUT_OFF, self._now_s()))
            raise
        return self._note(sighting.close(Outcome.COMPLETED, self._now_s()))

    def _note(self, record: RequestRecord) -> RequestRecord:
        self._records.append(record)
        self._watcher.ended(record)
        return record

    async def _sleep_until(self, moment_s: float) -> None:
        # Also where the moment has passed: between two requests of one burst, the first must get its chance to be sent.
        await asyncio.sleep(max(0.0, moment_s - self._now_s()))


async def _all_of(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks)
