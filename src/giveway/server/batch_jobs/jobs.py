"""Batches under way: input checked, lines fed to the engine, answers written down, files made at the end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar
from weakref import WeakValueDictionary

from giveway.core.errors import ConfigError, OutputFileError
from giveway.server.batch_jobs.finalizer import finalize
from giveway.server.batch_jobs.ids import BatchId
from giveway.server.batch_jobs.input_check import LineChangedError, StoppedError, check_input, read_line
from giveway.server.batch_jobs.line_text import answered_line, broken_line
from giveway.server.batch_jobs.recorder import AnswerRecorder
from giveway.server.batch_jobs.records import (
    BatchCounts,
    BatchLine,
    BatchRecord,
    BatchStatus,
    FinishedLine,
    InputProblem,
    LineAnswer,
    LinePosition,
    NewBatch,
)
from giveway.server.batch_jobs.store import BatchStore
from giveway.server.batch_jobs.turns import LineQueue, Turns
from giveway.server.http_errors import shutting_down

logger = logging.getLogger("giveway")

RunLine = Callable[[BatchLine], Awaitable[LineAnswer]]

_TRY_AGAIN_LATER = (429, 503)
_NUM_THREADS = 4  # for disk work
_NUM_LONG_WORK = 2  # of these for checking inputs and writing ends, so that answers and uploads always find one
_LINES_AT_A_READ = 256
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_Result = TypeVar("_Result")


class _Course:
    """One unfinished batch on its way through this process."""

    def __init__(self, batch: BatchRecord) -> None:
        self.id = batch.id
        self.owner = batch.owner
        self.expires_at = batch.expires_at
        self.is_cancelled = threading.Event()  # read by the thread that checks the input
        self.is_over = asyncio.Event()  # no further line is started: all answered, cancelled or out of time
        self.queue: LineQueue | None = None  # None: its lines are not being run
        self.line_tasks: set[asyncio.Task[FinishedLine | None]] = set()


class BatchJobs:
    """Runs the batches of a store. Belongs to one event loop; `start` and `stop` it, or use it as a context manager."""

    def __init__(
        self,
        store: BatchStore,
        run_line: RunLine,
        *,
        max_outstanding: int,
        tick_s: float = 5.0,
        first_pause_s: float = 0.5,
        longest_pause_s: float = 30.0,
    ) -> None:
        """Prepare; nothing runs before `start`.

        run_line: answers one request at the least urgent class; status 429 or 503 means try again later, an exception
        fails the line, cancelling it aborts the request. max_outstanding: lines in the engine at a time; twice its
        seats is a good number. tick_s: how often ends of time are looked for. The pauses: how long an owner waits
        who is told to try later.
        """
        if max_outstanding < 1:
            raise ConfigError(f"max_outstanding is {max_outstanding}; it must be at least 1")
        self.store = store
        self._run_line = run_line
        self._tick_s = tick_s
        self._turns = Turns(max_outstanding, first_pause_s=first_pause_s, longest_pause_s=longest_pause_s)
        self._courses: dict[BatchId, _Course] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = threading.Event()
        self._wake = asyncio.Event()
        self._recorder = AnswerRecorder(self._write_answers, self._on_recorded)
        self._recording: asyncio.Task[None] | None = None
        self._long_work = asyncio.Semaphore(_NUM_LONG_WORK)
        self._long_work_of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="giveway-batch")

    async def start(self) -> None:
        """Go on with every batch that is not finished."""
        for batch in await self.in_thread(self.store.batches.unfinished):
            self._take_up(batch)
        self._recording = _spawn(self._recorder.run())
        self._tasks.add(_spawn(self._feed()))
        self._tasks.add(_spawn(self._tick()))

    async def stop(self) -> None:
        """Start nothing further; lines under way are cancelled and run again after the next start. Answers are kept."""
        self._is_stopping.set()
        line_tasks = [task for course in self._courses.values() for task in course.line_tasks]
        tasks: list[asyncio.Task[Any]] = [*self._tasks, *line_tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._recording is not None:
            self._recorder.close()
            await asyncio.gather(self._recording, return_exceptions=True)

    async def close(self) -> None:
        """Answer no questions any more. After `stop`."""
        await asyncio.to_thread(self._executor.shutdown)  # work in threads ends by itself: it looks at `_is_stopping`

    def check_open(self) -> None:
        """Raise ApiError (503) when nothing may be changed any more: what is there can still be read."""
        if self._is_stopping.is_set():
            raise shutting_down()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self.close()

    def counts(self) -> BatchCounts:
        """Return what is going on."""
        queues = [course.queue for course in self._courses.values() if course.queue is not None]
        num_left = sum(queue.num_left for queue in queues)
        num_under_way = self._turns.num_under_way
        return BatchCounts(len(self._courses), max(num_left - num_under_way, 0), num_under_way)

    async def in_thread(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run something that waits for the disk without holding up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    async def create(self, owner: str, wanted: NewBatch) -> BatchRecord:
        """Add a batch and take it up. Raises ApiError or OutputFileError, as `BatchTable.create`."""
        batch = await self.in_thread(self.store.batches.create, owner, wanted)
        self._take_up(batch)
        return batch

    async def cancel(self, owner: str, batch_id: str) -> BatchRecord:
        """Cancel a batch; what is answered is kept. Raises ApiError or OutputFileError, as `BatchTable.cancel`."""
        batch = await self.in_thread(self.store.batches.cancel, owner, batch_id)
        self._take_up(batch)
        return batch

    # --- one batch, from its input to its files

    def _take_up(self, batch: BatchRecord) -> None:
        """Make sure that somebody carries this batch to its end, and knows of a cancellation."""
        if batch.status is BatchStatus.CANCELLED or self._is_stopping.is_set():
            return
        course = self._courses.get(batch.id)
        if course is None:
            course = self._courses[batch.id] = _Course(batch)
            task = _spawn(self._carry(course))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if batch.status is BatchStatus.CANCELLING:
            course.is_cancelled.set()
            course.is_over.set()

    async def _carry(self, course: _Course) -> None:
        # What the caller knew may be old by now: the batch may have ended in between.
        batch = await self.in_thread(self.store.batches.current, course.id)
        if batch is not None and batch.status is BatchStatus.VALIDATING:
            batch = await self._insist("check the input of", course, partial(self._check, course, batch))
        if batch is not None and batch.status is BatchStatus.IN_PROGRESS:
            await self._run_lines(course, batch)
            batch = await self._insist("end", course, partial(self.store.batches.begin_finalizing, course.id))
        if batch is not None and batch.status in (BatchStatus.FINALIZING, BatchStatus.CANCELLING):
            await self._insist("end", course, partial(finalize, self.store, batch, self._is_stopping.is_set))
        # Not in a `finally`: a batch that meets a bug of ours must not be taken up again with every tick.
        del self._courses[course.id]

    async def _insist(self, what: str, course: _Course, function: Callable[[], BatchRecord]) -> BatchRecord:
        """Do long work in a thread, again and again while the disk does not let us; one piece an owner at a time."""
        wait_s = _FIRST_WAIT_S
        turn = self._long_work_of.setdefault(course.owner, asyncio.Lock())
        while True:
            try:
                async with turn, self._long_work:
                    return await self.in_thread(function)
            except OutputFileError as error:
                logger.error("cannot %s %s, trying again: %s", what, course.id, error)
            except OSError as error:
                logger.error("cannot %s %s, trying again: %s", what, course.id, error.strerror)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _check(self, course: _Course, batch: BatchRecord) -> BatchRecord:
        """Check the input and write down what was found; in a thread."""
        batches = self.store.batches

        def is_stopped() -> bool:
            return self._is_stopping.is_set() or course.is_cancelled.is_set()

        try:
            path = self.store.files.input_path(batch.input_file_id)
            found = check_input(path, batch.endpoint, self.store.limits, is_stopped)
        except FileNotFoundError:
            problem = InputProblem("input_file_missing", "the input file is gone from the server's data directory")
            return batches.reject(batch.id, [problem])
        except StoppedError:
            current = batches.current(batch.id)
            if current is None or self._is_stopping.is_set():
                raise
            return current  # it is being cancelled
        if found.problems:
            return batches.reject(batch.id, found.problems)
        return batches.accept(batch.id, found.lines, found.model)

    async def _run_lines(self, course: _Course, batch: BatchRecord) -> None:
        queue = course.queue = LineQueue(batch)
        if queue.num_left == 0:
            course.is_over.set()
        self._turns.add(queue)
        self._wake.set()
        try:
            await course.is_over.wait()
        finally:
            self._turns.remove(course.id, course.owner)
            for task in course.line_tasks:
                task.cancel()
        await asyncio.gather(*course.line_tasks, return_exceptions=True)
        await self._recorder.flush()  # answers that were there before the end count
        course.queue = None

    # --- lines

    async def _feed(self) -> None:
        pause_s: float | None = None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):  # `wait_for` of Python 3.11 can miss that it is cancelled
                    await self._wake.wait()
            self._wake.clear()
            try:
                pause_s = await self._start_lines()
            except OutputFileError as error:
                logger.error("lines of batches cannot be read, trying again: %s", error)
                pause_s = _FIRST_WAIT_S

    async def _start_lines(self) -> float | None:
        """Start what may start now. Returns after how long there may be more; None: when somebody says so."""
        now_s = time.monotonic()
        while (queue := self._turns.choose(now_s)) is not None:
            if queue.needs_reading:
                await self._read_ahead(queue)
            else:
                await self._start_line(queue)
            now_s = time.monotonic()
        return self._turns.shortest_pause_s(now_s)  # of the very moment for which nobody was chosen

    async def _read_ahead(self, queue: LineQueue) -> None:
        def read() -> list[LinePosition]:
            return self.store.batches.unanswered(queue.batch.id, after=queue.last_read, limit=_LINES_AT_A_READ)

        queue.add(await self.in_thread(read))

    async def _start_line(self, queue: LineQueue) -> None:
        """Start the next line. It is read here and not in its task, so that the engine gets lines in order."""
        batch = queue.batch
        course = self._courses[batch.id]
        position = self._turns.start(queue)
        found: BatchLine | FinishedLine | None = None
        try:
            found = await self.in_thread(self._read_line, batch, position)
        except LineChangedError:
            text = "The input file was changed on the server after it had been checked."
            found = broken_line(batch.id, position, "input_changed", text)
        except OSError as error:
            logger.error("line %d of %s cannot be read, trying again: %s", position.number, batch.id, error.strerror)
            self._turns.pause(batch.owner, time.monotonic())
        if found is None or course.is_over.is_set():
            self._give_back(queue, position)
        elif isinstance(found, FinishedLine):
            self._recorder.put(found)
        else:
            task = asyncio.get_running_loop().create_task(self._answer(position, found))
            course.line_tasks.add(task)
            task.add_done_callback(partial(self._on_ran, course, queue, position))

    def _give_back(self, queue: LineQueue, position: LinePosition) -> None:
        """A line is not under way any more and has no answer."""
        queue.put_back(position)
        self._turns.end(queue.batch.owner)
        self._wake.set()

    def _on_ran(
        self, course: _Course, queue: LineQueue, position: LinePosition, task: asyncio.Task[FinishedLine | None]
    ) -> None:
        """A line ends as an answer handed to the recorder, or goes back into its queue.

        Called by the task and not written at its end: a task that is cancelled early enough never runs at all.
        """
        course.line_tasks.discard(task)
        finished = None if task.cancelled() else task.result()
        if finished is None:
            self._give_back(queue, position)
        else:
            self._recorder.put(finished)  # its place becomes free when it is on the disk: see `_on_recorded`

    async def _answer(self, position: LinePosition, line: BatchLine) -> FinishedLine | None:
        """Return the answer as it will be written; None: the line must be tried again later."""
        try:
            answer = await self._run_line(line)
            if answer.status_code not in _TRY_AGAIN_LATER:
                self._turns.resume(line.owner)
                return answered_line(line.batch_id, position, answer)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Else nobody cancelled this line: the engine let it go. It is no answer, so the line runs again.
        except Exception:  # whatever it is, it concerns this line alone
            logger.exception("line %d of %s failed", position.number, line.batch_id)
            text = "The server failed while it answered this request."
            return broken_line(line.batch_id, position, "server_error", text)
        self._turns.pause(line.owner, time.monotonic())
        return None

    def _read_line(self, batch: BatchRecord, position: LinePosition) -> BatchLine:
        return read_line(self.store.files.input_path(batch.input_file_id), position, batch)

    async def _write_answers(self, lines: Sequence[FinishedLine]) -> None:
        await self.in_thread(self.store.batches.record_answers, lines)

    def _on_recorded(self, lines: Sequence[FinishedLine]) -> None:
        for line in lines:
            course = self._courses[line.batch_id]
            self._turns.end(course.owner)
            if course.queue is not None:
                course.queue.num_left -= 1
                if course.queue.num_left == 0:
                    course.is_over.set()
        self._wake.set()

    # --- time

    async def _tick(self) -> None:
        """End what is out of time, delete what was kept long enough, take up what somebody was kept from taking up."""
        while True:
            try:
                await self.in_thread(self.store.batches.delete_old)
                await self.in_thread(self.store.files.delete_old)
                for batch in await self.in_thread(self.store.batches.unfinished):
                    self._take_up(batch)
            except OutputFileError as error:
                logger.error("old batches cannot be looked for, trying again: %s", error)
            now = self.store.clock()
            for course in self._courses.values():
                if course.expires_at <= now:
                    course.is_over.set()
            await asyncio.sleep(self._tick_s)


def _spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task that tells of a bug of ours; what it was about goes on with the next start."""

    def report(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the Batch API met a bug", exc_info=error)

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(report)
    return task
