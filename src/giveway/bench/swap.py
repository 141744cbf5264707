"""Bandwidth of swapping against the peak of the same link, measured in turn, and against the write-up's naive method.

KV of the shape of Qwen2.5-7B: 28 layers, 4 KV heads of 128, 16 bits, 57,344 bytes a token. The swap is the backend's
own copy of whole blocks, scattered as an allocator leaves them. The peak is the fastest plain copy of as many bytes
between one contiguous range of each of the same two pools. Both wander over pools of more than 1 GiB, so that no cache
helps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from statistics import median
from typing import Any

import numpy as np
import torch

from giveway.bench.measure import Report
from giveway.core.block_pool import BlockPool
from giveway.core.errors import ConfigError
from giveway.core.ids import DeviceBlockId, HostBlockId
from giveway.runtime.torch.kv_storage import BlockShape, KVStorage

SHAPE = BlockShape(num_layers=28, block_size=16, num_kv_heads=4, head_size=128)
NUM_BLOCKS = 1280  # of either pool: 1.1 GiB
TOKENS = (32, 256, 512, 2048, 8192)

Copy = Callable[[torch.Tensor, torch.Tensor], None]  # source, target: contiguous, of one size


def bench_swap(
    device: str, *, num_rounds: int = 20, sizes: Sequence[int] = TOKENS, num_blocks: int = NUM_BLOCKS
) -> Report:
    """Measure out and in for every size (tokens), in two pools of `num_blocks`.

    Raises ConfigError when the device is absent or memory is short.
    """
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device is {device!r}; 'cpu' works everywhere, 'cuda' where PyTorch finds such a device")
    where = torch.device(device)
    storage = KVStorage(
        SHAPE, num_device_blocks=num_blocks, num_host_blocks=num_blocks, dtype=torch.bfloat16, device=where
    )
    scattered = _scattered_blocks(random.Random(7), num_blocks)  # noqa: S311  # repeatable on purpose
    with ThreadPoolExecutor(2) as threads:
        methods = _plain_copies(where, threads)
        rows = [_row(storage, tokens, methods, scattered, num_rounds) for tokens in sizes]
    settings = {
        "device": torch.cuda.get_device_name(where) if device == "cuda" else "cpu (both pools are the same RAM)",
        "shape": "28 layers, 4 KV heads, head size 128, 16 bit, 16 tokens a block",
        "pools_gib": round(num_blocks * SHAPE.num_elements * 2 / 2**30, 2),
        "rounds": num_rounds,
        "threads": torch.get_num_threads(),
        "shares": "medians of swap over peak, pair by pair",
    }
    return Report("Swap bandwidth", settings, rows)


def _plain_copies(device: torch.device, threads: ThreadPoolExecutor) -> dict[str, Copy]:
    """All ways tried for the peak."""

    def by_torch(source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=device.type == "cuda")
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def by_numpy(source: torch.Tensor, target: torch.Tensor) -> None:
        np.copyto(_bytes(target), _bytes(source))

    def by_two_threads(source: torch.Tensor, target: torch.Tensor) -> None:
        sources, targets = np.array_split(_bytes(source), 2), np.array_split(_bytes(target), 2)
        list(threads.map(np.copyto, targets, sources))

    if device.type == "cuda":
        return {"torch": by_torch}
    return {"torch": by_torch, "numpy": by_numpy, "numpy, 2 threads": by_two_threads}


def _bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return tensor.view(-1).view(torch.uint8).numpy()


def _scattered_blocks(rng: random.Random, size: int) -> Iterator[list[int]]:
    """Yield block tables as the allocator hands them out after long use: requests of all sizes came and went."""
    pool: BlockPool[DeviceBlockId] = BlockPool(size)
    live: list[list[DeviceBlockId]] = []
    while True:
        while pool.num_available > size // 4:
            wanted = min(rng.choice((1, 2, 3, 8, 20)), pool.num_available)
            blocks = [DeviceBlockId(block) for block in pool.peek_free(0, wanted)]
            pool.take(blocks)
            live.append(blocks)
        rng.shuffle(live)
        gone = [block for blocks in live[: len(live) // 3] for block in blocks]
        pool.release(gone)
        live = live[len(live) // 3 :]
        free = list(pool.peek_free(0, pool.num_available))
        start = rng.randrange(len(free))  # not always the lowest numbers: those would stay in the cache
        yield free[start:] + free[:start]


def _tables(scattered: Iterator[list[int]], num_blocks: int) -> list[int]:
    """Return `num_blocks` different blocks, in the order in which the allocator would give them."""
    found: dict[int, None] = {}
    while len(found) < num_blocks:
        found |= dict.fromkeys(next(scattered))
    return list(found)[:num_blocks]


def _row(
    storage: KVStorage, tokens: int, methods: dict[str, Copy], scattered: Iterator[list[int]], num_rounds: int
) -> dict[str, Any]:
    num_blocks = tokens // SHAPE.block_size
    num_bytes = num_blocks * SHAPE.num_elements * 2
    device, host = storage.pools()
    starts = (number * num_blocks % (len(device) - num_blocks) for number in count(1))

    def peak_s(method: Copy, source: torch.Tensor, target: torch.Tensor) -> float:
        here, there = next(starts), next(starts)
        return _seconds(lambda: method(source[here : here + num_blocks], target[there : there + num_blocks]))

    def best(source: torch.Tensor, target: torch.Tensor) -> Copy:
        speeds = {name: median(peak_s(method, source, target) for _ in range(5)) for name, method in methods.items()}
        return methods[min(speeds, key=lambda name: speeds[name])]

    best_out, best_in = best(device, host), best(host, device)
    times: dict[str, list[float]] = {}
    for _ in range(num_rounds):
        # Other blocks in than out: what was just copied is still in the cache.
        tables = [_tables(scattered, num_blocks) for _ in range(4)]
        out = [(DeviceBlockId(a), HostBlockId(b)) for a, b in zip(tables[0], tables[1], strict=True)]
        back = [(HostBlockId(a), DeviceBlockId(b)) for a, b in zip(tables[2], tables[3], strict=True)]
        for name, work in (
            ("out", lambda out=out: storage.copy_out(out)),
            ("in", lambda back=back: storage.copy_in(back)),
        ):
            times.setdefault(name, []).append(_seconds(work))
        times.setdefault("peak_out", []).append(peak_s(best_out, device, host))
        times.setdefault("peak_in", []).append(peak_s(best_in, host, device))
    for _ in range(max(num_rounds // 4, 2)):
        pairs = list(zip(_tables(scattered, num_blocks), _tables(scattered, num_blocks), strict=True))
        times.setdefault("naive_out", []).append(_seconds(lambda pairs=pairs: _naive(device, host, pairs)))  # type: ignore[misc]
        times.setdefault("naive_in", []).append(_seconds(lambda pairs=pairs: _naive(host, device, pairs)))  # type: ignore[misc]

    def share(way: str) -> float:
        return median(peak / swap for peak, swap in zip(times[f"peak_{way}"], times[way], strict=True))

    ms = {name: 1e3 * median(seconds) for name, seconds in times.items()}
    return {
        "tokens": tokens,
        "bytes": num_bytes,
        "out_ms": ms["out"],
        "in_ms": ms["in"],
        "out_gb_s": num_bytes / ms["out"] / 1e6,
        "in_gb_s": num_bytes / ms["in"] / 1e6,
        "peak_gb_s": num_bytes / min(ms["peak_out"], ms["peak_in"]) / 1e6,
        "share_out": share("out"),
        "share_in": share("in"),
        "naive_out_ms": ms["naive_out"],
        "naive_in_ms": ms["naive_in"],
    }


def _naive(source: torch.Tensor, target: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy as the published write-up did: layer by layer, K and V apart, block by block, 16 KB at a time."""
    for layer in range(SHAPE.num_layers):
        for which in (0, 1):
            for a, b in pairs:
                target[b, layer, which].copy_(source[a, layer, which])
    if source.is_cuda or target.is_cuda:
        torch.cuda.synchronize()


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
