"""Who goes first, who may displace whom, and who gives way: the whole scheduling policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from giveway.core.config import SchedulingPolicy
from giveway.core.ids import BlockTable, DeviceBlockId
from giveway.core.request import Rank, Request


def rank_of(priority: int, arrival_number: int, policy: SchedulingPolicy) -> Rank:
    """Return the one key that orders admission and, read backwards, preemption; unique by the arrival number."""
    return (priority if policy is SchedulingPolicy.PRIORITY else 0, arrival_number)


def may_displace(request: Request, victim: Request, policy: SchedulingPolicy) -> bool:
    """Whether `request` may take blocks or the seat of `victim`, a resident.

    A resident that has to grow may displace anybody ranked below it. A newcomer may displace a strictly less urgent
    class, and within its own class only guests, who were let in out of turn.
    """
    if policy is SchedulingPolicy.NONE or victim.rank <= request.rank:
        return False
    if request.state is request.state.RUNNING:
        return True
    return victim.rank[0] > request.rank[0] or victim.is_guest


def in_victim_order(residents: Sequence[Request]) -> Iterable[Request]:
    """Order residents, given in rank order, by who gives way first: the least urgent class, in it the newest.

    The newest has least to lose (last in, first out), and returns ahead of everybody of its class who came later.
    """
    return reversed(residents)


def choose_victims(
    candidates: Iterable[Request],
    *,
    lacking_blocks: int,
    lacking_seats: int,
    keep: Collection[DeviceBlockId],
    table_of: Callable[[Request], BlockTable],
    num_freed_by: Callable[[Iterable[BlockTable], Collection[DeviceBlockId]], int],
) -> list[Request]:
    """Choose who gives way, or nobody when all candidates together would not free what is lacking.

    candidates: in victim order. keep: blocks the beneficiary shares itself, which free no room for it.
    Nobody is chosen without whom the others suffice.
    """

    def suffices(victims: Sequence[Request]) -> bool:
        return len(victims) >= lacking_seats and (
            lacking_blocks <= 0 or num_freed_by([table_of(victim) for victim in victims], keep) >= lacking_blocks
        )

    chosen: list[Request] = []
    for candidate in candidates:
        chosen.append(candidate)
        if suffices(chosen):
            break
    else:
        return []
    for victim in chosen[-2::-1]:  # the last made the set suffice; spare the most urgent of the others first
        fewer = [other for other in chosen if other is not victim]
        if suffices(fewer):
            chosen = fewer
    return chosen
