"""One tier of numbered KV blocks: reference counts, free order, eviction order."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import compress, islice, pairwise
from math import isfinite
from operator import itemgetter, le
from typing import Generic, TypeVar

from giveway.core.errors import InvariantError

BlockId = TypeVar("BlockId", bound=int)

# Below this many blocks, inserting one by one beats sorting the whole free list again.
_FEW = 16

_IdleEntry = tuple[float, int, int]  # eviction key (s), number of the release, block; the first two order all of them
_block_of = itemgetter(2)


class BlockPool(Generic[BlockId]):
    """Blocks 0 .. size-1. A block is free (no content), idle (content findable, no owner) or owned (references > 0).

    Free blocks are handed out lowest number first, so that the blocks of one request stay neighbours and a swap is a
    few large copies. Idle blocks are handed out after the free ones, the smallest last_use_s - lead_s * class first:
    what one class used last is kept as long as what the next more urgent one used `lead_s` seconds earlier. A block
    counts with the most urgent class that has held it since it last had no owner.

    lead_s: 0 makes the longest unused block go first, whatever its class.
    """

    __slots__ = ("_cached", "_classes", "_free", "_idle", "_num_shared", "_references", "size")

    def __init__(self, size: int, *, lead_s: float = 0.0) -> None:
        self.size = size
        self._references = [0] * size
        self._classes = [0] * size  # of whoever holds the block, or held it last; means nothing for a free one
        self._free: list[int] = list(range(size - 1, -1, -1))  # descending: the lowest number is popped from the end
        self._idle = _IdleBlocks(lead_s)
        self._cached: set[int] = set()  # content is in the prefix index
        self._num_shared = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be taken: free and idle (blocks)."""
        return len(self._free) + len(self._idle)

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_owned(self) -> int:
        """Blocks with at least one reference."""
        return self.size - self.num_available

    @property
    def num_shared(self) -> int:
        """Blocks with two references or more."""
        return self._num_shared

    def references(self, block: BlockId) -> int:
        """Return how many tables and copies hold the block."""
        return self._references[block]

    def owned_blocks(self) -> Iterator[int]:
        """Yield the blocks with at least one reference, in order."""
        return compress(range(self.size), self._references)

    def peek_free(self, start: int, count: int) -> Sequence[int]:
        """Return up to `count` free blocks in hand-out order, leaving out the first `start`."""
        end = len(self._free) - start
        return self._free[max(end - count, 0) : max(end, 0)][::-1]

    def idle_blocks(self) -> Iterator[int]:
        """Iterate idle blocks in eviction order. Of no use any more once the pool has changed."""
        return iter(self._idle)

    def take(self, blocks: Sequence[BlockId], *, priority: int = 0) -> list[BlockId]:
        """Give each block its first reference, for a request of class `priority`.

        Returns those that held findable content, which is now lost.
        """
        evicted = []
        references, classes, free = self._references, self._classes, self._free
        for block in blocks:
            if free and free[-1] == block:
                del free[-1]
            elif references[block]:
                raise InvariantError(f"block {block} was to be taken but has {references[block]} references")
            elif block in self._cached:
                self._idle.remove(block, classes[block])
                self._cached.discard(block)
                evicted.append(block)
            else:
                self._remove_free(block)
            references[block] = 1
            classes[block] = priority
        return evicted

    def _remove_free(self, block: int) -> None:
        low, high = 0, len(self._free)
        while low < high:
            middle = (low + high) // 2
            if self._free[middle] > block:
                low = middle + 1
            else:
                high = middle
        if low == len(self._free) or self._free[low] != block:
            raise InvariantError(f"block {block} was to be taken but is not free")
        del self._free[low]

    def share(self, blocks: Iterable[BlockId], *, priority: int = 0) -> None:
        """Add a reference to each block, for a request of class `priority`.

        An idle block becomes owned again with its content, and its class starts anew.
        """
        references, classes = self._references, self._classes
        for block in blocks:
            held = references[block]
            if held:
                if held == 1:
                    self._num_shared += 1
                if priority < classes[block]:
                    classes[block] = priority
            else:
                if block not in self._cached:
                    raise InvariantError(f"block {block} was to be shared but holds nothing")
                self._idle.remove(block, classes[block])
                classes[block] = priority
            references[block] = held + 1

    def release(self, blocks: Sequence[BlockId], *, now_s: float = 0.0) -> None:
        """Drop one reference of each block. The last one gone, a findable block is idle, any other free.

        Blocks become idle from the last to the first: the tail of a prefix is of use to fewer requests than its head,
        so it is evicted first. now_s: when they were used last; earlier than in a former release counts as the same.
        """
        freed: list[int] = []
        unused: list[int] = []
        references, cached = self._references, self._cached
        for block in reversed(blocks):
            left = references[block] - 1
            if left < 0:
                raise InvariantError(f"block {block} was released more often than taken")
            references[block] = left
            if left == 0:
                (unused if block in cached else freed).append(block)
            elif left == 1:
                self._num_shared -= 1
        self._put_free(freed)
        if unused:
            self._idle.add(unused, self._classes, now_s)

    def _put_free(self, blocks: list[int]) -> None:
        if len(blocks) <= _FEW:
            for block in blocks:
                insort(self._free, block, key=_negative)
        else:
            self._free.extend(blocks)
            self._free.sort(reverse=True)

    def mark_cached(self, block: BlockId) -> None:
        """The content of an owned block can now be found in the prefix index."""
        if not self._references[block]:
            raise InvariantError(f"block {block} was published without an owner")
        self._cached.add(block)

    def unmark_cached(self, block: BlockId) -> None:
        """The content of a block is no longer in the prefix index; without an owner it becomes free."""
        if block not in self._cached:
            return
        self._cached.discard(block)
        if not self._references[block]:
            self._idle.remove(block, self._classes[block])
            self._put_free([block])

    def check(self) -> None:
        """Raise InvariantError unless every block is exactly one of free, idle, owned, and orders and counts agree."""
        if any(map(le, self._free, islice(self._free, 1, None))):
            raise InvariantError("the free list is not strictly descending: a block is in it twice or out of place")
        owned = set(self.owned_blocks())
        free, idle = set(self._free), set(self._idle)
        if len(free) + len(idle) + len(owned) != self.size or free | idle | owned != set(range(self.size)):
            raise InvariantError(
                f"blocks are lost or doubled: {len(free)} free + {len(idle)} idle + {len(owned)} owned != {self.size}"
            )
        if not idle <= self._cached or free & self._cached:
            raise InvariantError("idle blocks must be findable, and free blocks must not be")
        shared = self.size - self._references.count(0) - self._references.count(1)
        if shared != self._num_shared:
            raise InvariantError(f"{shared} blocks are shared but {self._num_shared} are counted")
        self._idle.check(self._classes)


