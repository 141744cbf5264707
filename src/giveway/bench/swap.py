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
from functools import partial
from itertools import count
from statistics import median
from typing import Any

from giveway.bench.measure import Report
from giveway.core.block_pool import BlockPool
from giveway.core.ids import DeviceBlockId
from giveway.core.plan import CopyDirection
from giveway.runtime.torch.kv_storage import BlockShape
from giveway.runtime.torch.swap_probe import SwapProbe

SHAPE = BlockShape(num_layers=28, block_size=16, num_kv_heads=4, head_size=128)
NUM_BLOCKS = 1280  # of either pool: 1.1 GiB
TOKENS = (32, 256, 512, 2048, 8192)


def bench_swap(
    device: str, *, num_rounds: int = 20, sizes: Sequence[int] = TOKENS, num_blocks: int = NUM_BLOCKS
) -> Report:
    """Measure out and in for every size (tokens), in two pools of `num_blocks`.

    Raises ConfigError when the device is absent or memory is short.
    """
    probe = SwapProbe(SHAPE, num_blocks=num_blocks, device=device)
    scattered = _scattered_blocks(random.Random(7), num_blocks)  # noqa: S311  # repeatable on purpose
    rows = [_row(probe, tokens, num_blocks, scattered, num_rounds) for tokens in sizes]
    probe.close()
    settings = {
        "device": probe.description,
        "shape": "28 layers, 4 KV heads, head size 128, 16 bit, 16 tokens a block",
        "pools_gib": round(num_blocks * probe.block_bytes / 2**30, 2),
        "rounds": num_rounds,
        "shares": "medians of swap over peak, pair by pair",
    }
    return Report("Swap bandwidth", settings, rows)


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


def _pairs(scattered: Iterator[list[int]], num_blocks: int) -> list[tuple[int, int]]:
    """Return pairs of different blocks, each side in the order in which the allocator would give them."""
    sides = []
    for _ in range(2):
        found: dict[int, None] = {}
        while len(found) < num_blocks:
            found |= dict.fromkeys(next(scattered))
        sides.append(list(found)[:num_blocks])
    return list(zip(*sides, strict=True))


def _row(
    probe: SwapProbe, tokens: int, pool_blocks: int, scattered: Iterator[list[int]], num_rounds: int
) -> dict[str, Any]:
    num_blocks = tokens // SHAPE.block_size
    starts = (number * num_blocks % (pool_blocks - num_blocks) for number in count(1))

    def peak_s(direction: CopyDirection, method: str) -> float:
        return _seconds(partial(probe.plain, direction, method, next(starts), next(starts), num_blocks))

    best: dict[CopyDirection, str] = {}
    for direction in CopyDirection:
        tried = {name: median(peak_s(direction, name) for _ in range(5)) for name in probe.plain_methods}
        best[direction] = min(tried, key=lambda name: tried[name])
    times: dict[str, list[float]] = {}
    for _ in range(num_rounds):
        for direction in CopyDirection:  # other blocks in than out: what was just copied is still in the cache
            swap = partial(probe.swap, direction, _pairs(scattered, num_blocks))
            times.setdefault(direction.value, []).append(_seconds(swap))
        for direction in CopyDirection:
            times.setdefault(f"peak_{direction.value}", []).append(peak_s(direction, best[direction]))
    for _ in range(max(num_rounds // 4, 2)):
        for direction in CopyDirection:
            naive = partial(probe.naive, direction, _pairs(scattered, num_blocks))
            times.setdefault(f"naive_{direction.value}", []).append(_seconds(naive))
    return _summary(tokens, num_blocks * probe.block_bytes, times)


def _summary(tokens: int, num_bytes: int, times: dict[str, list[float]]) -> dict[str, Any]:
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


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
