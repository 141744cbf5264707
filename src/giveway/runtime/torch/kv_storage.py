"""The two pools of KV blocks of this backend, and the copies between them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from giveway.core.errors import ConfigError, DeviceFaultError
from giveway.core.ids import DeviceBlockId, HostBlockId

logger = logging.getLogger("giveway")

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process

_REMEDIES = {
    "device": "Lower --kv-cache-memory-bytes or --num-kv-blocks.",
    "host": "Lower --swap-space; 0 turns swapping off.",
}


# From this size on a second thread earns more than its hand-over costs (some tens of microseconds).
_LARGE_COPY_BYTES = 4 << 20


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
    """Device pool and host pool, allocated and touched once.

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
        block_bytes = shape.num_elements * dtype.itemsize
        _check_room("device", num_device_blocks + 1, block_bytes, device)
        _check_room("host", num_host_blocks, block_bytes, torch.device("cpu"))
        self._second_thread: ThreadPoolExecutor | None = None
        self._device = _blocks_of_zeros("device", (num_device_blocks + 1, *shape.dimensions), dtype, device)
        self._host = _blocks_of_zeros("host", (num_host_blocks, *shape.dimensions), dtype, torch.device("cpu"))
        # Takes back what CUDA was told of the host pool, in time also if nobody calls close(); None: nothing to do.
        self._unregister: Callable[[], object] | None = None
        if device.type == "cuda" and num_host_blocks:
            self._pin_host_pool()

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
    def host_is_pinned(self) -> bool:
        """Whether the host pool can be copied to and from by the device on its own."""
        return self._host.is_pinned()

    def _pin_host_pool(self) -> None:
        """Let the device copy to and from the host pool on its own.

        The pool is allocated plainly and then registered, because PyTorch's allocator of pinned memory rounds up to a
        power of two, nearly twice the pool in the worst case. Raises ConfigError if neither way is open.
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
        if self._unregister is not None:
            self._unregister()
        if self._second_thread is not None:
            self._second_thread.shutdown()
        self.num_device_blocks = self.num_host_blocks = 0
        self._device, self._host = (torch.empty(0, dtype=pool.dtype) for pool in (self._device, self._host))

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
        self._copy(list(pairs), self._device, self._host, (self.num_device_blocks, self.num_host_blocks))

    def copy_in(self, pairs: Sequence[tuple[HostBlockId, DeviceBlockId]]) -> None:
        """Copy whole blocks host -> device; returns when they are there."""
        self._copy(list(pairs), self._host, self._device, (self.num_host_blocks, self.num_device_blocks))

    def _copy(self, pairs: Sequence[tuple[int, int]], source: Tensor, target: Tensor, limits: tuple[int, int]) -> None:
        for block, limit in ((pair[side], limits[side]) for pair in pairs for side in (0, 1)):
            if not 0 <= block < limit:
                there = f"blocks 0 to {limit - 1}" if limit else "no blocks"
                raise DeviceFaultError(f"copy of KV block {block}: that pool has {there}; nothing was copied")
        try:
            if not pairs:
                return
            if self._device.is_cpu:
                self._copy_on_cpu(pairs, _byte_rows(source), _byte_rows(target))
                return
            for first_source, first_target, length in joined_runs(pairs):
                piece = source[first_source : first_source + length]
                target[first_target : first_target + length].copy_(piece, non_blocking=self.host_is_pinned)
            if self._device.is_cuda:
                torch.cuda.current_stream(self._device.device).synchronize()
        except RuntimeError as error:
            raise DeviceFaultError(f"copying {len(pairs)} KV blocks failed: {error}") from error

    def _copy_on_cpu(self, pairs: Sequence[tuple[int, int]], source: _ByteRows, target: _ByteRows) -> None:
        """Copy in this thread, and a large amount in a second one too; numpy lets go of the interpreter meanwhile.

        Not by `copy_`, which splits even one block among PyTorch's threads and waits for the slowest at every block: on
        busy cores that was a quarter of the speed.
        """
        if len(pairs) * source.shape[1] < _LARGE_COPY_BYTES:
            _copy_rows(pairs, source, target)
            return
        if self._second_thread is None:
            self._second_thread = ThreadPoolExecutor(1, thread_name_prefix="giveway-copy")
        middle = len(pairs) // 2
        other = self._second_thread.submit(_copy_rows, pairs[middle:], source, target)
        try:
            _copy_rows(pairs[:middle], source, target)
        finally:
            other.result()


_ByteRows = np.ndarray[Any, np.dtype[np.uint8]]  # [blocks, bytes of a block]


def _byte_rows(pool: Tensor) -> _ByteRows:
    return pool.view(len(pool), -1).view(torch.uint8).numpy()


def _copy_rows(pairs: Sequence[tuple[int, int]], source: _ByteRows, target: _ByteRows) -> None:
    for first_source, first_target, length in joined_runs(pairs):
        np.copyto(target[first_target : first_target + length], source[first_source : first_source + length])


def joined_runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
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
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = meminfo.read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
        # Cached file pages count as used there, although the system gives them up for an allocation.
        statistics = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        found.append(max(0, int(text) - int(used.read_text()) + int(statistics.get("inactive_file", 0))))
    return min(found, default=None)


def _blocks_of_zeros(
    pool: str, dimensions: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, pin_memory: bool = False
) -> Tensor:
    """Allocate a pool and touch it. Raises ConfigError when the allocator has no such piece."""
    try:
        # zero_ and not torch.zeros: the latter leaves the pages to be mapped by the first requests.
        return torch.empty(dimensions, dtype=dtype, device=device, pin_memory=pin_memory).zero_()
    except RuntimeError as error:
        raise ConfigError(f"the {pool} pool of KV blocks cannot be allocated: {error}. {_REMEDIES[pool]}") from error


def _cuda_runtime() -> Any:
    runtime: Callable[[], Any] = torch.cuda.cudart
    return runtime()


def _unregister(address: int) -> None:
    if failure := int(_cuda_runtime().cudaHostUnregister(address)):
        logger.warning("CUDA could not unregister the host pool (error %d)", failure)


def _check_room(pool: str, num_blocks: int, block_bytes: int, device: torch.device) -> None:
    needed, free = num_blocks * block_bytes, available_bytes(device)
    if free is None or needed <= free:
        return
    raise ConfigError(
        f"the {pool} pool of {num_blocks} KV blocks needs {needed / 2**20:,.0f} MiB ({block_bytes:,} bytes each), but "
        f"{free / 2**20:,.0f} MiB are available on {device}: at most {free // block_bytes} blocks fit. "
        f"{_REMEDIES[pool]}"
    )
