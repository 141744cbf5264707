"""Who may come in now: limits on the waiting requests of a class, and on the concurrent requests of a key."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from giveway.core.events import Admitted, Finished, Refused, StepEvent
from giveway.core.ids import RequestId
from giveway.core.plan import StepPlan
from giveway.server.access import Caller
from giveway.server.http_errors import ApiError

_REMEMBERED_SEATINGS = 64
_LONGEST_RETRY_S = 60


class WaitingCounts:
    """How many requests of each class wait for their first seat. A listener of the engine; known to both threads."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._class_of: dict[RequestId, str] = {}
        self._counts: Counter[str] = Counter()
        self._seated_s: dict[str, deque[float]] = {}  # when the latest of each class got their seats

    def __call__(self, plan: StepPlan | None, events: Sequence[StepEvent]) -> None:
        """Take note of first seats and ends."""
        del plan
        with self._lock:
            for event in events:
                if isinstance(event, Admitted | Finished | Refused):
                    self._leave(event.request_id, is_seated=isinstance(event, Admitted))

    def _leave(self, request_id: RequestId, *, is_seated: bool) -> None:
        name = self._class_of.pop(request_id, None)
        if name is not None:
            self._counts[name] -= 1
            if is_seated:
                self._seated_s.setdefault(name, deque(maxlen=_REMEMBERED_SEATINGS)).append(self._now())

    def count(self, class_name: str) -> int:
        """Return how many of a class wait."""
        return self._counts[class_name]

    def enter(self, class_name: str, request_ids: Sequence[RequestId], limit: int) -> None:
        """Count requests as waiting, all or none. Raises ApiError 429 if more than `limit` of the class would wait."""
        if len(request_ids) > limit:
            raise ApiError(
                400,
                f"the request asks for {len(request_ids)} answers, and at most {limit} of class {class_name!r} may "
                "wait at a time: send fewer prompts, or a smaller n",
                code="too_many_answers",
            )
        with self._lock:
            waiting = self._counts[class_name]
            if waiting + len(request_ids) > limit:
                raise ApiError(
                    429,
                    f"{waiting} requests of class {class_name!r} wait already, and at most {limit} may "
                    "(--max-queued). Try again later, or with fewer prompts.",
                    code="queue_full",
                    headers={"Retry-After": str(self._retry_after_s(class_name, waiting))},
                )
            for request_id in request_ids:
                self._class_of[request_id] = class_name
            self._counts[class_name] += len(request_ids)

    def leave(self, request_ids: Sequence[RequestId]) -> None:
        """Take back what was entered and never handed in."""
        with self._lock:
            for request_id in request_ids:
                self._leave(request_id, is_seated=False)

    def _retry_after_s(self, class_name: str, waiting: int) -> int:
        """Estimate when half of the queue will have been seated, from how fast its class got seats lately (s)."""
        seated_s = self._seated_s.get(class_name)
        if not seated_s or len(seated_s) < 2:
            return 5
        rate = (len(seated_s) - 1) / max(self._now() - seated_s[0], 1e-3)
        return max(1, min(_LONGEST_RETRY_S, round(waiting / 2 / rate)))


class ConcurrencyCounts:
    """How many answers each key has in progress. Known to the event loop alone."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def enter(self, caller: Caller, num_answers: int) -> None:
        """Count the answers of one more request. Raises ApiError 429, or 400 if they are too many at any time."""
        limit, under_way = caller.max_concurrent, self._counts[caller.owner]
        if limit is not None and num_answers > limit:
            raise ApiError(
                400,
                f"the request asks for {num_answers} answers, and the key {caller.name!r} may have {limit} in progress",
                code="too_many_answers",
            )
        if limit is not None and under_way + num_answers > limit:
            raise ApiError(
                429,
                f"the key {caller.name!r} has {under_way} answers in progress, and {limit} is its limit",
                code="concurrency_limit",
                headers={"Retry-After": "1"},
            )
        self._counts[caller.owner] += num_answers

    def leave(self, caller: Caller, num_answers: int) -> None:
        """Count the answers of a request no longer."""
        self._counts[caller.owner] -= num_answers
        if not self._counts[caller.owner]:
            del self._counts[caller.owner]
