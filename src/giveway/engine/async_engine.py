"""The engine for asyncio: the loop runs in a thread of its own, every request is a stream of updates."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any, Self, TypeVar

from giveway.core.errors import GiveWayError, InvalidRequestError, InvariantError, KVCacheFullError
from giveway.core.ids import RequestId
from giveway.core.sampling import SamplingParams
from giveway.engine.engine import Engine
from giveway.engine.intake import Prompt, Submission
from giveway.engine.outputs import RequestOutput, RequestUpdate

_Item = RequestUpdate | BaseException
_Answer = TypeVar("_Answer")


class News:
    """Which streams of one reader have something to read. All of it happens in the reader's event loop."""

    def __init__(self) -> None:
        self._has_come = asyncio.Event()
        self._streams: dict[RequestStream, None] = {}

    def tell(self, stream: RequestStream) -> None:
        """Note that something has come for a stream."""
        self._streams[stream] = None
        self._has_come.set()

    async def wait(self, timeout_s: float | None = None) -> list[RequestStream]:
        """Return the streams that have something, as soon as there is one; none when the time is over."""
        try:
            # Not `wait_for`: when news and a cancellation come together, that of Python 3.11 forgets the cancellation.
            async with asyncio.timeout(timeout_s):
                await self._has_come.wait()
        except TimeoutError:
            return []
        self._has_come.clear()
        streams, self._streams = list(self._streams), {}
        return streams


class RequestStream:
    """Updates of one request, all its branches together, for one reader. Made by `AsyncEngine.open`."""

    def __init__(self, owner: AsyncEngine, submission: Submission, max_unread: int | None, news: News) -> None:
        self.submission = submission
        self._owner = owner
        self._max_unread = max_unread
        self._items: deque[_Item] = deque()
        self._is_held = False
        # Of the two above: both threads look at one and write the other. Orders to hold and to let go are given under
        # it as well, or they might reach the engine the wrong way round.
        self._lock = threading.Lock()
        self.event_loop = asyncio.get_running_loop()
        self.news = news
        self.has_ended = False

    @property
    def request_id(self) -> RequestId:
        """Name of the request, as `submit` would return it."""
        return self.submission.request_id

    async def next(self, timeout_s: float | None = None) -> list[RequestUpdate]:
        """Wait for news and return all of it; an empty list when the time is over or everything has been read.

        The last update of all carries `whole`. Raises GiveWayError if the engine stopped, or lost the batch.
        """
        if self.has_ended:
            return []
        if not self._items:
            await self.news.wait(timeout_s)
        return self.take()

    def take(self) -> list[RequestUpdate]:
        """Return what has come, without waiting. Raises as `next` does."""
        with self._lock:
            items, self._items = self._items, deque()
            if self._is_held and not self.has_ended:
                self._owner.let_go(self.request_id)
            self._is_held = False
        updates = [item for item in items if isinstance(item, RequestUpdate)]
        failure = next((item for item in items if isinstance(item, BaseException)), None)
        if failure is not None and not (updates and updates[-1].whole is not None):
            self.has_ended = True
            self._owner.forget(self)
            raise GiveWayError(f"the engine stopped: {failure}") from failure
        if updates and updates[-1].whole is not None:
            self.has_ended = True
            self._owner.forget(self)
        return updates

    def close(self) -> None:
        """Abort the request unless it has ended; twice is harmless. What it held is free after the step under way."""
        if not self.has_ended:
            self.has_ended = True
            self._owner.forget(self)
            self._owner.abort(self.request_id)

    def put(self, item: _Item) -> None:
        """Take in an item from the engine's thread, and hold the request if too many are unread."""
        with self._lock:
            self._items.append(item)
            if self._max_unread is not None and not self._is_held and len(self._items) > self._max_unread:
                self._is_held = True
                self._owner.hold(self.request_id)


