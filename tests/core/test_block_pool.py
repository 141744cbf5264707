"""The block pool against an oracle that is too simple to be wrong, and the mistakes that a pool must refuse."""

from __future__ import annotations

import random

import pytest

from giveway.core.block_pool import BlockPool
from giveway.core.errors import InvariantError
from giveway.core.ids import DeviceBlockId


def ids(*numbers: int) -> list[DeviceBlockId]:
    return [DeviceBlockId(number) for number in numbers]


class Oracle:
    """What a pool should be, as three plain collections."""

    def __init__(self, size: int) -> None:
        self.references = dict.fromkeys(range(size), 0)
        self.cached: set[int] = set()
        self.idle: list[int] = []  # longest unused first

    def hand_out_order(self) -> list[int]:
        free = [b for b, count in self.references.items() if not count and b not in self.cached]
        return sorted(free) + self.idle

    def take(self, blocks: list[DeviceBlockId]) -> list[int]:
        evicted: list[int] = [b for b in blocks if b in self.cached]
        for block in blocks:
            self.references[block] = 1
        self.cached -= set(evicted)
        self.idle = [b for b in self.idle if b not in evicted]
        return evicted

    def share(self, blocks: list[DeviceBlockId]) -> None:
        for block in blocks:
            self.references[block] += 1
            if block in self.idle:
                self.idle.remove(block)

    def release(self, blocks: list[DeviceBlockId]) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block] and block in self.cached:
                self.idle.append(block)

    def unmark(self, block: DeviceBlockId) -> None:
        self.cached.discard(block)
        if block in self.idle:
            self.idle.remove(block)


@pytest.mark.parametrize("seed", range(20))
def test_a_pool_does_what_three_plain_collections_do(seed: int) -> None:
    # Goal: hand-out order, eviction order and counts agree with the oracle after every one of 300 random operations.
    rng = random.Random(seed)
    size = rng.choice([1, 5, 40])
    pool: BlockPool[DeviceBlockId] = BlockPool(size)
    oracle = Oracle(size)
    tables: list[list[DeviceBlockId]] = []
    for _ in range(300):
        choice = rng.random()
        if choice < 0.35 and pool.num_available:
            table = ids(*oracle.hand_out_order()[: rng.randint(1, pool.num_available)])
            assert sorted(pool.take(table)) == sorted(oracle.take(table))
            tables.append(table)
        elif choice < 0.5 and (findable := [*oracle.idle, *(b for t in tables for b in t)]):
            table = ids(*set(rng.sample(findable, rng.randint(1, len(findable)))))
            pool.share(table)
            oracle.share(table)
            tables.append(table)
        elif choice < 0.65 and tables:
            for block in rng.choice(tables):
                pool.mark_cached(block)
                oracle.cached.add(block)
        elif choice < 0.7:
            block = DeviceBlockId(rng.randrange(size))
            pool.unmark_cached(block)
            oracle.unmark(block)
        elif tables:
            table = tables.pop(rng.randrange(len(tables)))
            pool.release(table)
            oracle.release(table)
        pool.check()
        assert [pool.references(DeviceBlockId(b)) for b in range(size)] == list(oracle.references.values())
        assert [*pool.peek_free(0, size), *pool.idle_blocks()] == oracle.hand_out_order()
        assert pool.num_available == len(oracle.hand_out_order()) == size - pool.num_owned


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
    pool.take(ids(0))
    pool.mark_cached(DeviceBlockId(0))
    pool.release(ids(0))
    assert pool.is_idle(DeviceBlockId(0))
    assert pool.num_free == 0
    assert pool.num_available == 1
    assert pool.take(ids(0)) == [0]
    pool.release(ids(0))
    assert pool.num_free == 1
