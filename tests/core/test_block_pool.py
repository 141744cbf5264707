"""The block pool against an oracle that is too simple to be wrong, and the mistakes that a pool must refuse."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from giveway.core.block_pool import BlockPool
from giveway.core.errors import InvariantError
from giveway.core.ids import DeviceBlockId


def ids(*numbers: int) -> list[DeviceBlockId]:
    return [DeviceBlockId(number) for number in numbers]


class Oracle:
    """What a pool should be: one dict per block, and sorting for every question about order."""

    def __init__(self, size: int, lead_s: float) -> None:
        self.blocks: list[dict[str, Any]] = [{"id": block, "references": 0, "cached": False} for block in range(size)]
        self.lead_s = lead_s
        self.num_released = 0

    def is_idle(self, block: int) -> bool:
        return bool(not self.blocks[block]["references"] and self.blocks[block]["cached"])

    def free(self) -> list[int]:
        return [b["id"] for b in self.blocks if not b["references"] and not b["cached"]]

    def idle(self) -> list[int]:
        """Smallest last use minus lead first; of equals, whichever was released first."""
        idle = [b for b in self.blocks if self.is_idle(b["id"])]
        return [b["id"] for b in sorted(idle, key=lambda b: (b["used_s"] - self.lead_s * b["class"], b["released"]))]

    def take(self, blocks: list[DeviceBlockId], priority: int) -> list[int]:
        evicted: list[int] = [block for block in blocks if self.blocks[block]["cached"]]
        for block in blocks:
            self.blocks[block] |= {"references": 1, "cached": False, "class": priority}
        return evicted

    def share(self, blocks: list[DeviceBlockId], priority: int) -> None:
        for block in blocks:
            seen = self.blocks[block]
            seen["class"] = min(seen["class"], priority) if seen["references"] else priority
            seen["references"] += 1

    def release(self, blocks: list[DeviceBlockId], now_s: float) -> None:
        for block in reversed(blocks):
            self.num_released += 1
            seen = self.blocks[block]
            seen |= {"references": seen["references"] - 1, "used_s": now_s, "released": self.num_released}


def a_random_operation(
    rng: random.Random,
    pool: BlockPool[DeviceBlockId],
    oracle: Oracle,
    tables: list[list[DeviceBlockId]],
    now_s: float,
) -> None:
    """Do one thing to both, the way the scheduler would, and compare what it returns."""
    choice, priority = rng.random(), rng.choice([0, 1, 10, 11, 100])
    if choice < 0.35 and pool.num_available:
        in_order = [*oracle.free(), *oracle.idle()]
        if rng.random() < 0.1:
            rng.shuffle(in_order)  # a plan that revives some idle blocks takes others out of turn
        table = ids(*in_order[: rng.randint(1, pool.num_available)])
        assert sorted(pool.take(table, priority=priority)) == sorted(oracle.take(table, priority))
        tables.append(table)
    elif choice < 0.5 and (findable := [*oracle.idle(), *(b for t in tables for b in t)]):
        table = ids(*set(rng.sample(findable, rng.randint(1, len(findable)))))
        pool.share(table, priority=priority)
        oracle.share(table, priority)
        tables.append(table)
    elif choice < 0.65 and tables:
        for block in rng.choice(tables):
            pool.mark_cached(block)
            oracle.blocks[block]["cached"] = True
    elif choice < 0.7:
        block = DeviceBlockId(rng.randrange(pool.size))
        pool.unmark_cached(block)
        oracle.blocks[block]["cached"] = False
    elif tables:
        table = tables.pop(rng.randrange(len(tables)))
        pool.release(table, now_s=now_s)
        oracle.release(table, now_s)


@pytest.mark.parametrize("lead_s", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("seed", range(12))
def test_a_pool_does_what_a_list_of_dicts_does(seed: int, lead_s: float) -> None:
    # Goal: hand-out order, eviction order and counts agree with the oracle after every one of 400 random operations,
    # whether time runs or stands still.
    rng = random.Random(seed)
    size = rng.choice([1, 5, 40])
    pool: BlockPool[DeviceBlockId] = BlockPool(size, lead_s=lead_s)
    oracle = Oracle(size, lead_s)
    tables: list[list[DeviceBlockId]] = []
    now_s = 0.0
    for _ in range(400):
        now_s += rng.choice([0.0, 0.0, 0.5, 7.3])
        a_random_operation(rng, pool, oracle, tables, now_s)
        pool.check()
        references = [seen["references"] for seen in oracle.blocks]
        assert [pool.references(DeviceBlockId(block)) for block in range(size)] == references
        assert list(pool.idle_blocks()) == oracle.idle()
        assert list(pool.peek_free(0, size)) == oracle.free()
        assert pool.num_available == len(oracle.free()) + len(oracle.idle()) == size - pool.num_owned
        assert pool.num_shared == sum(count > 1 for count in references)


def make_idle(pool: BlockPool[DeviceBlockId], *blocks: int, priority: int, now_s: float) -> None:
    """Let a request of class `priority` use the blocks, and end at `now_s`."""
    pool.take(ids(*blocks), priority=priority)
    for block in ids(*blocks):
        pool.mark_cached(block)
    pool.release(ids(*blocks), now_s=now_s)


def test_without_a_lead_the_longest_unused_block_goes_first_whatever_its_class() -> None:
    pool: BlockPool[DeviceBlockId] = BlockPool(3)
    make_idle(pool, 0, priority=0, now_s=1.0)
    make_idle(pool, 1, priority=100, now_s=2.0)
    make_idle(pool, 2, priority=10, now_s=2.0)
    assert list(pool.idle_blocks()) == [0, 1, 2]


def test_an_urgent_block_outlives_a_less_urgent_one_by_its_lead_but_not_for_ever() -> None:
    # Goal: 10 classes of 2 s each keep a block of class 0 for 20 s longer than one of class 10.
    pool: BlockPool[DeviceBlockId] = BlockPool(3, lead_s=2.0)
    make_idle(pool, 0, priority=0, now_s=0.0)
    make_idle(pool, 1, priority=10, now_s=19.0)
    make_idle(pool, 2, priority=10, now_s=21.0)
    assert list(pool.idle_blocks()) == [1, 0, 2]


def test_a_block_counts_with_the_most_urgent_of_those_who_held_it_together() -> None:
    # Goal: that the urgent holder leaves before the other one does not make the block cheaper.
    pool: BlockPool[DeviceBlockId] = BlockPool(2, lead_s=1.0)
    pool.take(ids(0), priority=50)
    pool.mark_cached(DeviceBlockId(0))
    pool.share(ids(0), priority=5)
    pool.share(ids(0), priority=60)
    for _ in range(3):
        pool.release(ids(0), now_s=0.0)
    make_idle(pool, 1, priority=50, now_s=44.0)
    assert list(pool.idle_blocks()) == [1, 0]
    make_idle(pool, 1, priority=50, now_s=46.0)
    assert list(pool.idle_blocks()) == [0, 1]


def test_an_idle_block_that_is_shared_again_takes_the_class_of_its_new_user() -> None:
    # Goal: what once was urgent does not stay so for ever on the strength of background work.
    pool: BlockPool[DeviceBlockId] = BlockPool(2, lead_s=1.0)
    make_idle(pool, 0, priority=0, now_s=0.0)
    pool.share(ids(0), priority=90)
    pool.release(ids(0), now_s=1.0)
    make_idle(pool, 1, priority=50, now_s=1.0)
    assert list(pool.idle_blocks()) == [0, 1]


def test_a_clock_that_went_back_leaves_blocks_in_the_order_of_their_release() -> None:
    pool: BlockPool[DeviceBlockId] = BlockPool(3, lead_s=1.0)
    for block, now_s in enumerate([5.0, 3.0, 4.0]):
        make_idle(pool, block, priority=10, now_s=now_s)
    pool.check()
    assert list(pool.idle_blocks()) == [0, 1, 2]


def test_looking_at_the_eviction_order_changes_nothing() -> None:
    # Goal: a plan looks as far as it needs; what it does not carry out leaves no trace.
    pool: BlockPool[DeviceBlockId] = BlockPool(2, lead_s=1.0)
    make_idle(pool, 0, priority=10, now_s=1.0)
    make_idle(pool, 1, priority=0, now_s=1.0)
    assert next(pool.idle_blocks()) == 0
    assert list(pool.idle_blocks()) == [0, 1]
    assert pool.num_available == 2
    pool.check()


def test_a_block_counts_as_shared_from_its_second_reference_to_its_last_but_one() -> None:
    pool: BlockPool[DeviceBlockId] = BlockPool(3)
    pool.take(ids(0, 1))
    assert pool.num_shared == 0
    pool.share(ids(0))
    pool.share(ids(0))
    assert pool.num_shared == 1
    pool.release(ids(0, 1))
    assert pool.num_shared == 1
    pool.release(ids(0))
    assert pool.num_shared == 0


def miscount_shared(pool: BlockPool[DeviceBlockId]) -> None:
    pool._num_shared += 1


def change_the_class_of_an_idle_block(pool: BlockPool[DeviceBlockId]) -> None:
    pool._classes[0] = 3


def put_the_newest_first(pool: BlockPool[DeviceBlockId]) -> None:
    pool._idle._queues[10].move_to_end(1, last=False)


@pytest.mark.parametrize("damage", [miscount_shared, change_the_class_of_an_idle_block, put_the_newest_first])
def test_the_check_finds_counts_and_orders_that_are_wrong(damage: Callable[[BlockPool[DeviceBlockId]], None]) -> None:
    pool: BlockPool[DeviceBlockId] = BlockPool(2, lead_s=1.0)
    for block in (0, 1):
        make_idle(pool, block, priority=10, now_s=1.0)
    pool.check()
    damage(pool)
    with pytest.raises(InvariantError):
        pool.check()


@pytest.mark.parametrize("lead_s", [-1.0, float("inf"), float("nan")])
def test_a_lead_that_orders_nothing_is_refused(lead_s: float) -> None:
    with pytest.raises(InvariantError, match="lead"):
        BlockPool(1, lead_s=lead_s)


def test_free_blocks_come_lowest_number_first_so_that_runs_stay_long() -> None:
    pool: BlockPool[DeviceBlockId] = BlockPool(6)
    pool.take(ids(0, 1, 2, 3))
    pool.release(ids(3, 1))
    assert list(pool.peek_free(0, 9)) == [1, 3, 4, 5]
    assert list(pool.peek_free(1, 2)) == [3, 4]
    assert list(pool.peek_free(4, 2)) == []


def test_many_blocks_released_at_once_are_sorted_in_as_one_by_one_would_be() -> None:
    pool: BlockPool[DeviceBlockId] = BlockPool(100)
    everything = ids(*range(100))
    pool.take(everything)
    random.Random(1).shuffle(everything)
    pool.release(everything)
    assert list(pool.peek_free(0, 100)) == list(range(100))
    pool.check()


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    # Goal: the head of a prefix is of use to more requests than its tail.
    pool: BlockPool[DeviceBlockId] = BlockPool(3)
    table = ids(0, 1, 2)
    pool.take(table)
    for block in table:
        pool.mark_cached(block)
    pool.release(table)
    assert list(pool.idle_blocks()) == [2, 1, 0]


def test_a_block_released_twice_in_one_list_is_refused_and_not_queued_twice() -> None:
    pool: BlockPool[DeviceBlockId] = BlockPool(2)
    pool.take(ids(0))
    with pytest.raises(InvariantError, match="released more often"):
        pool.release(ids(0, 0))


def test_a_block_taken_twice_is_refused() -> None:
    pool: BlockPool[DeviceBlockId] = BlockPool(2)
    pool.take(ids(1))
    with pytest.raises(InvariantError, match="has 1 references"):
        pool.take(ids(1))


def test_a_free_block_cannot_be_shared_for_it_holds_nothing() -> None:
    pool: BlockPool[DeviceBlockId] = BlockPool(2)
    with pytest.raises(InvariantError, match="holds nothing"):
        pool.share(ids(0))


def test_a_block_without_owner_cannot_be_published() -> None:
    pool: BlockPool[DeviceBlockId] = BlockPool(2)
    with pytest.raises(InvariantError, match="without an owner"):
        pool.mark_cached(DeviceBlockId(0))


def test_an_idle_block_keeps_its_content_until_it_is_taken_and_then_says_so() -> None:
    pool: BlockPool[DeviceBlockId] = BlockPool(1)
    make_idle(pool, 0, priority=0, now_s=0.0)
    assert list(pool.idle_blocks()) == [0]
    assert list(pool.peek_free(0, 1)) == []
    assert pool.num_available == 1
    assert pool.take(ids(0)) == [0]
    pool.release(ids(0))
    assert list(pool.idle_blocks()) == []
    assert list(pool.peek_free(0, 1)) == [0]
