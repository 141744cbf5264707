"""Runs the swap copies of a plan on a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from giveway.core.errors import DeviceFaultError
from giveway.core.ids import CopyId, DeviceBlockId, DiskBlockId, HostBlockId
from giveway.core.plan import BlockCopy, CopyDirection
from giveway.runtime.backend import Backend, MemoryPool

if TYPE_CHECKING:  # its checksums need an installed package, and whoever has no disk tier needs none
    from giveway.runtime.disk_tier import DiskTier


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

    def start(self, copies: Sequence[BlockCopy]) -> None:
        """Start copies. Without overlap they have ended, well or not, when this returns."""

    def abandon(self, copies: Sequence[BlockCopy]) -> None:
        """The step failed: make sure that none of these copies touches a block any more."""

    def collect(self, *, wait: bool) -> EndedCopies:
        """Return the copies that have ended. wait: nothing else is to be done, so block a while for one to end."""


class SynchronousCopies:
    """Copies in the calling thread, one request after another; a failure harms that request's copy alone."""

    is_overlapped = False

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._finished: list[CopyId] = []
        self._failed: list[CopyId] = []

    def start(self, copies: Sequence[BlockCopy]) -> None:
        """Run the copies to their end."""
        for copy in copies:
            try:
                run_copy(self._backend, copy)
            except DeviceFaultError:
                self._failed.append(copy.copy_id)
            else:
                self._finished.append(copy.copy_id)

    def abandon(self, copies: Sequence[BlockCopy]) -> None:
        """Nothing is ever under way between two calls."""

    def collect(self, *, wait: bool) -> EndedCopies:  # noqa: ARG002  # nothing is ever under way
        """Return what `start` did."""
        ended = EndedCopies(tuple(self._finished), tuple(self._failed))
        self._finished, self._failed = [], []
        return ended


def run_copy(backend: Backend, copy: BlockCopy) -> None:
    """Copy the blocks of one request now. Raises DeviceFaultError."""
    if copy.direction is CopyDirection.OUT:
        backend.copy_out(list(zip(copy.device_blocks, copy.host_blocks, strict=True)))
    else:
        backend.copy_in(list(zip(copy.host_blocks, copy.device_blocks, strict=True)))


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
