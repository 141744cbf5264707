"""Everything the scheduler knows, as one value to plan on. Only `Scheduler` writes it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from giveway.core.config import LEAST_URGENT_CLASS, MOST_URGENT_CLASS, CacheConfig, PreemptionChoice, SchedulerConfig
from giveway.core.cost_learner import CostLearner
from giveway.core.cost_profile import CostProfile
from giveway.core.errors import InvariantError
from giveway.core.ids import CopyId, RequestId
from giveway.core.isolation import SuspectGroup
from giveway.core.kv_cache import KVCache
from giveway.core.request import NEWCOMER_STATES, Rank, Request

_rank_of = attrgetter("rank")


class RankedRequests:
    """Requests in rank order. Insertion and removal find their place by bisection.

    The rank of a listed request may change only if `resort` is called before anything else is done with the list.
    """

    __slots__ = ("_ranks", "_requests")

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._ranks: list[
            Rank
        ] = []  # of the requests, place by place: bisection over plain tuples needs no Python code

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def as_list(self) -> list[Request]:
        """Return the list itself, best rank first; not to be written."""
        return self._requests

    def add(self, request: Request) -> None:
        """Put a request into its place."""
        rank, ranks = request.rank, self._ranks
        if not ranks or ranks[-1] < rank:  # most arrivals are the newest of the least urgent class
            ranks.append(rank)
            self._requests.append(request)
        else:
            place = bisect_left(ranks, rank)
            ranks.insert(place, rank)
            self._requests.insert(place, request)

    def remove(self, request: Request) -> None:
        """Take a request out."""
        requests, ranks = self._requests, self._ranks
        if requests and requests[-1] is request:  # so goes nearly every victim
            del requests[-1], ranks[-1]
            return
        place = bisect_left(ranks, request.rank)
        if place == len(requests) or requests[place] is not request:
            raise InvariantError(f"{request.request_id} is not in the list it should be in")
        del requests[place], ranks[place]

    def resort(self) -> None:
        """Put requests whose rank has changed into their new places. Linear when few of them pass another."""
        self._requests.sort(key=_rank_of)
        self._ranks = [request.rank for request in self._requests]


# An urgent class counts as in use for so long after its latest arrival.
_REMEMBERED_S = 600.0


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
        self.held: set[RequestId] = set()  # unfinished requests that must stay off the device
        self.forced: dict[RequestId, PreemptionChoice] = {}  # told to give way in the next step
        self.branches: dict[RequestId, list[Request]] = {}  # unfinished branches of one prompt, by the id of the first
        self.last_arrival_s: dict[int, float] = {}  # of each class
        # Heap: when a request has waited for so many spans more that its class counts as one lower.
        self.next_aging: list[tuple[float, int, RequestId]] = []
        self.num_disk_failures = 0  # writes that failed in a row
        self.now_s = 0.0
        self.suspects: list[SuspectGroup] = []  # the first one is being tried
        self.copy_started_s: dict[CopyId, float] = {}
        self.awaited_copies: dict[RequestId, CopyId] = {}  # what each SWAPPING_OUT or SWAPPING_IN request waits for
        self.costs: CostProfile = costs
        self.learner = CostLearner()
        self.version = 0
        self.next_step_id = 0
        self.next_copy_id = 0

    @property
    def has_unheld(self) -> bool:
        """Whether anybody could be served, or has yet to leave the device: a held newcomer only waits."""
        requests = self.requests
        return len(requests) > sum(requests[name].state in NEWCOMER_STATES for name in self.held)

    def most_urgent_class(self) -> int:
        """Return the most urgent class in use: configured, present, or seen in the last ten minutes."""
        configured = self.config.most_urgent_class
        if configured == MOST_URGENT_CLASS:
            return configured
        seen = [] if configured is None else [configured]
        seen += [group for group, last_s in self.last_arrival_s.items() if self.now_s - last_s <= _REMEMBERED_S]
        seen += [ranked.as_list()[0].rank[0] for ranked in (self.residents, self.newcomers) if len(ranked)]
        return min(seen, default=LEAST_URGENT_CLASS)
