"""Both pools of KV blocks of a backend that computes in main memory, and the copies between them. Rows of bytes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from giveway.core.ids import DeviceBlockId, HostBlockId
from giveway.runtime import memory
from giveway.runtime.backend import MemoryPool
from giveway.runtime.block_copies import ByteRows, RowCopier, check_block, check_content, check_pairs
from giveway.runtime.pool_memory import check_room, map_zeros
from giveway.runtime.zeroed_memory import BackgroundTouch


class MainMemoryPools:
    """Device pool and host pool, allocated once, touched in the background. What lies in a block is the backend's."""

    def __init__(
        self,
        *,
        num_device_blocks: int,
        num_host_blocks: int,
        block_bytes: int,
        copier: RowCopier,
        num_blank_blocks: int = 0,
    ) -> None:
        """Reserve both pools.

        num_blank_blocks: more blocks behind those of the device pool, all zeros, that no copy can reach: a backend may
        read them in place of slots that hold no token. Raises ConfigError if memory is short.
        """
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.block_bytes = block_bytes
        num_rows = num_device_blocks + num_blank_blocks
        device_bytes, free = num_rows * block_bytes, memory.available_bytes()
        check_room("device", num_rows, block_bytes, free_bytes=free, where="cpu")
        # What is not touched yet still counts as available, and the device pool is going to take of the same.
        left = None if free is None else free - device_bytes
        check_room("host", num_host_blocks, block_bytes, free_bytes=left, where="cpu")
        device, host = map_zeros("device", device_bytes), map_zeros("host", num_host_blocks * block_bytes)
        self._device, self._host = (zeros.array.reshape(-1, block_bytes) for zeros in (device, host))
        self._copier = copier
        self._touch = BackgroundTouch([device, host])
        weakref.finalize(self, self._touch.stop)  # pools that nobody closed, and the end of the process

    @property
    def device_rows(self) -> ByteRows:
        """View the device pool, blank blocks behind: uint8 [blocks, block_bytes], contiguous."""
        return self._device

    @property
    def host_rows(self) -> ByteRows:
        """View the host pool: uint8 [num_host_blocks, block_bytes], contiguous."""
        return self._host

    @property
    def num_bytes(self) -> int:
        """Size of both pools."""
        return self._device.nbytes + self._host.nbytes

    @property
    def num_pending_bytes(self) -> int:
        """Bytes of both pools that take no memory yet and will be touched soon."""
        return self._touch.num_pending_bytes

    @property
    def num_touched_bytes(self) -> int:
        """Memory that both pools take; what is not touched yet counts as free for everybody."""
        return self.num_bytes - self.num_pending_bytes

    def copy_out(self, pairs: Sequence[tuple[DeviceBlockId, HostBlockId]]) -> None:
        """Copy whole blocks device -> host; returns when they are there. Raises DeviceFaultError."""
        check_pairs(pairs, self.num_device_blocks, self.num_host_blocks)
        self._copier.copy(pairs, self._device, self._host)

    def copy_in(self, pairs: Sequence[tuple[HostBlockId, DeviceBlockId]]) -> None:
        """Copy whole blocks host -> device; returns when they are there. Raises DeviceFaultError."""
        check_pairs(pairs, self.num_host_blocks, self.num_device_blocks)
        self._copier.copy(pairs, self._host, self._device)

    def copy_within(self, pairs: Sequence[tuple[DeviceBlockId, DeviceBlockId]]) -> None:
        """Copy whole blocks device -> device, one pair after another: a target may be the source of a later pair."""
        check_pairs(pairs, self.num_device_blocks, self.num_device_blocks)
        self._copier.copy_in_order(pairs, self._device)

    def read_block(self, pool: MemoryPool, block: int) -> memoryview:
        """View the bytes of one block where they lie, read-only. Raises DeviceFaultError."""
        return self._row(pool, block).data.toreadonly()

    def write_block(self, pool: MemoryPool, block: int, content: memoryview) -> None:
        """Replace the bytes of one block. Raises DeviceFaultError, and then nothing was written."""
        row = self._row(pool, block)
        check_content(pool.value, block, content, self.block_bytes)
        np.copyto(row, np.frombuffer(content, np.uint8))

    def wait_until_touched(self) -> None:
        """Return when every page of both pools is in place, for benchmarks and tests."""
        self._touch.wait()

    def close(self) -> None:
        """Give the memory back; calling it again does nothing. Whoever still has a view keeps that memory alive."""
        self._touch.stop()  # it holds the memory until it ends
        self._copier.close()
        self.num_device_blocks = self.num_host_blocks = 0
        self._device = self._host = np.empty((0, self.block_bytes), np.uint8)

    def _row(self, pool: MemoryPool, block: int) -> ByteRows:
        rows, limit = (
            (self._device, self.num_device_blocks) if pool is MemoryPool.DEVICE else (self._host, self.num_host_blocks)
        )
        check_block(pool.value, block, limit)
        row: ByteRows = rows[block]
        return row
