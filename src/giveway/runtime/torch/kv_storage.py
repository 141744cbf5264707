"""The two pools of KV blocks of this backend, and the copies between them."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from giveway.core.errors import ConfigError, DeviceFaultError
from giveway.core.ids import DeviceBlockId, HostBlockId
from giveway.runtime import memory
from giveway.runtime.backend import MemoryPool
from giveway.runtime.zeroed_memory import BackgroundTouch, ZeroedMemory

logger = logging.getLogger("giveway")

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process

_REMEDIES = {
    "device": "Lower --kv-cache-memory-bytes or --num-kv-blocks.",
    "host": "Lower --swap-space; 0 turns swapping off.",
}


# From this size on a second thread earns more than its hand-over costs (some tens of microseconds).
_LARGE_COPY_BYTES = 4 << 20
_PIECE_BYTES = 1 << 20  # what one of two threads takes at a time; some 60 microseconds


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Geometry of one KV block; [num_layers, 2, block_size, num_kv_heads, head_size] and contiguous."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_size: int

    @property
    def dimensions(self) -> tuple[int, int, int, int, int]:
        """Shape of a block as a tensor."""
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_size)

    @property
    def num_elements(self) -> int:
        """Elements of a block."""
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_size


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
        main_memory = torch.device("cpu")
        device_bytes = (num_device_blocks + 1) * self.block_bytes
        _check_room("device", num_device_blocks + 1, self.block_bytes, device, 0)
        # What is not touched yet still counts as available, and on a CPU the device pool takes of the same.
        taken_bytes = device_bytes if device == main_memory else 0
        _check_room("host", num_host_blocks, self.block_bytes, main_memory, taken_bytes)
        self._second_thread: ThreadPoolExecutor | None = None
        # Takes back what CUDA was told of the host pool, in time also if nobody calls close(); None: nothing to do.
        self._unregister: Callable[[], object] | None = None
        self._touch: BackgroundTouch | None = None  # None: somebody else touches the pools
        self._rows: tuple[_ByteRows, _ByteRows] | None = None  # both pools; None: only PyTorch can copy between them
        dimensions, host_dimensions = ((n, *shape.dimensions) for n in (num_device_blocks + 1, num_host_blocks))
        if device == main_memory:
            device_zeros = _map_zeros("device", device_bytes)
            self._device = _view_as(device_zeros, dimensions, dtype)
        else:
            self._device = _blocks_of_zeros("device", dimensions, dtype, device)
        host_zeros = _map_zeros("host", num_host_blocks * self.block_bytes)
        self._host = _view_as(host_zeros, host_dimensions, dtype)
        if device == main_memory:
            device_rows, host_rows = (zeros.array.reshape(-1, self.block_bytes) for zeros in (device_zeros, host_zeros))
            self._rows = device_rows, host_rows
            self._touch = BackgroundTouch([device_zeros, host_zeros])
            weakref.finalize(self, self._touch.stop)  # a storage that nobody closed, and the end of the process
        elif num_host_blocks and device.type == "cuda":
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
        return 0 if self._touch is None else self._touch.num_pending_bytes

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
        if self._touch is not None:
            self._touch.stop()  # it holds the memory until it ends
        if self._unregister is not None:
            self._unregister()
        if self._second_thread is not None:
            self._second_thread.shutdown()
        self.num_device_blocks = self.num_host_blocks = 0
        self._rows = None
        self._device, self._host = (torch.empty(0, dtype=pool.dtype) for pool in (self._device, self._host))

    def wait_until_touched(self) -> None:
        """Return when every page of both pools is in place, for benchmarks and tests."""
        if self._touch is not None:
            self._touch.wait()

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
        _check_pairs(pairs, self.num_device_blocks, self.num_host_blocks)
        if self._rows is None:
            self._copy_by_torch(pairs, self._device, self._host)
        else:
            self._copy_on_cpu(pairs, self._rows[0], self._rows[1])

    def copy_in(self, pairs: Sequence[tuple[HostBlockId, DeviceBlockId]]) -> None:
        """Copy whole blocks host -> device; returns when they are there."""
        _check_pairs(pairs, self.num_host_blocks, self.num_device_blocks)
        if self._rows is None:
            self._copy_by_torch(pairs, self._host, self._device)
        else:
            self._copy_on_cpu(pairs, self._rows[1], self._rows[0])

    def copy_within(self, pairs: Sequence[tuple[DeviceBlockId, DeviceBlockId]]) -> None:
        """Copy whole blocks device -> device, one pair after another: a target may be the source of a later pair."""
        _check_pairs(pairs, self.num_device_blocks, self.num_device_blocks)
        if self._rows is not None:
            for source, target in pairs:
                np.copyto(self._rows[0][target], self._rows[0][source])
            return
        with _copying(len(pairs)):
            for source, target in pairs:
                self._device[target].copy_(self._device[source], non_blocking=True)
            self._wait_for_device()

    def read_block(self, pool: MemoryPool, block: int) -> memoryview:
        """Return the bytes of one block, read-only. A view of a pool in main memory, otherwise a copy."""
        content = self._block(pool, block)
        with _copying(1):
            return content.cpu().numpy().data.toreadonly()

    def write_block(self, pool: MemoryPool, block: int, content: memoryview) -> None:
        """Replace the bytes of one block. Raises DeviceFaultError, and then nothing was written."""
        target = self._block(pool, block)
        if content.nbytes != len(target) or not content.c_contiguous:
            raise DeviceFaultError(
                f"writing {pool.value} block {block}: {content.nbytes:,} bytes were given, a block has "
                f"{len(target):,} in one piece; nothing was written"
            )
        source = np.frombuffer(content, np.uint8)
        with _copying(1):
            if target.is_cpu:
                np.copyto(target.numpy(), source)
                return
            target.copy_(torch.from_numpy(source.copy()))  # PyTorch wraps no read-only memory
            self._wait_for_device()

    def _block(self, pool: MemoryPool, block: int) -> Tensor:
        """View one block as bytes: [block_bytes]."""
        blocks, limit = (
            (self._device, self.num_device_blocks) if pool is MemoryPool.DEVICE else (self._host, self.num_host_blocks)
        )
        if not 0 <= block < limit:
            raise DeviceFaultError(f"KV block {block} of the {pool.value} pool: that pool has {_range_of(limit)}")
        return blocks[block].view(-1).view(torch.uint8)

    def _copy_by_torch(self, pairs: Sequence[tuple[int, int]], source: Tensor, target: Tensor) -> None:
        with _copying(len(pairs)):
            for first_source, first_target, length in joined_runs(pairs):
                piece = source[first_source : first_source + length]
                target[first_target : first_target + length].copy_(piece, non_blocking=self.host_is_pinned)
            self._wait_for_device()

    def _wait_for_device(self) -> None:
        if self._device.is_cuda:
            torch.cuda.current_stream(self._device.device).synchronize()

    def _copy_on_cpu(self, pairs: Sequence[tuple[int, int]], source: _ByteRows, target: _ByteRows) -> None:
        """Copy in this thread, and a large amount in a second one too; numpy lets go of the interpreter meanwhile.

        Not by `copy_`, which splits even one block among PyTorch's threads and waits for the slowest at every block: on
        busy cores that was a quarter of the speed. Each thread takes the next piece when it is done with one. Two equal
        halves would be as slow as the thread that the system lets run last.
        """
        pieces = deque(_pieces(pairs, self.block_bytes))
        if len(pairs) * self.block_bytes < _LARGE_COPY_BYTES:
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


def _check_pairs(pairs: Sequence[tuple[int, int]], num_sources: int, num_targets: int) -> None:
    """Raise DeviceFaultError unless both sides of every pair exist."""
    for source, target in pairs:
        if not (0 <= source < num_sources and 0 <= target < num_targets):
            block, limit = (target, num_targets) if 0 <= source < num_sources else (source, num_sources)
            raise DeviceFaultError(f"copy of KV block {block}: that pool has {_range_of(limit)}; nothing was copied")


def _range_of(num_blocks: int) -> str:
    return f"blocks 0 to {num_blocks - 1}" if num_blocks else "no blocks"


@contextmanager
def _copying(num_blocks: int) -> Iterator[None]:
    """Turn what PyTorch raises into a DeviceFaultError."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceFaultError(f"copying {num_blocks} KV blocks failed: {error}") from error


