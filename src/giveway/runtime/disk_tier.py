"""The disk tier: whole KV blocks in one file, each with a checksum that is kept in memory."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from xxhash import xxh3_64_intdigest

from giveway.core.errors import ConfigError, DeviceFaultError, InvariantError
from giveway.core.ids import DiskBlockId
from giveway.runtime.swap_file import DIRECT_ALIGNMENT, kind_in_memory, make_swap_file, size_text, try_direct

BlockContent = bytes | bytearray | memoryview  # contiguous, block_bytes long

_STAGING_BYTES = 8 << 20  # longest transfer; from about 1 MiB on, disks gain little


class DiskTier:
    """A pool of KV blocks in a file of its own, which is gone when the tier is closed or the process ends.

    Blocks lie in slots of whole DIRECT_ALIGNMENT units, block after block, so that neighbours travel in one transfer.
    What is read is what was last written, or an error: the checksums stay in memory, so a write that the disk lost or
    put elsewhere is noticed as well as flipped bits. Not thread-safe.
    """

    def __init__(
        self, directory: Path, *, num_blocks: int, block_bytes: int, preallocate: bool = True, direct: bool = True
    ) -> None:
        """Make the file; see swap_file.make_swap_file for where, how and preallocate.

        block_bytes: bytes of one block. direct: go past the page cache where the file system can do that; False: never.
        Raises ConfigError if the file cannot be made.
        """
        if min(num_blocks, block_bytes) < 1:
            raise ConfigError(
                f"a disk tier of {num_blocks} KV blocks of {block_bytes} bytes: at least 1 is needed of both"
            )
        self.directory = directory
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._slot_bytes = -(-block_bytes // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
        self._descriptor = make_swap_file(directory, self.num_bytes, preallocate=preallocate)
        self._close_file = weakref.finalize(self, os.close, self._descriptor)
        self._is_direct = direct and try_direct(self._descriptor)
        self._memory_kind = kind_in_memory(self._descriptor)
        self._num_staged = max(1, min(num_blocks, _STAGING_BYTES // self._slot_bytes))
        # Anonymous pages: aligned as direct I/O asks for. The ends of slots beyond block_bytes are zeros and stay it.
        self._staging = memoryview(mmap.mmap(-1, self._num_staged * self._slot_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANON))
        self._checksums = array("Q", bytes(8 * num_blocks))
        self._is_written = bytearray(num_blocks)
        self._num_uses = 0  # of the staging buffer: tells a reader that somebody else used it

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.num_blocks * self._slot_bytes

    @property
    def is_direct(self) -> bool:
        """Whether transfers go past the page cache."""
        return self._is_direct

    @property
    def description(self) -> str:
        """One line for people: directory, size, direct or buffered."""
        way = "direct I/O" if self._is_direct else "through the page cache"
        kind = f" (a {self._memory_kind}: this is the same RAM, not a disk)" if self._memory_kind else ""
        return f"{size_text(self.num_bytes)} in {self.directory}{kind}, {way}"

    def write(self, blocks: Sequence[DiskBlockId], contents: Iterable[BlockContent]) -> None:
        """Write one content to each block; neighbours that follow each other in `blocks` travel together.

        contents: as many as blocks, block_bytes each, taken one by one and copied at once. If anything fails, blocks
        whose content did not reach the file count as never written. Raises DeviceFaultError.
        """
        self._check_range(blocks, "written")
        self._num_uses += 1
        for block in blocks:  # all of them first: whatever ends this early, no old content passes for the new
            self._is_written[block] = False
        source = iter(contents)
        for first, count in self._runs(blocks):
            checksums = array("Q", [self._stage(index, source) for index in range(count)])
            self._transfer(os.pwritev, "writing", first, count)
            self._checksums[first : first + count] = checksums
            self._is_written[first : first + count] = b"\1" * count
        if next(source, None) is not None:
            raise InvariantError(f"more contents than the {len(blocks)} KV blocks to write")

    def read(self, blocks: Sequence[DiskBlockId]) -> Iterator[memoryview]:
        """Return the contents of blocks, one after another: block_bytes each, format "B", checked.

        Each is valid until the next one is taken; the tier is not used for anything else in between. Raises
        DeviceFaultError: for a block that was never written at once, for a wrong one instead of handing it out.
        """
        self._check_range(blocks, "read")
        for block in blocks:
            if not self._is_written[block]:
                raise self._fault("reading", block, "the block was never written")
        return self._read(list(blocks))

    def close(self) -> None:
        """Close the file, which removes it; calling it again does nothing. The tier is not used afterwards."""
        self._close_file()
        self._num_uses += 1
        self._staging = memoryview(b"")  # the pages go when the last view of a reader does

    def _read(self, blocks: Sequence[DiskBlockId]) -> Iterator[memoryview]:
        for first, count in self._runs(blocks):
            self._check_open()
            self._transfer(os.preadv, "reading", first, count)
            self._num_uses += 1
            use = self._num_uses
            for index in range(count):
                if self._num_uses != use:
                    raise InvariantError("the disk tier was used while somebody read from it")
                content = self._slot(index)
                if xxh3_64_intdigest(content) != self._checksums[first + index]:
                    raise self._fault("reading", first + index, "its checksum differs from what was written")
                yield content

    def _runs(self, blocks: Sequence[DiskBlockId]) -> Iterator[tuple[int, int]]:
        """Join blocks that follow each other, as far as they fit into the staging buffer: (first, number)."""
        position = 0
        while position < len(blocks):
            first, count = blocks[position], 1
            most = min(self._num_staged, len(blocks) - position)
            while count < most and blocks[position + count] == first + count:
                count += 1
            yield first, count
            position += count

    def _slot(self, index: int) -> memoryview:
        """Room for the content of one block in the staging buffer."""
        start = index * self._slot_bytes
        return self._staging[start : start + self.block_bytes]

    def _stage(self, index: int, source: Iterator[BlockContent]) -> int:
        """Copy the next content into the staging buffer and return its checksum."""
        content = next(source, None)
        if content is None:
            raise InvariantError("fewer contents than KV blocks to write")
        flat = memoryview(content).cast("B")
        if len(flat) != self.block_bytes:
            raise InvariantError(f"a KV block of {len(flat)} bytes for a disk tier of blocks of {self.block_bytes}")
        slot = self._slot(index)
        slot[:] = flat
        return xxh3_64_intdigest(slot)  # of what will be written, not of what was meant to be

    def _transfer(self, move: Callable[[int, list[memoryview], int], int], doing: str, first: int, count: int) -> None:
        """Move `count` blocks between the file and the staging buffer; a short transfer is continued."""
        start, end, done = first * self._slot_bytes, count * self._slot_bytes, 0
        while done < end:
            block = first + done // self._slot_bytes
            try:
                moved = move(self._descriptor, [self._staging[done:end]], start + done)
            except OSError as error:
                name = errno.errorcode.get(error.errno or 0, "unknown")
                raise self._fault(doing, block, f"{name}, {error.strerror}", start + done) from error
            if self._is_direct:
                moved -= moved % DIRECT_ALIGNMENT  # the rest again: direct I/O cannot go on from an odd place
            if moved <= 0:
                raise self._fault(doing, block, "no bytes were transferred, the file is too short", start + done)
            done += moved

    def _fault(self, doing: str, block: int, cause: str, offset: int | None = None) -> DeviceFaultError:
        place = block * self._slot_bytes if offset is None else offset
        return DeviceFaultError(
            f"{doing} KV block {block} at offset {place} of the swap file in {self.directory} failed: {cause}"
        )

    def _check_open(self) -> None:
        if not self._close_file.alive:
            raise InvariantError("the disk tier was used after close()")

    def _check_range(self, blocks: Sequence[DiskBlockId], done: str) -> None:
        self._check_open()
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise DeviceFaultError(
                    f"KV block {block} is outside the disk tier of {self.num_blocks}; nothing was {done}"
                )
