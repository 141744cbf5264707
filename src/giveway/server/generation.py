"""One API request on the engine: all its prompts with all their answers, from admission to the last update."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from giveway.core.constraint import GRAMMAR_FAILED
from giveway.core.errors import GiveWayError, InvalidRequestError, RequestTooLargeError
from giveway.core.request import FinishReason
from giveway.core.sampling import SamplingParams
from giveway.engine.async_engine import AsyncEngine, News, RequestStream
from giveway.engine.intake import Prompt, Submission
from giveway.engine.outputs import RequestOutput, RequestUpdate
from giveway.server.access import Caller
from giveway.server.admission import ConcurrencyCounts, WaitingCounts
from giveway.server.classes import PriorityClasses
from giveway.server.finished import FinishedRequest
from giveway.server.http_errors import CLIENT_CLOSED, ApiError, shutting_down
from giveway.server.request_book import RequestBook
from giveway.server.settings import ServerLimits


@dataclass(frozen=True, slots=True)
class Asked:
    """What an API request wants of the engine."""

    kind: str  # prefix of its id: "cmpl" or "chatcmpl"
    endpoint: str
    prompts: Callable[[], Sequence[Prompt]]  # called in a worker thread: templates and tokenizing take a while
    num_prompts: int
    sampling: SamplingParams
    priority: int  # under the caller's ceiling
    caller: Caller
    alias: str | None = None  # a further name that it can be asked for
    cache_salt: str | None = None
    is_stream: bool = False
    is_batch: bool = False  # of the Batch API: not subject to limits on queues, which are for those who wait
    form_field: str = "response_format"  # where the form of the answer came from, for errors

    @property
    def num_answers(self) -> int:
        """Answers over all prompts."""
        return self.num_prompts * self.sampling.n

    @property
    def text_field(self) -> str:
        """Where the text came from, for errors."""
        return "messages" if self.kind == "chatcmpl" else "prompt"

    def refused(self, error: InvalidRequestError) -> ApiError:
        """Return the answer, in the client's own words."""
        return bad_request(error, self.form_field, self.text_field)


@dataclass(frozen=True, slots=True)
class Piece:
    """News of one choice."""

    index: int  # of the choice, over all prompts
    prompt_index: int
    update: RequestUpdate


class ClientGoneError(Exception):
    """The client has closed its connection: there is nobody left to answer."""


class Generation:
    """The streams of one API request, as one."""

    def __init__(
        self,
        api_id: str,
        asked: Asked,
        streams: Sequence[RequestStream],
        news: News,
        time_limit_s: float | None = None,
    ) -> None:
        """news: told whenever one of the streams has something. time_limit_s: from now to the end; None: no limit."""
        self._time_limit_s = time_limit_s
        self._started_s = time.monotonic()
        self.api_id = api_id
        self.asked = asked
        self.streams = streams
        self.results: dict[int, RequestOutput] = {}  # by index of the choice
        self.num_output_tokens = 0  # of all answers, also of those that are not complete
        self.first_token_s: float | None = None  # from the start; None: none has come
        self._news = news
        self._place_of = {stream: place for place, stream in enumerate(streams)}
        self._num_ended = 0

    @property
    def has_ended(self) -> bool:
        """Whether every answer is complete."""
        return self._num_ended == len(self.streams)

    @property
    def submissions(self) -> list[Submission]:
        """What was handed in, by prompt."""
        return [stream.submission for stream in self.streams]

    async def next(self, timeout_s: float | None = None) -> list[Piece]:
        """Wait for news and return all of it; an empty list when the time is over.

        Raises ApiError 500 when one of the answers ended with an error of its own, or the engine stopped; 504 when it
        takes longer than it may.
        """
        pieces: list[Piece] = []
        while not pieces and not self.has_ended:
            left_s = self._left_s()
            wait_s = min((each for each in (timeout_s, left_s) if each is not None), default=None)
            streams = await self._news.wait(wait_s)
            if not streams and wait_s != left_s:  # else the look at the clock says so
                return []
            for stream in streams:
                pieces += self._take(stream)
        return pieces

    def _left_s(self) -> float | None:
        if self._time_limit_s is None:
            return None
        left_s = self._started_s + self._time_limit_s - time.monotonic()
        if left_s <= 0:
            limit = f"the request took longer than {self._time_limit_s:g} s (--request-timeout-s)"
            raise ApiError(504, limit, code="timeout")
        return left_s

    def _take(self, stream: RequestStream) -> list[Piece]:
        if stream.has_ended:
            return []
        try:
            updates = stream.take()
        except GiveWayError as error:
            raise ApiError(500, str(error), code="engine_error") from error
        self._num_ended += stream.has_ended
        place, pieces = self._place_of[stream], []
        for update in updates:
            if update.token_ids:
                self.num_output_tokens += len(update.token_ids)
                self.first_token_s = self.first_token_s or time.monotonic() - self._started_s
            index = place * self.asked.sampling.n + update.index
            if update.result is not None:
                self.results[index] = update.result
                _check_end(update.result)
            pieces.append(Piece(index, place, update))
        return pieces

    async def all(self) -> list[RequestOutput]:
        """Return all answers, by index. Raises as `next` does."""
        while not self.has_ended:
            await self.next()
        return [self.results[index] for index in range(self.asked.num_answers)]

    def close(self) -> None:
        """Abort whatever has not ended."""
        for stream in self.streams:
            stream.close()


def _check_end(result: RequestOutput) -> None:
    if result.finish_reason is FinishReason.ERROR:
        if (result.error or "").startswith(GRAMMAR_FAILED):  # trying again would not help
            message = f"the form of the answer cannot be kept: {result.error}"
            raise ApiError(400, message, param="response_format", code="grammar_failed")
        raise ApiError(500, f"the request failed: {result.error}", code="request_failed")
    if result.finish_reason is FinishReason.ABORT:
        raise ApiError(503, "the request was ended by the server, which is shutting down", code="shutting_down")