class AsyncEngine:
    """Runs an `Engine` in a background thread. Use as an async context manager, or call `close`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._streams: dict[RequestId, RequestStream] = {}
        self._questions: deque[Callable[[], None]] = deque()
        # An event and not a condition: a busy loop would take a condition's lock again before a caller gets it.
        self._wake = threading.Event()
        self._is_closing = False
        self._has_stopped = False
        self._failure: BaseException | None = None
        self._step_started_s: float | None = None  # None: between steps
        self._thread = threading.Thread(target=self._run, name="giveway-engine", daemon=True)
        self._thread.start()

    # Requests

    def open(self, submission: Submission, *, max_unread: int | None = None, news: News | None = None) -> RequestStream:
        """Hand in what `Engine.prepare` has checked; return its stream, which must be closed.

        max_unread: updates that may wait for their reader. With more the request is held: it gives way until they have
        been read. None: no limit. news: told whenever something has come; a reader of several streams gives the same
        one to all of them. Raises InvalidRequestError if the name is taken; GiveWayError if the engine stopped.
        """
        self._check_running()
        name = submission.request_id
        stream = RequestStream(self, submission, max_unread, News() if news is None else news)
        # The stream first: the first update may come before hand_in returns.
        if self._streams.setdefault(name, stream) is not stream:
            raise InvalidRequestError(f"request id {name!r} is already in use")
        try:
            self._check_running()  # since we looked; its last word to all streams may have missed this one
            self.engine.hand_in(submission)
        except BaseException:
            self.forget(stream)
            raise
        self._wake.set()
        return stream

    def _check_running(self) -> None:
        if self._failure is not None or self._is_closing or self._has_stopped:
            raise GiveWayError("the engine has stopped") from self._failure

    def forget(self, stream: RequestStream) -> None:
        """Deliver nothing to a stream any more."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]

    def abort(self, request_id: RequestId) -> None:
        """Take a request back with all its branches."""
        self.engine.abort(request_id)
        self._wake.set()

    def hold(self, request_id: RequestId) -> None:
        """Make a request give way until its reader has caught up."""
        self.engine.hold(request_id)

    def let_go(self, request_id: RequestId) -> None:
        """End a hold that began because the reader was too slow."""
        self.engine.let_go(request_id)
        self._wake.set()

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        priority: int | None = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestUpdate]:
        """Yield updates until the last one, which carries the result. Closing the iterator aborts the request.

        With `sampling.n` above 1 the updates are those of all branches, told apart by `index`; each ends with its own
        `result`, and the last update of all carries `whole`. Arguments as of `Engine.submit`.
        Raises InvalidRequestError before anything is yielded; GiveWayError if the engine stopped.
        """
        self._check_running()
        submission = self.engine.prepare(
            prompt, sampling, priority=priority, request_id=request_id, cache_salt=cache_salt
        )
        stream = self.open(submission)
        try:
            while not stream.has_ended:
                for update in await stream.next():
                    yield update
        finally:
            stream.close()

    async def complete(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        priority: int | None = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Return the result of one request, with all its `choices`. Cancelling the awaiting task aborts it."""
        updates = self.generate(prompt, sampling, priority=priority, request_id=request_id, cache_salt=cache_salt)
        async with aclosing(updates):  # type: ignore[type-var]  # an async generator has aclose
            async for update in updates:
                if update.whole is not None:
                    return update.whole
        raise InvariantError("a request ended without a result")

    # The loop, seen from outside

    async def ask(self, question: Callable[[Engine], _Answer]) -> _Answer:
        """Answer a question about the engine in its own thread, between two steps. It must only read.

        Raises what the question raises; GiveWayError if the engine stopped.
        """
        self._check_running()
        event_loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Answer] = event_loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)

        def run() -> None:
            value: Any = None
            error: BaseException | None = None
            if self._has_stopped:
                error = GiveWayError("the engine has stopped")
            else:
                try:
                    value = question(self.engine)
                except Exception as raised:  # noqa: BLE001  # it is for whoever asks
                    error = raised
            _call_in(event_loop, settle, value, error)

        self._questions.append(run)
        self._wake.set()
        if self._has_stopped:  # since we looked
            self._answer_questions()
        return await answer

    @property
    def failure(self) -> BaseException | None:
        """What ended the loop; None: it runs, or was closed."""
        return self._failure

    @property
    def is_running(self) -> bool:
        """Whether the loop takes requests."""
        return not (self._has_stopped or self._is_closing)

    def step_running_s(self) -> float:
        """Return for how long the step under way has been running (s); 0 between steps."""
        started_s = self._step_started_s
        return 0.0 if started_s is None else time.monotonic() - started_s

    async def close(self) -> None:
        """Stop the loop; requests under way end with GiveWayError. Blocks for the rest of one step at most."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """Stop the loop from any thread but the engine's own."""
        self._is_closing = True
        self._wake.set()
        self._thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # The loop, in its own thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._answer_questions()
                if self.engine.has_work:
                    self._step()
        except BaseException as error:  # noqa: BLE001  # whatever it is, readers must hear of it
            self._failure = error
        finally:
            self._has_stopped = True
            self._fail_all(self._failure or GiveWayError("it was closed"))
            self._answer_questions()
            self.engine.close()

    def _wait_for_work(self) -> bool:
        """Block until there is something to do; False: the engine is closing."""
        while not (self._is_closing or self._questions or self.engine.has_work):
            self._wake.wait()
            self._wake.clear()
        return not self._is_closing

    def _answer_questions(self) -> None:
        while self._questions:
            self._questions.popleft()()

    def _step(self) -> None:
        self._step_started_s = time.monotonic()
        try:
            updates = self.engine.step()
        except KVCacheFullError as error:  # the control policy: its batch is lost, and the next one may come
            self._fail_all(error)
            return
        finally:
            self._step_started_s = None
        news: dict[asyncio.AbstractEventLoop, dict[RequestId, RequestStream]] = {}
        for update in updates:
            stream = self._streams.get(update.submission_id)
            if stream is not None:
                stream.put(update)
                news.setdefault(stream.event_loop, {})[stream.request_id] = stream
        for event_loop, streams in news.items():
            _call_in(event_loop, _tell, streams.values())

    def _fail_all(self, reason: BaseException) -> None:
        for stream in list(self._streams.values()):
            stream.put(reason)
            _call_in(stream.event_loop, _tell, (stream,))


def _tell(streams: Iterable[RequestStream]) -> None:
    for stream in streams:
        stream.news.tell(stream)


def _call_in(event_loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in an event loop from the engine's thread; one that is closed has no reader left."""
    try:
        event_loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return
