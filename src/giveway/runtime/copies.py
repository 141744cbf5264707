"""Runs the swap copies of a plan on a backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from giveway.core.errors import DeviceFaultError, InvariantError
from giveway.core.ids import CopyId, DeviceBlockId, DiskBlockId, HostBlockId
from giveway.core.plan import BlockCopy, CopyDirection, Tier, TierMove
from giveway.runtime.backend import Backend, MemoryPool

if TYPE_CHECKING:  # its checksums need an installed package, and whoever has no disk tier needs none
    from giveway.runtime.disk_tier import DiskTier

logger = logging.getLogger("giveway")


@dataclass(frozen=True, slots=True)
class EndedCopies:
    """Copies that ended since the last time somebody asked."""

    finished: tuple[CopyId, ...] = field(default=())
    failed: tuple[CopyId, ...] = field(default=())


class CopyEngine(Protocol):
    """Moves whole blocks between the tiers of one backend."""

    @property
    def is_overlapped(self) -> bool:
        """Whether a copy may still run when `start` returns."""

    def move(self, moves: Sequence[TierMove]) -> None:
        """Move parked blocks from the host to the disk; they have ended, well or not, when this returns."""

    def start(self, copies: Sequence[BlockCopy]) -> None:
        """Start copies. Without overlap they have ended, well or not, when this returns."""

    def abandon(self, copies: Sequence[BlockCopy]) -> None:
        """The step failed: make sure that none of these copies touches a block any more."""

    def collect(self, *, wait: bool) -> EndedCopies:
        """Return the copies and moves that have ended. wait: nothing else is to be done, so block for one to end."""

    def close(self) -> None:
        """Let go of the disk. Nothing is under way any more."""


class SynchronousCopies:
    """Copies in the calling thread, one request after another; a failure harms that request's copy alone."""

    is_overlapped = False

    def __init__(self, backend: Backend, disk: DiskTier | None = None) -> None:
        self._backend = backend
        self._disk = disk
        self._ended: list[tuple[CopyId, bool]] = []

    def move(self, moves: Sequence[TierMove]) -> None:
        """Run the moves to their end."""
        for move in moves:
            self._ended.append((move.copy_id, succeeds(partial(run_move, self._backend, self._disk, move))))

    def start(self, copies: Sequence[BlockCopy]) -> None:
        """Run the copies to their end."""
        for copy in copies:
            self._ended.append((copy.copy_id, succeeds(partial(run_copy, self._backend, self._disk, copy))))

    def abandon(self, copies: Sequence[BlockCopy]) -> None:  # noqa: ARG002  # all have ended
        """Nothing is ever under way between two calls; what ended belongs to a step that is not committed."""
        self._ended = []

    def collect(self, *, wait: bool) -> EndedCopies:  # noqa: ARG002  # nothing is ever under way
        """Return what `move` and `start` did."""
        ended, self._ended = self._ended, []
        return EndedCopies(
            tuple(copy_id for copy_id, has_succeeded in ended if has_succeeded),
            tuple(copy_id for copy_id, has_succeeded in ended if not has_succeeded),
        )

    def close(self) -> None:
        """Remove the file of the disk tier."""
        if self._disk is not None:
            self._disk.close()


def succeeds(work: Callable[[], None]) -> bool:
    """Do a copy; a fault of it is told in the log, harms nobody else, and makes its request recompute."""
    try:
        work()
    except DeviceFaultError as fault:
        logger.warning("a copy of KV blocks failed, and its request computes them again: %s", fault)
        return False
    return True


def run_copy(backend: Backend, disk: DiskTier | None, copy: BlockCopy) -> None:
    """Copy the blocks of one request now. Raises DeviceFaultError."""
    if copy.tier is Tier.DISK:
        pairs = list(zip(copy.device_blocks, cast("tuple[DiskBlockId, ...]", copy.parked_blocks), strict=True))
        if copy.direction is CopyDirection.OUT:
            park_on_disk(backend, _needed(disk), MemoryPool.DEVICE, pairs)
        else:
            fetch_from_disk(backend, _needed(disk), [(disk_block, block) for block, disk_block in pairs])
        return
    host_blocks = cast("tuple[HostBlockId, ...]", copy.parked_blocks)
    if copy.direction is CopyDirection.OUT:
        backend.copy_out(list(zip(copy.device_blocks, host_blocks, strict=True)))
    else:
        backend.copy_in(list(zip(host_blocks, copy.device_blocks, strict=True)))


def run_move(backend: Backend, disk: DiskTier | None, move: TierMove) -> None:
    """Copy parked blocks of one request from the host to the disk now. Raises DeviceFaultError."""
    park_on_disk(backend, _needed(disk), MemoryPool.HOST, list(zip(move.host_blocks, move.disk_blocks, strict=True)))


def _needed(disk: DiskTier | None) -> DiskTier:
    if disk is None:
        raise InvariantError("a plan copies to or from the disk, but there is no disk tier")
    return disk


def park_on_disk(
    backend: Backend, disk: DiskTier, pool: MemoryPool, pairs: Sequence[tuple[DeviceBlockId | HostBlockId, DiskBlockId]]
) -> None:
    """Copy whole blocks of one pool to the disk now; disk blocks that are neighbours travel together.

    Raises DeviceFaultError; the disk blocks that were not reached count as never written then.
    """
    ordered = sorted(pairs, key=lambda pair: pair[1])
    disk.write([block for _, block in ordered], (backend.read_block(pool, block) for block, _ in ordered))


def fetch_from_disk(backend: Backend, disk: DiskTier, pairs: Sequence[tuple[DiskBlockId, DeviceBlockId]]) -> None:
    """Copy whole blocks from the disk to the device now; disk blocks that are neighbours travel together.

    Raises DeviceFaultError; some of the device blocks may have been written by then, each with its right content.
    """
    ordered = sorted(pairs)
    contents = disk.read([block for block, _ in ordered])
    for (_, block), content in zip(ordered, contents, strict=True):
        backend.write_block(MemoryPool.DEVICE, block, content)