class _IdleBlocks:
    """Blocks in eviction order: by last use minus lead, and those equal in it by order of release.

    Within one class that order is the order of release, because time only goes forward. So there is one queue per
    class, and the order of all is a merge of as many heads, of which a plan reads only the beginning.
    """

    __slots__ = ("_lead_s", "_now_s", "_num_released", "_queues")

    def __init__(self, lead_s: float) -> None:
        if not (isfinite(lead_s) and lead_s >= 0):
            raise InvariantError(f"an eviction lead of {lead_s} s a class cannot be ordered by")
        self._lead_s = lead_s
        self._now_s = 0.0
        self._num_released = 0
        # By class. Not plain dicts: finding the head of one walks over every block that was evicted from it before.
        self._queues: dict[int, OrderedDict[int, _IdleEntry]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[int]:
        return map(_block_of, merge(*(queue.values() for queue in self._queues.values() if queue)))

    def add(self, blocks: Sequence[int], classes: Sequence[int], now_s: float) -> None:
        """Put blocks, in order of release, where their classes (by block) place them."""
        self._now_s = max(self._now_s, now_s)
        queue, queue_class, key_s = OrderedDict[int, _IdleEntry](), None, 0.0
        for number, block in enumerate(blocks, self._num_released):
            if classes[block] != queue_class:
                queue_class = classes[block]
                queue = self._queues.setdefault(queue_class, OrderedDict())
                key_s = self._now_s - self._lead_s * queue_class
            queue[block] = (key_s, number, block)
        self._num_released += len(blocks)

    def remove(self, block: int, its_class: int) -> None:
        """Take a block of class `its_class` out, wherever it is."""
        del self._queues[its_class][block]

    def check(self, classes: Sequence[int]) -> None:
        """Raise InvariantError unless each block is in the queue of its class (by block), and each queue in order."""
        for its_class, queue in self._queues.items():
            entries = list(queue.values())
            if any(a >= b for a, b in pairwise(entries)):
                raise InvariantError(f"the idle blocks of class {its_class} are not in eviction order")
            if any(block != entry[2] or classes[block] != its_class for block, entry in queue.items()):
                raise InvariantError(f"an idle block is queued under class {its_class} which is not its class")


def _negative(block: int) -> int:
    return -block
