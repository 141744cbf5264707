"""Bandwidth of swapping against the peak of the same link, measured in turn, and against the write-up's naive method.

KV of the shape of Qwen2.5-7B: 28 layers, 4 KV heads of 128, 16 bits, 57,344 bytes a token. The swap is the backend's
own copy of whole blocks, scattered as an allocator leaves them. The peak is the fastest plain copy, by whatever method
and in one thread or two, of as many bytes between one contiguous range of each of the same two pools. On both sides
every copy takes other blocks than the ones before, around pools of more than 1 GiB, so that no cache helps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, cycle, islice
from statistics import median
from typing import TYPE_CHECKING, Any

from giveway.bench.measure import Report
from giveway.core.block_pool import BlockPool
from giveway.core.ids import DeviceBlockId
from giveway.core.plan import CopyDirection
from giveway.runtime.block_shape import BlockShape
from giveway.runtime.torch import make_swap_probe

if TYPE_CHECKING:
    from giveway.runtime.torch.swap_probe import SwapProbe

SHAPE = BlockShape(num_layers=28, block_size=16, num_kv_heads=4, head_size=128)
NUM_BLOCKS = 1280  # of either pool: 1.1 GiB
TOKENS = (32, 256, 512, 2048, 8192)


def bench_swap(
    device: str, *, num_rounds: int = 20, sizes: Sequence[int] = TOKENS, num_blocks: int = NUM_BLOCKS
) -> Report:
    """Measure out and in for every size (tokens), in two pools of `num_blocks`.

    Raises ConfigError when the device is absent or memory is short, MissingDependencyError without PyTorch.
    """
    probe = make_swap_probe(SHAPE, num_blocks=num_blocks, device=device)
    scattered = _scattered_blocks(random.Random(7), num_blocks)  # noqa: S311  # repeatable on purpose
    ends = {end: _around(scattered, num_blocks) for end in ("device", "host")}
    rows = [_row(probe, tokens, num_blocks, ends, num_rounds) for tokens in sizes]
    probe.close()
    settings = {
        "device": probe.description,
        "shape": "28 layers, 4 KV heads, head size 128, 16 bit, 16 tokens a block",
        "pools_gib": round(num_blocks * probe.block_bytes / 2**30, 2),
        "rounds": num_rounds,
        "shares": "medians of swap over peak, pair by pair; peak: the fastest of " + "; ".join(probe.plain_methods),
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


def _around(scattered: Iterator[list[int]], pool_blocks: int) -> Iterator[int]:
    """Yield every block of a pool, in the order in which the allocator would give them, again and again."""
    found: dict[int, None] = {}
    while len(found) < pool_blocks:
        found |= dict.fromkeys(next(scattered))
    return cycle(found)


def _pairs(ends: Mapping[str, Iterator[int]], direction: CopyDirection, num_blocks: int) -> list[tuple[int, int]]:
    """Return (source, target) pairs of the blocks whose turn it is."""
    device, host = (list(islice(ends[end], num_blocks)) for end in ("device", "host"))
    return list(zip(device, host, strict=True) if direction is CopyDirection.OUT else zip(host, device, strict=True))


def _row(
    probe: SwapProbe, tokens: int, pool_blocks: int, ends: Mapping[str, Iterator[int]], num_rounds: int
) -> dict[str, Any]:
    num_blocks = tokens // SHAPE.block_size
    starts = (number * num_blocks % (pool_blocks - num_blocks) for number in count(1))
    swaps: dict[CopyDirection, list[float]] = {direction: [] for direction in CopyDirection}
    plain: dict[CopyDirection, dict[str, list[float]]] = {
        direction: {name: [] for name in probe.plain_methods} for direction in CopyDirection
    }
    naive: dict[CopyDirection, list[float]] = {direction: [] for direction in CopyDirection}
    for number in range(num_rounds):
        for direction in CopyDirection:
            swap = partial(probe.swap, direction, _pairs(ends, direction, num_blocks))
            swaps[direction].append(_seconds(swap))
            for name, times in plain[direction].items():
                copy = partial(probe.plain, direction, name, next(starts), next(starts), num_blocks)
                times.append(_seconds(copy))
            if number % 4 == 0:  # it takes long
                slow = partial(probe.naive, direction, _pairs(ends, direction, num_blocks))
                naive[direction].append(_seconds(slow))
    peaks = {direction: min(plain[direction].values(), key=median) for direction in CopyDirection}
    return _summary(tokens, num_blocks * probe.block_bytes, swaps, peaks, naive)


_Times = Mapping[CopyDirection, Sequence[float]]  # seconds, round by round


def _summary(tokens: int, num_bytes: int, swaps: _Times, peaks: _Times, naive: _Times) -> dict[str, Any]:
    def share(way: CopyDirection) -> float:
        return median(peak / swap for peak, swap in zip(peaks[way], swaps[way], strict=True))

    out, back = CopyDirection.OUT, CopyDirection.IN
    return {
        "tokens": tokens,
        "bytes": num_bytes,
        "out_ms": 1e3 * median(swaps[out]),
        "in_ms": 1e3 * median(swaps[back]),
        "out_gb_s": num_bytes / median(swaps[out]) / 1e9,
        "in_gb_s": num_bytes / median(swaps[back]) / 1e9,
        "peak_gb_s": num_bytes / min(median(peaks[out]), median(peaks[back])) / 1e9,
        "share_out": share(out),
        "share_in": share(back),
        "naive_out_ms": 1e3 * median(naive[out]),
        "naive_in_ms": 1e3 * median(naive[back]),
    }


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
