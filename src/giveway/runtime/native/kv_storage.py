"""The two pools of KV blocks of the native backend, both in main memory; the kernels copy between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from giveway_kernels import copy_blocks, copy_blocks_in_order

from giveway.runtime.block_copies import ByteRows
from giveway.runtime.main_memory_pools import MainMemoryPools
from giveway.runtime.pool_memory import check_sizes


class KernelCopier:
    """Copies rows of bytes on the kernels' threads."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def copy(self, pairs: Sequence[tuple[int, int]], source: ByteRows, target: ByteRows) -> None:
        """Copy row to row, (source, target) each. Returns when all are there."""
        if pairs:
            copy_blocks(source, target, np.array(pairs, np.int64), num_threads=self._num_threads)

    def copy_in_order(self, pairs: Sequence[tuple[int, int]], rows: ByteRows) -> None:
        """Copy within one pool, one pair after another."""
        if pairs:
            copy_blocks_in_order(rows, np.array(pairs, np.int64))

    def close(self) -> None:
        """Nothing to end: the threads are everybody's."""


class NativeKVStorage(MainMemoryPools):
    """Device pool and host pool as plain bytes.

    What lies inside a block is the kernels' business (KvLayout in native/src/types.h).
    """

    def __init__(
        self, *, num_device_blocks: int, num_host_blocks: int, block_size: int, block_bytes: int, num_threads: int
    ) -> None:
        """Reserve both pools. num_threads: how many copy a large amount. Raises ConfigError if memory is short."""
        check_sizes(num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks, block_size=block_size)
        super().__init__(
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            block_bytes=block_bytes,
            copier=KernelCopier(num_threads),
        )
        self.block_size = block_size

    @property
    def device_bytes(self) -> ByteRows:
        """View the device pool: [bytes], writable."""
        return self.device_rows.reshape(-1)
