"""Who goes first, who may displace whom, and the smallest set of victims: against brute force."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations

import pytest

from giveway.core.config import SchedulingPolicy
from giveway.core.ids import BlockTable, DeviceBlockId, RequestId
from giveway.core.policy import choose_victims, in_victim_order, may_displace, rank_of
from giveway.core.request import Request, RequestSpec

PRIORITY, FCFS, NONE = SchedulingPolicy.PRIORITY, SchedulingPolicy.FCFS, SchedulingPolicy.NONE


def make_request(
    name: str, priority: int, number: int, *, resident: bool = True, is_guest: bool = False, policy: SchedulingPolicy
) -> Request:
    request = Request(RequestSpec(RequestId(name), (1,), 1, priority), rank_of(priority, number, policy))
    if resident:
        request.admit(num_hit_tokens=0, is_guest=is_guest)
    return request


def test_priority_ranks_by_class_and_then_by_arrival() -> None:
    ranks = [rank_of(priority, number, PRIORITY) for number, priority in enumerate((5, 0, 5, 0))]
    assert sorted(range(4), key=lambda place: ranks[place]) == [1, 3, 0, 2]


def test_first_come_first_served_ranks_by_arrival_alone() -> None:
    assert rank_of(9, 0, FCFS) < rank_of(0, 1, FCFS)
    assert rank_of(9, 0, NONE) < rank_of(0, 1, NONE)


@pytest.mark.parametrize(
    ("policy", "resident", "is_guest", "priority", "expected"),
    [
        (PRIORITY, False, False, 9, True),  # a newcomer displaces a less urgent class
        (PRIORITY, False, False, 5, False),  # but never an equal
        (PRIORITY, False, True, 5, True),  # unless the equal was let in out of turn
        (PRIORITY, True, False, 5, True),  # a resident that grows displaces whoever ranks below it
        (PRIORITY, True, False, 1, False),  # and nobody above
        (FCFS, False, False, 9, False),  # arrival alone: a newcomer displaces nobody
        (FCFS, True, False, 1, True),
        (NONE, True, True, 9, False),  # the control: nobody gives way
    ],
)
def test_who_may_displace_whom(
    policy: SchedulingPolicy, resident: bool, is_guest: bool, priority: int, expected: bool
) -> None:
    mine = make_request("mine", 5, 0, resident=resident, policy=policy)
    other = make_request("other", priority, 1, is_guest=is_guest, policy=policy)
    assert may_displace(mine, other, policy) is expected


def test_nobody_displaces_itself() -> None:
    mine = make_request("mine", 5, 0, policy=PRIORITY)
    assert not may_displace(mine, mine, PRIORITY)


def test_the_least_urgent_gives_way_first_and_of_equals_the_newest() -> None:
    residents = [make_request(f"{p}.{n}", p, n, policy=PRIORITY) for p, n in ((0, 3), (5, 0), (5, 2), (9, 1))]
    assert [victim.request_id for victim in in_victim_order(residents)] == ["9.1", "5.2", "5.0", "0.3"]


class Pool:
    """Tables of candidates, and what a set of them would free."""

    def __init__(self, tables: dict[str, BlockTable]) -> None:
        self.tables = tables
        self.references = Counter(block for table in tables.values() for block in table)

    def table_of(self, request: Request) -> BlockTable:
        return self.tables[request.request_id]

    def num_freed_by(self, tables: Iterable[BlockTable], keep: Collection[DeviceBlockId]) -> int:
        dropped = Counter(block for table in tables for block in table)
        return sum(count == self.references[block] and block not in keep for block, count in dropped.items())

    def suffices(self, chosen: Sequence[Request], blocks: int, seats: int, keep: Collection[DeviceBlockId]) -> bool:
        return len(chosen) >= seats and self.num_freed_by([self.table_of(v) for v in chosen], keep) >= blocks


class RecountedBlocks:
    """The running count as an oracle would keep it: by counting everything anew."""

    def __init__(self, pool: Pool, keep: Collection[DeviceBlockId]) -> None:
        self._pool = pool
        self._keep = keep
        self._tables: list[BlockTable] = []

    @property
    def count(self) -> int:
        return self._pool.num_freed_by(self._tables, self._keep)

    def add(self, table: BlockTable) -> None:
        self._tables.append(table)

    def take_out(self, table: BlockTable) -> None:
        self._tables.remove(table)


@pytest.mark.parametrize("seed", range(200))
def test_victims_suffice_nobody_goes_in_vain_and_nobody_goes_if_all_would_not_suffice(seed: int) -> None:
    # Goal: agree with brute force over all subsets, with shared blocks and with blocks that the beneficiary keeps.
    rng = random.Random(seed)
    candidates = [make_request(f"v{n}", 9, n, policy=PRIORITY) for n in range(rng.randint(0, 5), 0, -1)]
    pool = Pool(
        {
            victim.request_id: tuple(DeviceBlockId(b) for b in sorted(rng.sample(range(8), rng.randint(1, 4))))
            for victim in candidates
        }
    )
    blocks, seats = rng.randint(0, 6), rng.randint(0, 2)
    if not blocks and not seats:
        seats = 1
    keep = frozenset(DeviceBlockId(b) for b in rng.sample(range(8), rng.randint(0, 2)))
    chosen = choose_victims(
        candidates,
        lacking_blocks=blocks,
        lacking_seats=seats,
        freed=RecountedBlocks(pool, keep),
        table_of=pool.table_of,
    )
    if not pool.suffices(candidates, blocks, seats, keep):
        assert chosen == []
        return
    assert pool.suffices(chosen, blocks, seats, keep)
    for count in range(len(chosen)):
        for fewer in combinations(chosen, count):
            assert not pool.suffices(fewer, blocks, seats, keep), f"{fewer} would have been enough"
    worst_possible = next(n for n in range(len(candidates) + 1) if pool.suffices(candidates[:n], blocks, seats, keep))
    assert set(chosen) <= set(candidates[:worst_possible]), "somebody more urgent than needed went"


def test_one_big_victim_spares_the_small_ones_that_would_not_have_been_enough() -> None:
    # Goal: three small equals newer than a big one: once the big one has to go, the small ones stay.
    candidates = [make_request(f"small{n}", 9, 10 - n, policy=PRIORITY) for n in range(3)]
    candidates.append(make_request("big", 9, 0, policy=PRIORITY))
    tables = {f"small{n}": (DeviceBlockId(n),) for n in range(3)}
    pool = Pool({**tables, "big": tuple(DeviceBlockId(b) for b in range(10, 18))})
    chosen = choose_victims(
        candidates, lacking_blocks=5, lacking_seats=0, freed=RecountedBlocks(pool, ()), table_of=pool.table_of
    )
    assert [victim.request_id for victim in chosen] == ["big"]


def test_of_two_that_could_be_spared_the_more_urgent_one_is() -> None:
    candidates = [make_request(name, 9, number, policy=PRIORITY) for name, number in (("a", 3), ("b", 2), ("big", 1))]
    pool = Pool(
        {"a": (DeviceBlockId(0),), "b": (DeviceBlockId(1),), "big": tuple(DeviceBlockId(b) for b in range(10, 13))}
    )
    chosen = choose_victims(
        candidates, lacking_blocks=4, lacking_seats=0, freed=RecountedBlocks(pool, ()), table_of=pool.table_of
    )
    assert [victim.request_id for victim in chosen] == ["a", "big"]
