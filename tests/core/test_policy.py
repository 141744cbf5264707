"""Who goes first, who may displace whom, and the smallest set of victims: against brute force."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations

import pytest

from giveway.core.config import SchedulingPolicy, VictimOrder
from giveway.core.ids import BlockTable, DeviceBlockId, RequestId
from giveway.core.policy import aged_class, choose_victims, in_victim_order, may_displace, may_take_kept, rank_of
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


def has_paid(request: Request) -> Request:
    request.has_paid = True
    return request


def test_whoever_has_paid_gives_way_to_other_classes_only() -> None:
    grows = make_request("grows", 5, 0, policy=PRIORITY)
    assert not may_displace(grows, has_paid(make_request("equal", 5, 1, policy=PRIORITY)), PRIORITY)
    assert may_displace(grows, has_paid(make_request("lower", 9, 1, policy=PRIORITY)), PRIORITY)
    newcomer = make_request("newcomer", 5, 0, resident=False, policy=PRIORITY)
    guest = has_paid(make_request("guest", 5, 1, is_guest=True, policy=PRIORITY))
    assert may_displace(newcomer, guest, PRIORITY)


@pytest.mark.parametrize(
    ("policy", "resident", "priority", "number", "expected"),
    [
        (PRIORITY, False, 9, 1, True),  # everybody ranked above may, also a newcomer
        (PRIORITY, False, 5, 3, True),  # of its own class too
        (PRIORITY, False, 5, 1, False),  # but not of one ranked above
        (PRIORITY, True, 5, 1, True),  # a resident may: it computes and the other does not
        (PRIORITY, True, 1, 1, False),  # a more urgent class is out of reach all the same
        (FCFS, False, 0, 1, False),
        (FCFS, False, 9, 3, True),
        (FCFS, True, 0, 1, True),
        (NONE, True, 9, 3, False),
    ],
)
def test_who_may_take_what_another_has_kept(
    policy: SchedulingPolicy, resident: bool, priority: int, number: int, expected: bool
) -> None:
    mine = make_request("mine", 5, 2, resident=resident, policy=policy)
    keeper = make_request("keeper", priority, number, resident=False, policy=policy)
    assert may_take_kept(mine, keeper, policy) is expected


@pytest.mark.parametrize(
    ("priority", "num_spans", "expected"), [(9, 0, 9), (9, 1, 8), (9, 3, 6), (9, 9, 0), (9, 1000, 0), (0, 5, 0)]
)
def test_a_class_counts_as_one_lower_for_every_span_of_waiting_down_to_the_first(
    priority: int, num_spans: int, expected: int
) -> None:
    assert aged_class(priority, num_spans) == expected


# The order in which residents give way


def in_order(
    candidates: Sequence[Request],
    order: VictimOrder = VictimOrder.NEWEST,
    *,
    keepers: Collection[str] = (),
    prices: dict[str, float] | None = None,
    settle_tokens: int = 4,
) -> list[str]:
    asked: list[str] = []

    def price(request: Request) -> float:
        asked.append(request.request_id)
        return (prices or {}).get(request.request_id, 0.0)

    victims = in_victim_order(
        candidates,
        order,
        settle_tokens=settle_tokens,
        is_keeper=lambda request: request.request_id in keepers,
        price=price,
    )
    assert len(asked) == len(set(asked)), "a price was asked for twice"
    assert not set(asked) & set(keepers)
    return [victim.request_id for victim in victims]


def settling(request: Request, *, own_tokens: int = 1) -> Request:
    """It gave way and came back, and has emitted nothing since."""
    request.compute(1)
    request.preempt()
    request.admit(num_hit_tokens=0, is_guest=False)
    request.compute(own_tokens)
    return request


def test_the_least_urgent_gives_way_first_and_of_equals_the_newest() -> None:
    residents = [make_request(f"{p}.{n}", p, n, policy=PRIORITY) for p, n in ((0, 3), (5, 0), (5, 2), (9, 1))]
    assert in_order(residents) == ["9.1", "5.2", "5.0", "0.3"]


@pytest.mark.parametrize("order", VictimOrder)
def test_the_class_decides_before_anything_else(order: VictimOrder) -> None:
    urgent, lower = make_request("urgent", 0, 0, policy=PRIORITY), make_request("lower", 9, 1, policy=PRIORITY)
    assert in_order([urgent, settling(lower)], order, prices={"urgent": 1.0, "lower": 99.0}) == ["lower", "urgent"]
    assert in_order([urgent, lower], order, keepers=("urgent",), prices={"lower": 99.0}) == ["lower", "urgent"]


@pytest.mark.parametrize("order", [VictimOrder.LEAST_WORK, VictimOrder.CHEAPEST])
def test_inside_a_class_the_smaller_price_goes_first_and_ties_go_to_the_latest_arrival(order: VictimOrder) -> None:
    residents = [make_request(f"r{n}", 5, n, policy=PRIORITY) for n in range(4)]
    prices = {"r0": 1.0, "r1": 3.0, "r2": 1.0, "r3": 2.0}
    assert in_order(residents, order, prices=prices) == ["r2", "r0", "r3", "r1"]


def test_the_newest_goes_first_whatever_it_costs() -> None:
    residents = [make_request(f"r{n}", 5, n, policy=PRIORITY) for n in range(3)]
    assert in_order(residents, prices={"r2": 99.0, "r0": 0.0}) == ["r2", "r1", "r0"]


def test_who_has_given_way_already_goes_before_the_residents_of_its_class_and_who_just_came_back_last() -> None:
    residents = [make_request(f"r{n}", 5, n, policy=PRIORITY) for n in range(3)]
    settling(residents[2])
    keeper = make_request("keeper", 5, 9, resident=False, policy=PRIORITY)
    older = make_request("older", 5, 7, resident=False, policy=PRIORITY)
    assert in_order([older, keeper, *residents], keepers=("keeper", "older")) == ["keeper", "older", "r1", "r0", "r2"]


def test_one_that_just_came_back_and_computed_nothing_yet_is_not_spared() -> None:
    # Goal: taking its admission back loses nothing.
    residents = [make_request(f"r{n}", 5, n, policy=PRIORITY) for n in range(2)]
    settling(residents[1], own_tokens=0)
    assert in_order(residents) == ["r1", "r0"]
    residents[1].compute(1)
    assert in_order(residents) == ["r0", "r1"]
    assert in_order(residents, settle_tokens=0) == ["r1", "r0"]


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


# Keepers: those who have given way already, hold no seat, and kept blocks


def choose(
    candidates: Sequence[Request], pool: Pool, *, blocks: int, seats: int = 0, keepers: Collection[str] = ()
) -> list[str]:
    chosen = choose_victims(
        candidates,
        lacking_blocks=blocks,
        lacking_seats=seats,
        freed=RecountedBlocks(pool, ()),
        table_of=pool.table_of,
        is_keeper=lambda request: request.request_id in keepers,
    )
    return [victim.request_id for victim in chosen]


def table(*numbers: int) -> BlockTable:
    return tuple(DeviceBlockId(number) for number in numbers)


def named(*names: str, priority: int = 9) -> list[Request]:
    return [make_request(name, priority, 9 - place, policy=PRIORITY) for place, name in enumerate(names)]


def test_a_keeper_has_no_seat_to_give() -> None:
    candidates = named("keeper", "resident")
    pool = Pool({"keeper": table(0, 1, 2), "resident": table(3)})
    assert choose(candidates, pool, blocks=0, seats=1, keepers=("keeper",)) == ["resident"]
    assert choose(candidates[:1], pool, blocks=0, seats=1, keepers=("keeper",)) == []
    assert choose(candidates, pool, blocks=2, seats=1, keepers=("keeper",)) == ["keeper", "resident"]


def test_nothing_but_blocks_is_lacking_and_the_keeper_alone_gives_them() -> None:
    pool = Pool({"keeper": table(0, 1), "resident": table(2, 3, 4)})
    assert choose(named("keeper", "resident"), pool, blocks=2, keepers=("keeper",)) == ["keeper"]


def test_a_keeper_gives_up_its_blocks_before_a_resident_of_its_class_is_touched() -> None:
    # Goal: the resident alone would have been enough, but at most one of a class is left with a part of its KV.
    pool = Pool({"keeper": table(0), "resident": table(1, 2, 3)})
    assert choose(named("keeper", "resident"), pool, blocks=3, keepers=("keeper",)) == ["keeper", "resident"]


def test_a_keeper_is_spared_when_only_a_more_urgent_class_has_to_be_touched() -> None:
    keeper, resident = make_request("keeper", 9, 1, policy=PRIORITY), make_request("resident", 5, 0, policy=PRIORITY)
    pool = Pool({"keeper": table(0), "resident": table(1, 2, 3)})
    assert choose([keeper, resident], pool, blocks=3, keepers=("keeper",)) == ["resident"]


def test_a_keeper_whose_blocks_others_hold_too_gives_nothing_in_vain() -> None:
    pool = Pool({"keeper": table(0), "resident": table(1, 2), "other": table(0)})
    assert choose(named("keeper", "resident"), pool, blocks=2, keepers=("keeper",)) == ["resident"]


def test_seats_alone_take_as_many_residents_as_are_lacking() -> None:
    pool = Pool({"a": table(0), "b": table(1), "c": table(2)})
    assert choose(named("a", "b", "c"), pool, blocks=0, seats=2) == ["a", "b"]
    assert choose(named("a", "b", "c"), pool, blocks=-3, seats=1) == ["a"]
    assert choose(named("a", "b", "c"), pool, blocks=0, seats=4) == []


@pytest.mark.parametrize("seed", range(200))
def test_with_keepers_too_victims_suffice_and_only_keepers_go_beyond_what_is_needed(seed: int) -> None:
    # Oracle: try to leave out any one of the chosen. Only a keeper of a class that loses a resident may be superfluous.
    rng = random.Random(seed)
    candidates = [make_request(f"v{n}", rng.choice([5, 9]), n, policy=PRIORITY) for n in range(rng.randint(1, 6))]
    keepers = {victim.request_id for victim in candidates if rng.random() < 0.4}
    candidates.sort(key=lambda v: (-v.rank[0], v.request_id not in keepers, -v.rank[1]))
    pool = Pool({v.request_id: table(*sorted(rng.sample(range(9), rng.randint(1, 4)))) for v in candidates})
    blocks, seats = rng.randint(0, 6), rng.randint(0, 2)
    if not blocks and not seats:
        seats = 1
    chosen = choose(candidates, pool, blocks=blocks, seats=seats, keepers=keepers)

    def suffices(names: Sequence[str]) -> bool:
        freed = pool.num_freed_by([pool.tables[name] for name in names], ())
        return freed >= blocks and sum(name not in keepers for name in names) >= seats

    if not suffices([v.request_id for v in candidates]):
        assert chosen == []
        return
    assert suffices(chosen)
    group: dict[str, int] = {v.request_id: v.rank[0] for v in candidates}
    touched = {group[name] for name in chosen if name not in keepers}
    for name in chosen:
        if suffices([other for other in chosen if other != name]):
            assert name in keepers
            assert group[name] in touched
    if not blocks:
        assert not set(chosen) & keepers
