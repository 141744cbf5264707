"""Copying whole KV blocks: which pairs are allowed, which travel together, and two threads for many bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np

from giveway.core.errors import DeviceFaultError

ByteRows = np.ndarray[Any, np.dtype[np.uint8]]  # [blocks, bytes of a block]

# From this size on a second thread earns more than its hand-over costs (some tens of microseconds).
_LARGE_COPY_BYTES = 4 << 20
_PIECE_BYTES = 1 << 20  # what one of two threads takes at a time; some 60 microseconds


class Run(NamedTuple):
    """Blocks that are neighbours on both sides."""

    source: int  # the first
    target: int  # the first
    num_blocks: int


def check_pairs(pairs: Sequence[tuple[int, int]], num_sources: int, num_targets: int) -> None:
    """Raise DeviceFaultError unless both sides of every pair exist."""
    for source, target in pairs:
        if not (0 <= source < num_sources and 0 <= target < num_targets):
            block, limit = (target, num_targets) if 0 <= source < num_sources else (source, num_sources)
            raise DeviceFaultError(f"copy of KV block {block}: that pool has {range_of(limit)}; nothing was copied")


def check_block(pool: str, block: int, num_blocks: int) -> None:
    """Raise DeviceFaultError unless a pool of that name and size has the block."""
    if not 0 <= block < num_blocks:
        raise DeviceFaultError(f"KV block {block} of the {pool} pool: that pool has {range_of(num_blocks)}")


def check_content(pool: str, block: int, content: memoryview, block_bytes: int) -> None:
    """Raise DeviceFaultError unless the content is that of a block, in one piece."""
    if content.nbytes != block_bytes or not content.c_contiguous:
        raise DeviceFaultError(
            f"writing {pool} block {block}: {content.nbytes:,} bytes were given, a block has {block_bytes:,} in one "
            "piece; nothing was written"
        )


def range_of(num_blocks: int) -> str:
    """Say which blocks a pool has."""
    return f"blocks 0 to {num_blocks - 1}" if num_blocks else "no blocks"


def joined_runs(pairs: Sequence[tuple[int, int]]) -> Iterator[Run]:
    """Join pairs (source, target) that follow each other on both sides."""
    position = 0
    while position < len(pairs):
        source, target = pairs[position]
        length = 1
        while position + length < len(pairs) and pairs[position + length] == (source + length, target + length):
            length += 1
        yield Run(source, target, length)
        position += length


def pieces_of(pairs: Sequence[tuple[int, int]], block_bytes: int) -> Iterator[Run]:
    """Yield joined runs, cut so that two threads can share a long one."""
    most = max(_PIECE_BYTES // block_bytes, 1)
    for source, target, length in joined_runs(pairs):
        for start in range(0, length, most):
            yield Run(source + start, target + start, min(most, length - start))


class RowCopier(Protocol):
    """One way to copy rows of bytes. The pairs have been checked."""

    def copy(self, pairs: Sequence[tuple[int, int]], source: ByteRows, target: ByteRows) -> None:
        """Copy row to row, (source, target) each, in any order. Returns when all are there."""

    def copy_in_order(self, pairs: Sequence[tuple[int, int]], rows: ByteRows) -> None:
        """Copy within one pool, one pair after another: a target may be the source of a later pair."""

    def close(self) -> None:
        """End what threads it has; calling it again does nothing."""


class NumpyCopier:
    """Copies by numpy in the calling thread, and a large amount in a second one too.

    numpy lets go of the interpreter meanwhile. Not by PyTorch's `copy_`, which splits even one block among its threads
    and waits for the slowest at every block: on busy cores that was a quarter of the speed. Each thread takes the next
    piece when it is done with one. Two equal halves would be as slow as the thread that the system lets run last.
    """

    def __init__(self) -> None:
        self._second_thread: ThreadPoolExecutor | None = None

    def copy(self, pairs: Sequence[tuple[int, int]], source: ByteRows, target: ByteRows) -> None:
        """Copy row to row, (source, target) each. Returns when all are there."""
        block_bytes = source.shape[1]
        pieces = deque(pieces_of(pairs, block_bytes))
        if len(pairs) * block_bytes < _LARGE_COPY_BYTES:
            _copy_pieces(pieces, source, target)
            return
        if self._second_thread is None:
            self._second_thread = ThreadPoolExecutor(1, thread_name_prefix="giveway-copy")
        other = self._second_thread.submit(_copy_pieces, pieces, source, target)
        try:
            _copy_pieces(pieces, source, target)
        finally:
            pieces.clear()  # also when this thread was interrupted
            if not other.cancel():  # it may not even have begun
                other.result()

    def copy_in_order(self, pairs: Sequence[tuple[int, int]], rows: ByteRows) -> None:
        """Copy within one pool, one pair after another."""
        for source, target in pairs:
            np.copyto(rows[target], rows[source])

    def close(self) -> None:
        """End the second thread."""
        if self._second_thread is not None:
            self._second_thread.shutdown()


def _copy_pieces(pieces: deque[Run], source: ByteRows, target: ByteRows) -> None:
    """Copy until no piece is left; another thread may take of the same ones."""
    with suppress(IndexError):
        while True:
            first_source, first_target, length = pieces.popleft()
            np.copyto(target[first_target : first_target + length], source[first_source : first_source + length])
