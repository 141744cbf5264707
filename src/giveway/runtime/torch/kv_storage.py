"""The two pools of KV blocks of this backend as tensors: in main memory, or the device pool on a GPU."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from giveway.core.errors import DeviceFaultError
from giveway.core.ids import DeviceBlockId, HostBlockId
from giveway.runtime import memory
from giveway.runtime.backend import MemoryPool
from giveway.runtime.block_copies import NumpyCopier, check_block, check_content, check_pairs, joined_runs
from giveway.runtime.block_shape import BlockShape
from giveway.runtime.main_memory_pools import MainMemoryPools
from giveway.runtime.pool_memory import check_room, map_zeros, no_such_piece
from giveway.runtime.zeroed_memory import ZeroedMemory

logger = logging.getLogger("giveway")

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process


class KVStorage:
    """Device pool and host pool, allocated once. What lies in main memory is touched in the background.

    The device pool has one block more than was asked for: `blank_block`, all zeros and never written. Attention reads
    it in place of slots that hold no token of the request, so what a former owner left there can never matter.
    """

    def __init__(
        self,
        shape: BlockShape,
        *,
        num_device_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.block_bytes = shape.num_elements * dtype.itemsize
        # Takes back what CUDA was told of the host pool, in time also if nobody calls close(); None: nothing to do.
        self._unregister: Callable[[], object] | None = None
        self._main: MainMemoryPools | None = None  # where both pools lie in main memory: they copy without PyTorch
        dimensions, host_dimensions = ((n, *shape.dimensions) for n in (num_device_blocks + 1, num_host_blocks))
        if device.type == "cpu":
            self._main = MainMemoryPools(
                num_device_blocks=num_device_blocks,
                num_host_blocks=num_host_blocks,
                block_bytes=self.block_bytes,
                copier=NumpyCopier(),
                num_blank_blocks=1,
            )
            self._device = torch.from_numpy(self._main.device_rows).view(dtype).view(dimensions)
            self._host = torch.from_numpy(self._main.host_rows).view(dtype).view(host_dimensions)
            return
        check_room(
            "device", num_device_blocks + 1, self.block_bytes, free_bytes=available_bytes(device), where=str(device)
        )
        check_room("host", num_host_blocks, self.block_bytes, free_bytes=memory.available_bytes(), where="cpu")
        self._device = _blocks_of_zeros("device", dimensions, dtype, device)
        self._host = _view_as(map_zeros("host", num_host_blocks * self.block_bytes), host_dimensions, dtype)
        if num_host_blocks and device.type == "cuda":
            self._pin_host_pool()  # which touches it

    @property
    def device(self) -> torch.device:
        """Where the device pool lies."""
        return self._device.device

    @property
    def blank_block(self) -> int:
        """Index of the block of zeros."""
        return self.num_device_blocks

    @property
    def num_device_bytes(self) -> int:
        """Size of the device pool."""
        return self._device.nbytes

    @property
    def num_host_bytes(self) -> int:
        """Size of the host pool."""
        return self._host.nbytes

    @property
    def num_pending_bytes(self) -> int:
        """Bytes of both pools that take no memory yet and will be touched soon."""
        return 0 if self._main is None else self._main.num_pending_bytes

    @property
    def host_is_pinned(self) -> bool:
        """Whether the host pool can be copied to and from by the device on its own."""
        return self._host.is_pinned()

    def _pin_host_pool(self) -> None:
        """Let the device copy to and from the host pool on its own.

        The pool is mapped plainly and then registered, because PyTorch's allocator of pinned memory rounds up to a
        power of two, nearly twice the pool in the worst case. Registering touches every page. Raises ConfigError if
        neither way is open.
        """
        address, num_bytes = self._host.data_ptr(), self._host.nbytes
        failure = int(_cuda_runtime().cudaHostRegister(address, num_bytes, _REGISTER_PORTABLE))
        if not failure:
            finalizer = weakref.finalize(self, _unregister, address)
            finalizer.atexit = False  # the process ends, and with it every registration
            self._unregister = finalizer
            return
        logger.warning(
            "CUDA could not register the host pool of %d bytes (error %d); it is allocated as pinned memory instead, "
            "which may take up to twice as much",
            num_bytes,
            failure,
        )
        with suppress(RuntimeError):  # the error stays behind in CUDA, and the next kernel launched would report it
            torch.ones(1, device=self._device.device)
        dimensions, dtype = tuple(self._host.shape), self._host.dtype
        self._host = torch.empty(0, dtype=dtype)  # both at once may not fit
        self._host = _blocks_of_zeros("host", dimensions, dtype, torch.device("cpu"), pin_memory=True)

    def close(self) -> None:
        """Give the memory of both pools back; calling it again does nothing. The storage is not used afterwards."""
        if self._main is not None:
            self._main.close()
        if self._unregister is not None:
            self._unregister()
        self.num_device_blocks = self.num_host_blocks = 0
        self._device, self._host = (torch.empty(0, dtype=pool.dtype) for pool in (self._device, self._host))

    def wait_until_touched(self) -> None:
        """Return when every page of both pools is in place, for benchmarks and tests."""
        if self._main is not None:
            self._main.wait_until_touched()

    def pools(self) -> tuple[Tensor, Tensor]:
        """Both pools, device without the blank block and host: [num_blocks, *BlockShape.dimensions], for benchmarks."""
        return self._device[: self.num_device_blocks], self._host

    def token_rows(self, layer: int, which: int) -> Tensor:
        """View one layer's K (which 0) or V (1) for writing.

        Returns [rows, num_kv_heads * head_size]; the row of a slot is block * num_layers * 2 * block_size + offset.
        """
        rows = self._device.view(-1, self.shape.num_kv_heads * self.shape.head_size)
        return rows[(layer * 2 + which) * self.shape.block_size :]

    def head_rows(self, layer: int, which: int) -> Tensor:
        """View one layer's K (which 0) or V (1) for reading: [rows, head_size], num_kv_heads for each of token_rows."""
        rows = self._device.view(-1, self.shape.head_size)
        return rows[(layer * 2 + which) * self.shape.block_size * self.shape.num_kv_heads :]

    def blocks(self, layer: int, which: int) -> Tensor:
        """View one layer's K (which 0) or V (1): [num_blocks + 1, block_size, num_kv_heads, head_size], strided."""
        return self._device[:, layer, which]

    def copy_out(self, pairs: Sequence[tuple[DeviceBlockId, HostBlockId]]) -> None:
        """Copy whole blocks device -> host; returns when they are there."""
        if self._main is not None:
            self._main.copy_out(pairs)
            return
        check_pairs(pairs, self.num_device_blocks, self.num_host_blocks)
        self._copy_by_torch(pairs, self._device, self._host)

    def copy_in(self, pairs: Sequence[tuple[HostBlockId, DeviceBlockId]]) -> None:
        """Copy whole blocks host -> device; returns when they are there."""
        if self._main is not None:
            self._main.copy_in(pairs)
            return
        check_pairs(pairs, self.num_host_blocks, self.num_device_blocks)
        self._copy_by_torch(pairs, self._host, self._device)

    def copy_within(self, pairs: Sequence[tuple[DeviceBlockId, DeviceBlockId]]) -> None:
        """Copy whole blocks device -> device, one pair after another: a target may be the source of a later pair."""
        if self._main is not None:
            self._main.copy_within(pairs)
            return
        check_pairs(pairs, self.num_device_blocks, self.num_device_blocks)
        with _copying(len(pairs)):
            for source, target in pairs:
                self._device[target].copy_(self._device[source], non_blocking=True)
            self._wait_for_device()

    def read_block(self, pool: MemoryPool, block: int) -> memoryview:
        """Return the bytes of one block, read-only. A view of a pool in main memory, otherwise a copy."""
        if self._main is not None:
            return self._main.read_block(pool, block)
        content = self._block(pool, block)
        with _copying(1):
            return content.cpu().numpy().data.toreadonly()

    def write_block(self, pool: MemoryPool, block: int, content: memoryview) -> None:
        """Replace the bytes of one block. Raises DeviceFaultError, and then nothing was written."""
        if self._main is not None:
            self._main.write_block(pool, block, content)
            return
        target = self._block(pool, block)
        check_content(pool.value, block, content, len(target))
        with _copying(1):
            # PyTorch wraps no read-only memory.
            target.copy_(torch.from_numpy(np.frombuffer(content, np.uint8).copy()))
            self._wait_for_device()

    def _block(self, pool: MemoryPool, block: int) -> Tensor:
        """View one block as bytes: [block_bytes]."""
        blocks, limit = (
            (self._device, self.num_device_blocks) if pool is MemoryPool.DEVICE else (self._host, self.num_host_blocks)
        )
        check_block(pool.value, block, limit)
        return blocks[block].view(-1).view(torch.uint8)

    def _copy_by_torch(self, pairs: Sequence[tuple[int, int]], source: Tensor, target: Tensor) -> None:
        with _copying(len(pairs)):
            for run in joined_runs(pairs):
                piece = source[run.source : run.source + run.num_blocks]
                target[run.target : run.target + run.num_blocks].copy_(piece, non_blocking=self.host_is_pinned)
            self._wait_for_device()

    def _wait_for_device(self) -> None:
        if self._device.is_cuda:
            torch.cuda.current_stream(self._device.device).synchronize()


@contextmanager
def _copying(num_blocks: int) -> Iterator[None]:
    """Turn what PyTorch raises into a DeviceFaultError."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceFaultError(f"copying {num_blocks} KV blocks failed: {error}") from error


def available_bytes(device: torch.device) -> int | None:
    """Memory that an allocation on `device` could take now, bytes; None: the system does not say.

    On CUDA it includes what PyTorch keeps for its next allocations.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return memory.available_bytes()


def _blocks_of_zeros(
    pool: str, dimensions: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, pin_memory: bool = False
) -> Tensor:
    """Allocate a pool by PyTorch and touch it. Raises ConfigError when the allocator has no such piece."""
    try:
        return torch.empty(dimensions, dtype=dtype, device=device, pin_memory=pin_memory).zero_()
    except RuntimeError as error:
        raise no_such_piece(pool, error) from error


def _cuda_runtime() -> Any:
    runtime: Callable[[], Any] = torch.cuda.cudart
    return runtime()


def _unregister(address: int) -> None:
    if failure := int(_cuda_runtime().cudaHostUnregister(address)):
        logger.warning("CUDA could not unregister the host pool (error %d)", failure)


def _view_as(zeros: ZeroedMemory, dimensions: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(zeros.array).view(dtype).view(dimensions)