class GenerationDesk:
    """Takes API requests in, within their limits, and sees them to their end."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        limits: ServerLimits,
        classes: PriorityClasses,
        waiting: WaitingCounts,
        book: RequestBook,
        finished: Callable[[FinishedRequest], None],
        taken_in: Callable[[str, Submission], None] | None = None,
    ) -> None:
        """finished: told of every request that ended, however it ended. taken_in: told of every prompt."""
        self._engine = engine
        self._limits = limits
        self._classes = classes
        self._waiting = waiting
        self._book = book
        self._finished = finished
        self._taken_in = taken_in
        self._concurrent = ConcurrencyCounts()
        self._open: set[Generation] = set()
        self.is_draining = False

    @property
    def num_open(self) -> int:
        """API requests in progress, those of the Batch API not counted."""
        return sum(not generation.asked.is_batch for generation in self._open)

    @asynccontextmanager
    async def generation(self, asked: Asked) -> AsyncIterator[Generation]:
        """Start a generation; leaving the context, also by cancellation, frees everything it holds.

        Raises ApiError 400 for a request that is wrong, 429 and 503 for one that comes at a bad time. What is raised
        inside is told to `finished` as the end of the request.
        """
        if self.is_draining and not asked.is_batch:
            raise shutting_down()
        if not asked.is_batch:
            self._concurrent.enter(asked.caller, asked.num_answers)
        generation: Generation | None = None
        started_s, status = time.monotonic(), 200
        api_id = f"{asked.kind}-{uuid.uuid4().hex}"
        try:
            generation = await self._start(api_id, asked)
            self._open.add(generation)
            yield generation
        except ApiError as error:
            status = error.status
            raise
        except (ClientGoneError, asyncio.CancelledError, GeneratorExit):
            status = CLIENT_CLOSED
            raise
        except BaseException:
            status = 500
            raise
        finally:
            if not asked.is_batch:
                self._concurrent.leave(asked.caller, asked.num_answers)
            if generation is not None:
                generation.close()
                self._open.discard(generation)
                self._finished(FinishedRequest.of(generation, time.monotonic() - started_s, status))

    async def _start(self, api_id: str, asked: Asked) -> Generation:
        try:
            submissions = await asyncio.to_thread(self._prepare, api_id, asked)
        except InvalidRequestError as error:
            raise asked.refused(error) from error
        except GiveWayError as error:
            raise ApiError(503, str(error), code="engine_stopped") from error
        if self._taken_in is not None:
            for submission in submissions:
                self._taken_in(api_id, submission)
        names = [name for submission in submissions for name in submission.request_ids]
        class_name = self._classes.name_of(asked.priority)
        limit = self._limits.max_queued_of.get(class_name, self._limits.max_queued)
        self._waiting.enter(class_name, names, len(names) + limit if asked.is_batch else limit)
        try:
            self._book.register(api_id, names, asked.caller.owner, asked.alias)
        except InvalidRequestError as error:
            self._waiting.leave(names)
            raise asked.refused(error) from error
        news, streams = News(), list[RequestStream]()
        max_unread = self._limits.max_unread if asked.is_stream else None
        try:
            for submission in submissions:
                streams.append(self._engine.open(submission, max_unread=max_unread, news=news))
        except BaseException as error:
            for stream in streams:
                stream.close()
            self._waiting.leave(names)
            self._book.withdraw(api_id)
            if isinstance(error, InvalidRequestError):
                raise asked.refused(error) from error
            if isinstance(error, GiveWayError):
                raise ApiError(503, str(error), code="engine_stopped") from error
            raise
        # Whoever sends a batch waits for hours, which is what batches are for.
        time_limit_s = None if asked.is_batch else self._limits.request_timeout_s
        return Generation(api_id, asked, streams, news, time_limit_s)

    def _prepare(self, api_id: str, asked: Asked) -> list[Submission]:
        prompts = asked.prompts()
        return [
            self._engine.engine.prepare(
                prompt,
                asked.sampling,
                priority=asked.priority,
                request_id=api_id if len(prompts) == 1 else f"{api_id}.{place}",
                cache_salt=asked.cache_salt,
            )
            for place, prompt in enumerate(prompts)
        ]

    def end_all(self) -> None:
        """Take back everything that is in progress: its clients are told that the server is shutting down."""
        for generation in list(self._open):
            for stream in generation.streams:
                self._engine.abort(stream.request_id)


def bad_request(
    error: InvalidRequestError, form_field: str = "response_format", text_field: str | None = None
) -> ApiError:
    """Return the answer to a request that is wrong; its field is named where the message begins with it.

    form_field: what the client sent of that which the engine knows as `response_format`. text_field: what is named
    where prompt and output together are too long.
    """
    message = re.sub(r"^response_format\b", form_field, str(error))
    # The engine's own name of the request says nothing to a client.
    message = re.sub(r"^request '[^']*'(: )?", lambda found: "" if found[1] else "the request", message)
    first = message.partition(" ")[0].rstrip(":")
    if isinstance(error, RequestTooLargeError):
        return ApiError(400, message, param=text_field, code="context_length_exceeded")
    is_field = _FIELD.fullmatch(first) and ("_" in first or "." in first or first in _PLAIN_FIELDS)
    return ApiError(400, message, param=first if is_field else None)


_FIELD = re.compile(r"[a-z][a-z0-9_.]*")
_PLAIN_FIELDS = frozenset({"temperature", "n", "seed", "stop", "logprobs", "messages", "prompt", "tools", "priority"})
