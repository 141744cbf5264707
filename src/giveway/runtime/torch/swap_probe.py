"""Copies between two pools in every way that `giveway bench swap` compares; nothing here is used for serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from giveway.core.errors import ConfigError
from giveway.core.ids import DeviceBlockId, HostBlockId
from giveway.core.plan import CopyDirection
from giveway.runtime.block_shape import BlockShape
from giveway.runtime.torch.kv_storage import KVStorage

_PlainCopy = Callable[[Tensor, Tensor], None]  # source, target: contiguous, of one size


class SwapProbe:
    """Two pools of blocks of one shape, 16 bits an element."""

    def __init__(self, shape: BlockShape, *, num_blocks: int, device: str) -> None:
        """Allocate both pools, as for serving, and wait until every page is in place.

        Raises ConfigError when the device is absent or memory is short.
        """
        if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
            raise ConfigError(f"device is {device!r}; 'cpu' works everywhere, 'cuda' where PyTorch finds such a device")
        self._where = torch.device(device)
        self._storage = KVStorage(
            shape,
            num_device_blocks=num_blocks,
            num_host_blocks=num_blocks,
            dtype=torch.bfloat16,
            device=self._where,
        )
        self._storage.wait_until_touched()  # a page that is missing would be counted as a slow copy
        self.block_bytes = shape.num_elements * 2
        self._shape = shape
        self._threads = ThreadPoolExecutor(2)
        if device == "cuda":
            self._methods: dict[str, _PlainCopy] = {"torch": self._by_torch}
        else:
            self._methods = {
                "torch, 1 thread": partial(self._by_torch_in, 1),
                "torch, 2 threads": partial(self._by_torch_in, 2),
                "numpy, 1 thread": _by_numpy,
                "numpy, 2 threads": self._by_two_threads,
            }

    @property
    def description(self) -> str:
        """The device by its public name, and PyTorch's threads."""
        if self._where.type == "cuda":
            return torch.cuda.get_device_name(self._where)
        return f"cpu (both pools are the same RAM), {torch.get_num_threads()} threads"

    @property
    def plain_methods(self) -> tuple[str, ...]:
        """Names of the plain copies that can be tried for the peak."""
        return tuple(self._methods)

    def swap(self, direction: CopyDirection, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each, as the engine does."""
        if direction is CopyDirection.OUT:
            self._storage.copy_out([(DeviceBlockId(a), HostBlockId(b)) for a, b in pairs])
        else:
            self._storage.copy_in([(HostBlockId(a), DeviceBlockId(b)) for a, b in pairs])

    def plain(self, direction: CopyDirection, method: str, source: int, target: int, num_blocks: int) -> None:
        """Copy one contiguous range of blocks to another in the plainest way."""
        sources, targets = self._pools(direction)
        self._methods[method](sources[source : source + num_blocks], targets[target : target + num_blocks])

    def naive(self, direction: CopyDirection, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy as the published write-up did: layer by layer, K and V apart, block by block."""
        sources, targets = self._pools(direction)
        for layer in range(self._shape.num_layers):
            for which in (0, 1):
                for source, target in pairs:
                    targets[target, layer, which].copy_(sources[source, layer, which])
        self._wait()

    def close(self) -> None:
        """End the threads and give the pools back."""
        self._threads.shutdown()
        self._storage.close()

    def _pools(self, direction: CopyDirection) -> tuple[Tensor, Tensor]:
        device, host = self._storage.pools()
        return (device, host) if direction is CopyDirection.OUT else (host, device)

    def _wait(self) -> None:
        if self._where.type == "cuda":
            torch.cuda.current_stream(self._where).synchronize()

    def _by_torch(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=self._where.type == "cuda")
        self._wait()

    def _by_torch_in(self, num_threads: int, source: Tensor, target: Tensor) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            self._by_torch(source, target)
        finally:
            torch.set_num_threads(before)

    def _by_two_threads(self, source: Tensor, target: Tensor) -> None:
        list(self._threads.map(np.copyto, np.array_split(_bytes(target), 2), np.array_split(_bytes(source), 2)))


def _by_numpy(source: Tensor, target: Tensor) -> None:
    np.copyto(_bytes(target), _bytes(source))


def _bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return tensor.view(-1).view(torch.uint8).numpy()
