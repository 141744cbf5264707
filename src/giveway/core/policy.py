"""Who goes first, who may displace whom, and who gives way: the whole scheduling policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from giveway.core.config import MOST_URGENT_CLASS, SchedulingPolicy, VictimOrder
from giveway.core.ids import BlockTable, RequestId
from giveway.core.request import Rank, Request


def rank_of(priority: int, arrival_number: int, policy: SchedulingPolicy) -> Rank:
    """Return the one key that orders admission and, read backwards, preemption; unique by the arrival number."""
    return (priority if policy is SchedulingPolicy.PRIORITY else MOST_URGENT_CLASS, arrival_number)


def aged_class(priority: int, num_spans: int) -> int:
    """Return the class of a request that has waited for so many aging spans: one lower for each, down to the first."""
    return max(priority - num_spans, min(priority, MOST_URGENT_CLASS))


def num_aging_spans(arrival_s: float, now_s: float, aging_s: float) -> int:
    """Return how many aging spans a request has waited in full: the largest n with arrival_s + n * aging_s <= now_s."""
    spans = max(int((now_s - arrival_s) / aging_s), 0)
    while arrival_s + (spans + 1) * aging_s <= now_s:  # the division may have rounded the other way
        spans += 1
    while spans and arrival_s + spans * aging_s > now_s:
        spans -= 1
    return spans


def may_displace(request: Request, victim: Request, policy: SchedulingPolicy) -> bool:
    """Whether `request` may take blocks or the seat of `victim`, a resident.

    A resident that has to grow may displace anybody ranked below it, but nobody of its class who has paid enough for
    it. A newcomer may displace a strictly less urgent class, and within its own class only guests, who were let in
    out of turn.
    """
    if policy is SchedulingPolicy.NONE or victim.rank <= request.rank:
        return False
    if victim.rank[0] > request.rank[0]:
        return True
    return victim.is_guest or (request.state is request.state.RUNNING and not victim.has_paid)


def may_take_kept(request: Request, keeper: Request, policy: SchedulingPolicy) -> bool:
    """Whether `request` may take blocks that `keeper`, who has given way already, has kept.

    Everybody ranked above may. A resident may also take those of its own class: it computes, and the other does not;
    otherwise both could wait for each other.
    """
    if policy is SchedulingPolicy.NONE:
        return False
    is_resident = request.state is request.state.RUNNING
    return keeper.rank > request.rank or (is_resident and keeper.rank[0] == request.rank[0])


def in_victim_order(
    candidates: Iterable[Request],
    order: VictimOrder,
    *,
    settle_tokens: int,
    is_keeper: Callable[[Request], bool],
    price: Callable[[Request], float],
) -> Iterator[Request]:
    """Yield by who gives way first: the least urgent class, and in it first those who have given way already.

    Next come residents by `order`, ties by the latest arrival; last those who were resumed a moment ago, so that
    nobody is swapped in and out again for nothing: a preference, never a veto. price: what `order` compares, smaller
    first; asked once for each resident of a class, and only when the walk comes to it.
    """

    def key(request: Request) -> tuple[bool, float, int]:
        is_settling = request.is_settling(settle_tokens) and request.num_own_computed_tokens > 0
        return (is_settling, 0.0 if order is VictimOrder.NEWEST else price(request), -request.rank[1])

    by_class: dict[int, tuple[list[Request], list[Request]]] = {}
    for request in candidates:
        keepers, residents = by_class.setdefault(request.rank[0], ([], []))
        (keepers if is_keeper(request) else residents).append(request)
    for group in sorted(by_class, reverse=True):
        keepers, residents = by_class[group]
        yield from sorted(keepers, key=lambda keeper: keeper.rank[1], reverse=True)
        yield from sorted(residents, key=key)


class FreedBlocks(Protocol):
    """Counts what a changing set of owners would free together; a shared block is freed when its last owner goes."""

    @property
    def count(self) -> int:
        """Blocks freed by the owners added and not taken out again."""

    def add(self, table: BlockTable) -> None:
        """Count an owner as gone."""

    def take_out(self, table: BlockTable) -> None:
        """Count an added owner as staying after all."""


def choose_victims(
    candidates: Iterable[Request],
    *,
    lacking_blocks: int,
    lacking_seats: int,
    freed: FreedBlocks,
    table_of: Callable[[Request], BlockTable],
    is_keeper: Callable[[Request], bool] = lambda _: False,
) -> list[Request]:
    """Choose who gives way, or nobody when all candidates together would not free what is lacking.

    candidates: in victim order. freed: an empty count. Nobody is chosen without whom the others suffice, except that
    whoever has given way already and holds blocks of its own gives them up before a resident of its class is touched.
    """
    chosen: list[Request] = []
    num_seats = 0
    alone: set[RequestId] = set()  # keepers who freed something when their turn came
    for candidate in candidates:
        if lacking_blocks <= 0 and is_keeper(candidate):
            continue  # only a seat is lacking, and it has none
        before = freed.count
        chosen.append(candidate)
        freed.add(table_of(candidate))
        if not is_keeper(candidate):
            num_seats += 1
        elif freed.count > before:
            alone.add(candidate.request_id)
        if num_seats >= lacking_seats and freed.count >= lacking_blocks:
            break
    else:
        return []
    touched = Counter(victim.rank[0] for victim in chosen if not is_keeper(victim))
    spared: set[RequestId] = set()
    for victim in chosen[-2::-1]:  # the last made the set suffice; spare the most urgent of the others first
        if victim.request_id in alone and touched[victim.rank[0]]:
            continue
        seat = 0 if is_keeper(victim) else 1
        freed.take_out(table_of(victim))
        if num_seats - seat >= lacking_seats and freed.count >= lacking_blocks:
            num_seats -= seat
            touched[victim.rank[0]] -= seat
            spared.add(victim.request_id)
        else:
            freed.add(table_of(victim))
    return [victim for victim in chosen if victim.request_id not in spared]
