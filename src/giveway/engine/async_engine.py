"""The engine for asyncio: the loop runs in a thread of its own, every request is an async iterator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Self

from giveway.core.errors import GiveWayError, InvalidRequestError, InvariantError
from giveway.core.ids import RequestId
from giveway.core.sampling import SamplingParams
from giveway.engine.engine import Engine
from giveway.engine.intake import Prompt
from giveway.engine.outputs import RequestOutput, RequestUpdate

_Item = RequestUpdate | BaseException


class _Mailbox:
    """Where the updates of one request, all its branches together, wait for its reader."""

    __slots__ = ("loop", "queue")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[_Item] = asyncio.Queue()

    def put(self, item: _Item) -> None:
        """Deliver from the engine's thread; a reader whose event loop is gone has no need of it."""
        try:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:  # the loop is closed
            return


class AsyncEngine:
    """Runs an `Engine` in a background thread. Use as an async context manager, or call `close`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._mailboxes: dict[RequestId, _Mailbox] = {}
        # An event and not a condition: a busy loop would take a condition's lock again before a caller gets it.
        self._wake = threading.Event()
        self._is_closing = False
        self._has_stopped = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="giveway-engine", daemon=True)
        self._thread.start()

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
        if self._failure is not None or self._is_closing:
            raise GiveWayError("the engine has stopped") from self._failure
        submission = self.engine.prepare(
            prompt, sampling, priority=priority, request_id=request_id, cache_salt=cache_salt
        )
        name, mailbox = submission.request_id, _Mailbox()
        # The mailbox first: the first update may come before hand_in returns.
        if self._mailboxes.setdefault(name, mailbox) is not mailbox:
            raise InvalidRequestError(f"request id {name!r} is already in use")
        ended = True  # nothing to abort yet
        try:
            if self._has_stopped:  # since we looked; its last word to all mailboxes may have missed this one
                raise GiveWayError("the engine has stopped") from self._failure
            self.engine.hand_in(submission)
            ended = False
            self._wake.set()
            while True:
                item = await mailbox.queue.get()
                if isinstance(item, BaseException):
                    ended = True
                    raise GiveWayError(f"the engine stopped: {item}") from item
                ended = item.whole is not None
                yield item
                if ended:
                    return
        finally:
            self._mailboxes.pop(name, None)
            if not ended:
                self.engine.abort(name)
                self._wake.set()

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

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                for update in self.engine.step():
                    mailbox = self._mailboxes.get(update.submission_id)
                    if mailbox is not None:
                        mailbox.put(update)
        except BaseException as error:  # noqa: BLE001  # whatever it is, readers must hear of it
            self._failure = error
        finally:
            self._has_stopped = True
            reason = self._failure or GiveWayError("it was closed")
            for mailbox in list(self._mailboxes.values()):
                mailbox.put(reason)
            self.engine.close()

    def _wait_for_work(self) -> bool:
        """Block until there is something to do; False: the engine is closing."""
        while not self._is_closing and not self.engine.has_work:
            self._wake.wait()
            self._wake.clear()
        return not self._is_closing
