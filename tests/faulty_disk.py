"""A disk tier in memory whose troubles can be ordered: for tests of what the scheduler makes of them.

The real file, with real faults, has tests of its own and takes part in the long soak.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto

from giveway.core.errors import DeviceFaultError, InvariantError
from giveway.core.ids import DiskBlockId
from giveway.runtime.disk_tier import DiskTier


class Trouble(Enum):
    NONE = auto()
    FULL = auto()  # no write succeeds
    HALF_WRITTEN = auto()  # a write breaks off after its first block
    UNREADABLE = auto()  # no read succeeds


class FaultyDisk(DiskTier):
    """Blocks in a dictionary. A block that was never written, or not wholly, cannot be read."""

    def __init__(self, num_blocks: int, block_size: int) -> None:  # no file: nothing of the parent is set up
        self._num_blocks = num_blocks
        self._contents: dict[int, bytes] = {}
        self.trouble = Trouble.NONE
        self.num_faults = 0

    def write(self, blocks: Sequence[DiskBlockId], contents: Iterable[memoryview]) -> None:  # type: ignore[override]
        for block in blocks:
            self._check(block)
            self._contents.pop(block, None)
        for number, (block, content) in enumerate(zip(blocks, contents, strict=True)):
            if self.trouble is Trouble.FULL or (self.trouble is Trouble.HALF_WRITTEN and number):
                self._fail("no space left")
            self._contents[block] = bytes(content)

    def read(self, blocks: Sequence[DiskBlockId]) -> Iterator[memoryview]:
        for block in blocks:
            self._check(block)
            if self.trouble is Trouble.UNREADABLE:
                self._fail("cannot be read")
            yield memoryview(self._contents[block])

    def _check(self, block: int) -> None:
        if not 0 <= block < self._num_blocks:
            raise InvariantError(f"the disk has no block {block}")

    def _fail(self, why: str) -> None:
        self.num_faults += 1
        raise DeviceFaultError(f"disk trouble on order: {why}")

    def close(self) -> None:
        self._contents.clear()
