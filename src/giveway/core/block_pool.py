"""One tier of numbered KV blocks: reference counts, free order, eviction order."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

from giveway.core.errors import InvariantError

BlockId = TypeVar("BlockId", bound=int)

# Below this many blocks, inserting one by one beats sorting the whole free list again.
_FEW = 16


class BlockPool(Generic[BlockId]):
    """Blocks 0 .. size-1. A block is free (no content), idle (content findable, no owner) or owned (references > 0).

    Free blocks are handed out lowest number first, so that the blocks of one request stay neighbours and a swap is a
    few large copies. Idle blocks are handed out after the free ones, the longest unused first.
    """

    __slots__ = ("_cached", "_free", "_idle", "_references", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._references = [0] * size
        self._free: list[int] = list(range(size - 1, -1, -1))  # descending: the lowest number is popped from the end
        self._idle: dict[int, None] = {}  # insertion order = order of last use
        self._cached: set[int] = set()  # content is in the prefix index

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

    def references(self, block: BlockId) -> int:
        """Return how many tables and copies hold the block."""
        return self._references[block]

    def is_idle(self, block: BlockId) -> bool:
        """Whether the block has findable content and no owner."""
        return block in self._idle

    def peek_free(self, start: int, count: int) -> Sequence[int]:
        """Return up to `count` free blocks in hand-out order, leaving out the first `start`."""
        end = len(self._free) - start
        return self._free[max(end - count, 0) : max(end, 0)][::-1]

    def idle_blocks(self) -> Iterator[int]:
        """Iterate idle blocks, the longest unused first."""
        return iter(self._idle)

    def take(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Give each block its first reference. Returns those that held findable content, which is now lost."""
        evicted = []
        free = self._free
        for block in blocks:
            if self._references[block]:
                raise InvariantError(f"block {block} was to be taken but has {self._references[block]} references")
            if free and free[-1] == block:
                free.pop()
            elif block in self._idle:
                del self._idle[block]
                self._cached.discard(block)
                evicted.append(block)
            else:
                self._remove_free(block)
            self._references[block] = 1
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

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to each block; an idle one becomes owned again with its content."""
        for block in blocks:
            if not self._references[block]:
                if block not in self._idle:
                    raise InvariantError(f"block {block} was to be shared but holds nothing")
                del self._idle[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference of each block. The last one gone, a findable block is idle, any other free.

        Blocks become idle from the last to the first: the tail of a prefix is of use to fewer requests than its head,
        so it is evicted first.
        """
        freed: list[int] = []
        references, cached = self._references, self._cached
        for block in reversed(blocks):
            left = references[block] - 1
            if left < 0:
                raise InvariantError(f"block {block} was released more often than taken")
            references[block] = left
            if left == 0:
                if block in cached:
                    self._idle[block] = None
                else:
                    freed.append(block)
        self._put_free(freed)

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
        self._cached.discard(block)
        if block in self._idle:
            del self._idle[block]
            self._put_free([block])

    def check(self) -> None:
        """Raise InvariantError unless every block is exactly one of free, idle, owned."""
        if any(a <= b for a, b in pairwise(self._free)):
            raise InvariantError("the free list is not strictly descending: a block is in it twice or out of place")
        owned = {block for block, count in enumerate(self._references) if count}
        free, idle = set(self._free), set(self._idle)
        if len(free) + len(idle) + len(owned) != self.size or free | idle | owned != set(range(self.size)):
            raise InvariantError(
                f"blocks are lost or doubled: {len(free)} free + {len(idle)} idle + {len(owned)} owned != {self.size}"
            )
        if not idle <= self._cached or free & self._cached:
            raise InvariantError("idle blocks must be findable, and free blocks must not be")


def _negative(block: int) -> int:
    return -block
