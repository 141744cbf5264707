"""The two pools of KV blocks of the native backend, both in main memory, and the copies between them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from giveway_kernels import copy_blocks, copy_blocks_in_order

from giveway.core.errors import ConfigError, DeviceFaultError
from giveway.core.ids import DeviceBlockId, HostBlockId
from giveway.runtime import memory
from giveway.runtime.backend import MemoryPool
from giveway.runtime.zeroed_memory import BackgroundTouch, ZeroedMemory

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_REMEDIES = {
    "device": "Lower --kv-cache-memory-bytes or --num-kv-blocks.",
    "host": "Lower --swap-space; 0 turns swapping off.",
}


class NativeKVStorage:
    """Device pool and host pool as plain bytes, allocated once and touched in the background.

    What lies inside a block is the kernels' business (KvLayout in native/src/types.h).
    """

    def __init__(
        self, *, num_device_blocks: int, num_host_blocks: int, block_size: int, block_bytes: int, num_threads: int
    ) -> None:
        """Reserve both pools. num_threads: how many copy a large amount. Raises ConfigError if memory is short."""
        if num_device_blocks < 1 or num_host_blocks < 0:
            raise ConfigError(
                f"KV pools of {num_device_blocks} device and {num_host_blocks} host blocks: at least 1 device block "
                "and 0 host blocks are needed"
            )
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes
        self._num_threads = num_threads
        device_bytes, host_bytes = num_device_blocks * block_bytes, num_host_blocks * block_bytes
        _check_room("device", num_device_blocks, block_bytes, 0)
        _check_room("host", num_host_blocks, block_bytes, device_bytes)  # of the same memory
        memories = [_reserve("device", device_bytes), _reserve("host", host_bytes)]
        # [blocks, bytes of a block]
        self._device, self._host = (reserved.array.reshape(-1, block_bytes) for reserved in memories)
        self._touch = BackgroundTouch(memories)
        weakref.finalize(self, self._touch.stop)  # a storage that nobody closed, and the end of the process

    @property
    def device_bytes(self) -> _Bytes:
        """View the device pool: [bytes], writable."""
        return self._device.reshape(-1)

    @property
    def num_touched_bytes(self) -> int:
        """Memory that both pools take; what is not touched yet counts as free for everybody."""
        return self._device.size + self._host.size - self._touch.num_pending_bytes

    def wait_until_touched(self) -> None:
        """Return when every page of both pools is in place, for benchmarks and tests."""
        self._touch.wait()

    def copy_out(self, pairs: Sequence[tuple[DeviceBlockId, HostBlockId]]) -> None:
        """Copy whole blocks device -> host; returns when they are there."""
        self._copy(pairs, self._device, self._host)

    def copy_in(self, pairs: Sequence[tuple[HostBlockId, DeviceBlockId]]) -> None:
        """Copy whole blocks host -> device; returns when they are there."""
        self._copy(pairs, self._host, self._device)

    def _copy(self, pairs: Sequence[tuple[int, int]], source: _Bytes, target: _Bytes) -> None:
        if not pairs:
            return
        try:
            copy_blocks(source, target, np.array(pairs, np.int64), num_threads=self._num_threads)
        except IndexError as error:
            raise DeviceFaultError(f"copy of {len(pairs)} KV blocks: {error}; nothing was copied") from error

    def copy_within(self, pairs: Sequence[tuple[DeviceBlockId, DeviceBlockId]]) -> None:
        """Copy whole blocks device -> device, one pair after another: a target may be the source of a later pair."""
        if not pairs:
            return
        try:
            copy_blocks_in_order(self._device, np.array(pairs, np.int64))
        except IndexError as error:
            raise DeviceFaultError(f"copy of {len(pairs)} KV blocks: {error}; nothing was copied") from error

    def read_block(self, pool: MemoryPool, block: int) -> memoryview:
        """Return the bytes of one block, a read-only view of the pool."""
        return self._block(pool, block).data.toreadonly()

    def write_block(self, pool: MemoryPool, block: int, content: memoryview) -> None:
        """Replace the bytes of one block. Raises DeviceFaultError, and then nothing was written."""
        target = self._block(pool, block)
        if content.nbytes != len(target) or not content.c_contiguous:
            raise DeviceFaultError(
                f"writing {pool.value} block {block}: {content.nbytes:,} bytes were given, a block has "
                f"{len(target):,} in one piece; nothing was written"
            )
        np.copyto(target, np.frombuffer(content, np.uint8))

    def _block(self, pool: MemoryPool, block: int) -> _Bytes:
        blocks = self._device if pool is MemoryPool.DEVICE else self._host
        if not 0 <= block < len(blocks):
            raise DeviceFaultError(f"KV block {block} of the {pool.value} pool: that pool has {len(blocks)} blocks")
        content: _Bytes = blocks[block]
        return content

    def close(self) -> None:
        """Give the memory of both pools back; calling it again does nothing. The storage is not used afterwards."""
        self._touch.stop()  # it holds the memory until it ends
        self.num_device_blocks = self.num_host_blocks = 0
        self._device = self._host = np.empty((0, self.block_bytes), np.uint8)


def _reserve(pool: str, num_bytes: int) -> ZeroedMemory:
    try:
        return ZeroedMemory(num_bytes)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"the {pool} KV pool of {num_bytes:,} bytes cannot be had: {error}. {_REMEDIES[pool]}"
        ) from error


def _check_room(pool: str, num_blocks: int, block_bytes: int, taken_bytes: int) -> None:
    available = memory.available_bytes()
    if available is not None and num_blocks * block_bytes + taken_bytes > available:
        raise ConfigError(
            f"the {pool} KV pool of {num_blocks} blocks takes {num_blocks * block_bytes:,} bytes, but "
            f"{max(available - taken_bytes, 0):,} are free. {_REMEDIES[pool]}"
        )
