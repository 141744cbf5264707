"""Everything the scheduler knows, as one value to plan on. Only `Scheduler` writes it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from giveway.core.config import CacheConfig, PreemptionChoice, SchedulerConfig
from giveway.core.cost_profile import CostProfile
from giveway.core.errors import InvariantError
from giveway.core.ids import CopyId, RequestId
from giveway.core.isolation import SuspectGroup
from giveway.core.kv_cache import KVCache
from giveway.core.request import Rank, Request


def _rank(request: Request) -> Rank:
    return request.rank


class RankedRequests:
    """Requests in rank order. Insertion and removal find their place by bisection."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def as_list(self) -> list[Request]:
        """Return the list itself, best rank first; not to be written."""
        return self._requests

    def add(self, request: Request) -> None:
        """Put a request into its place."""
        insort(self._requests, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Take a request out."""
        place = bisect_left(self._requests, request.rank, key=_rank)
        if place == len(self._requests) or self._requests[place] is not request:
            raise InvariantError(f"{request.request_id} is not in the list it should be in")
        del self._requests[place]


class SchedulerState:
    """Containers and counters. Every unfinished request is in exactly one of residents, newcomers, swapping_out."""

    def __init__(self, config: SchedulerConfig, cache_config: CacheConfig, costs: CostProfile) -> None:
        self.config = config
        self.cache_config = cache_config
        self.kv = KVCache(cache_config)
        self.requests: dict[RequestId, Request] = {}  # unfinished
        self.residents = RankedRequests()  # RUNNING and SWAPPING_IN: each owns a seat
        self.newcomers = RankedRequests()  # WAITING, PREEMPTED, SWAPPED: each wants one
        self.swapping_out: dict[RequestId, Request] = {}
        self.forced: dict[RequestId, PreemptionChoice] = {}  # told to give way in the next step
        self.suspects: list[SuspectGroup] = []  # the first one is being tried
        self.copy_started_s: dict[CopyId, float] = {}
        self.awaited_copies: dict[RequestId, CopyId] = {}  # what each SWAPPING_OUT or SWAPPING_IN request waits for
        self.costs: CostProfile = costs
        self.version = 0
        self.next_step_id = 0
        self.next_copy_id = 0