_ByteRows = np.ndarray[Any, np.dtype[np.uint8]]  # [blocks, bytes of a block]
_Piece = tuple[int, int, int]  # first source, first target, number of blocks


def _pieces(pairs: Sequence[tuple[int, int]], block_bytes: int) -> Iterator[_Piece]:
    """Yield joined runs, cut so that two threads can share a long one."""
    most = max(_PIECE_BYTES // block_bytes, 1)
    for source, target, length in joined_runs(pairs):
        for start in range(0, length, most):
            yield source + start, target + start, min(most, length - start)


def _copy_pieces(pieces: deque[_Piece], source: _ByteRows, target: _ByteRows) -> None:
    """Copy until no piece is left; another thread may take of the same ones."""
    with suppress(IndexError):
        while True:
            first_source, first_target, length = pieces.popleft()
            np.copyto(target[first_target : first_target + length], source[first_source : first_source + length])


def joined_runs(pairs: Sequence[tuple[int, int]]) -> Iterator[_Piece]:
    """Join pairs that follow each other on both sides: (first source, first target, number of blocks) for each run."""
    position = 0
    while position < len(pairs):
        source, target = pairs[position]
        length = 1
        while position + length < len(pairs) and pairs[position + length] == (source + length, target + length):
            length += 1
        yield source, target, length
        position += length


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
        raise _no_such_piece(pool, error) from error


def _map_zeros(pool: str, num_bytes: int) -> ZeroedMemory:
    """Reserve a pool in main memory, untouched. Raises ConfigError when the system refuses."""
    try:
        return ZeroedMemory(num_bytes)
    except OSError as error:
        raise _no_such_piece(pool, error) from error


def _no_such_piece(pool: str, error: Exception) -> ConfigError:
    return ConfigError(f"the {pool} pool of KV blocks cannot be allocated: {error}. {_REMEDIES[pool]}")


def _cuda_runtime() -> Any:
    runtime: Callable[[], Any] = torch.cuda.cudart
    return runtime()


def _unregister(address: int) -> None:
    if failure := int(_cuda_runtime().cudaHostUnregister(address)):
        logger.warning("CUDA could not unregister the host pool (error %d)", failure)


def _view_as(zeros: ZeroedMemory, dimensions: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(zeros.array).view(dtype).view(dimensions)


def _check_room(pool: str, num_blocks: int, block_bytes: int, device: torch.device, taken_bytes: int) -> None:
    """Raise ConfigError unless the pool fits beside `taken_bytes` that somebody is going to use."""
    needed, free = num_blocks * block_bytes, available_bytes(device)
    if free is None or needed <= free - taken_bytes:
        return
    free -= taken_bytes
    raise ConfigError(
        f"the {pool} pool of {num_blocks} KV blocks needs {needed / 2**20:,.0f} MiB ({block_bytes:,} bytes each), but "
        f"{free / 2**20:,.0f} MiB are available on {device}: at most {free // block_bytes} blocks fit. "
        f"{_REMEDIES[pool]}"
    )
