"""Who goes first, who may displace whom, and who gives way: the whole scheduling policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from giveway.core.config import SchedulingPolicy
from giveway.core.ids import BlockTable, RequestId
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
) -> list[Request]:
    """Choose who gives way, or nobody when all candidates together would not free what is lacking.

    candidates: in victim order. freed: an empty count. Nobody is chosen without whom the others suffice.
    """
    candidates = list(candidates)
    if lacking_blocks > sum(len(table_of(candidate)) for candidate in candidates):
        return []
    chosen: list[Request] = []
    for candidate in candidates:
        chosen.append(candidate)
        freed.add(table_of(candidate))
        if len(chosen) >= lacking_seats and freed.count >= lacking_blocks:
            break
    else:
        return []
    spared: set[RequestId] = set()
    for victim in chosen[-2::-1]:  # the last made the set suffice; spare the most urgent of the others first
        freed.take_out(table_of(victim))
        if len(chosen) - len(spared) - 1 >= lacking_seats and freed.count >= lacking_blocks:
            spared.add(victim.request_id)
        else:
            freed.add(table_of(victim))
    return [victim for victim in chosen if victim.request_id not in spared]
