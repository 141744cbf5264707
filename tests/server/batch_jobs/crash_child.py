"""A process that works on batches and may die at any point; started again with the same directory, it goes on."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

from giveway.server.batch_jobs.jobs import BatchJobs
from giveway.server.batch_jobs.records import (
    UNFINISHED,
    BatchLine,
    BatchRecord,
    FilePurpose,
    FileRecord,
    LineAnswer,
    NewBatch,
    PageRequest,
)
from giveway.server.batch_jobs.steps import DurableStep, Moment, StepListener, ignore_steps
from giveway.server.batch_jobs.store import BatchStore
from tests.server.batch_jobs.sample_lines import CHAT, answer_of, jsonl, request_line

OWNER = "alice"
NUM_LINES = 60
FAULT = 9  # exit status of a death at a step
EVERYTHING = PageRequest(1000)

INPUTS = {
    "good": jsonl(*(request_line(f"good-{n}") for n in range(NUM_LINES))),
    "bad": b"not json\n",
    "cancelled": jsonl(*(request_line(f"cancelled-{n}") for n in range(5))),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """The process ends itself on one side of a step, when it comes there for the `count`-th time."""

    step: DurableStep
    moment: Moment
    count: int


def dying_at(fault: Fault) -> StepListener:
    num_left = [fault.count]

    def listen(reached: DurableStep, side: Moment) -> None:
        if (reached, side) == (fault.step, fault.moment):
            num_left[0] -= 1
            if num_left[0] == 0:
                os._exit(FAULT)

    return listen


class Work:
    """Everything that there is to do, each part only if it has not been done."""

    def __init__(self, store: BatchStore, log: int, max_runs: int | None) -> None:
        self._store = store
        self._log = log
        self._num_left = max_runs
        self._jobs = BatchJobs(store, self._run_line, max_outstanding=4, tick_s=0.02)

    async def _run_line(self, line: BatchLine) -> LineAnswer:
        os.write(self._log, f"{line.custom_id}\n".encode())  # O_APPEND: whole, also if a kill follows
        if self._num_left is not None:
            self._num_left -= 1
        if line.custom_id == "cancelled-1" or (self._num_left is not None and self._num_left < 0):
            await asyncio.Event().wait()
        await asyncio.sleep(0.004)
        if line.custom_id == "good-7":
            return LineAnswer(400, {"error": {"message": "no"}}, "req")
        return answer_of(line)

    async def do(self) -> None:
        async with self._jobs:
            for name in INPUTS:
                await self._batch(name)
            for record in self._store.files.page(OWNER, EVERYTHING).items:
                if record.filename == "bad":
                    self._store.files.delete(OWNER, record.id)

    async def _batch(self, name: str) -> None:
        batch = self._find(name)
        if batch is None:
            wanted = NewBatch(CHAT, self._upload(name).id, "24h", 86400, {"name": name}, None)
            batch = await self._jobs.create(OWNER, wanted)
        while batch.status in UNFINISHED:
            await asyncio.sleep(0.005)
            batch = self._store.batches.get(OWNER, batch.id)
            if name == "cancelled" and batch.num_completed == 4:
                await self._jobs.cancel(OWNER, batch.id)

    def _find(self, name: str) -> BatchRecord | None:
        batches = self._store.batches.page(OWNER, EVERYTHING).items
        return next((batch for batch in batches if batch.metadata == {"name": name}), None)

    def _upload(self, name: str) -> FileRecord:
        for record in self._store.files.page(OWNER, EVERYTHING).items:
            if record.filename == name:
                return record
        with self._store.files.begin_upload(OWNER) as upload:
            upload.write(INPUTS[name])
            return upload.keep(FilePurpose.BATCH, name, None)

    def summary(self) -> dict[str, object]:
        batches = {}
        for name in INPUTS:
            batch = self._find(name)
            assert batch is not None
            batches[name] = {
                "status": batch.status,
                "counts": [batch.num_lines, batch.num_completed, batch.num_failed],
                "output": self._content(batch.output_file_id),
                "errors": self._content(batch.error_file_id),
            }
        files = self._store.files.page(OWNER, EVERYTHING).items
        return {"batches": batches, "files": sorted(record.id for record in files)}

    def _content(self, file_id: str | None) -> list[str]:
        if file_id is None:
            return []
        path = self._store.files.content_path(self._store.files.get(OWNER, file_id))
        return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


def work_on(directory: Path, fault: Fault | None, max_runs: int | None) -> None:
    """Do all there is to do in `directory/data`, noting runs in `log`; at the end, write what came of it to `summary`.

    max_runs: the engine answers so many lines and then no more; None: it answers all.
    """
    on_step = ignore_steps if fault is None else dying_at(fault)
    with BatchStore(directory / "data", on_step=on_step) as store:
        work = Work(store, os.open(directory / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), max_runs)
        asyncio.run(work.do())
        (directory / "summary").write_text(json.dumps(work.summary()))
