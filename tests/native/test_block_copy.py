"""Native copies of KV blocks: every byte where it belongs, for any size, alignment and number of threads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

_native = pytest.importorskip("giveway_kernels._native")

Pool = np.ndarray[Any, np.dtype[np.uint8]]
Pair = tuple[int, int]


def random_pool(seed: int, num_blocks: int, block_bytes: int, misaligned_by: int = 0) -> Pool:
    values = np.random.default_rng(seed).integers(0, 256, misaligned_by + num_blocks * block_bytes, np.uint8)
    return values[misaligned_by:].reshape(num_blocks, block_bytes)


def as_array(pairs: Sequence[Pair]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(pairs, np.int64).reshape(-1, 2)


def scattered_pairs(rng: random.Random, num_source: int, num_target: int) -> list[Pair]:
    """Pairs with runs on both sides, on one side only, and single blocks, as a pool has them after long use."""
    sources, targets = list(range(num_source)), list(range(num_target))
    for blocks in (sources, targets):
        for _ in range(3):
            cut = rng.randrange(len(blocks) + 1)
            blocks[:] = blocks[cut:] + blocks[:cut]
            if rng.random() < 0.3:
                rng.shuffle(blocks)
    return list(zip(sources, targets, strict=False))[: rng.randrange(min(num_source, num_target) + 1)]


# Below and above the sizes from which a copy goes past the caches and is shared by threads; no multiples of a line too.
@pytest.mark.parametrize("block_bytes", [1, 63, 64, 1000, 4096, 100_003, 917_504])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_byte_is_copied_and_no_other_is_touched(block_bytes: int, num_threads: int) -> None:
    rng = random.Random(block_bytes)
    for seed in range(4):
        source = random_pool(seed, 9, block_bytes, misaligned_by=rng.choice([0, 1, 17]))
        target = random_pool(seed + 50, 12, block_bytes, misaligned_by=rng.choice([0, 8, 63]))
        pairs = scattered_pairs(rng, 9, 12)
        expected, untouched = target.copy(), source.copy()
        for one, other in pairs:
            expected[other] = source[one]
        _native.copy_blocks(source, target, as_array(pairs), num_threads=num_threads)
        assert np.array_equal(target, expected)
        assert np.array_equal(source, untouched)


def test_a_run_longer_than_the_piece_of_a_thread_is_copied_whole() -> None:
    source, target = random_pool(0, 40, 300_000), random_pool(1, 40, 300_000)
    _native.copy_blocks(source, target, as_array([(block, block) for block in range(40)]), num_threads=2)
    assert np.array_equal(source, target)


@pytest.mark.parametrize("wrong", [(9, 0), (0, 12), (-1, 0), (0, -1), (2**62, 0)])
def test_a_block_that_no_pool_has_is_refused_before_anything_is_copied(wrong: Pair) -> None:
    source, target = random_pool(0, 9, 100), random_pool(1, 12, 100)
    before = target.copy()
    with pytest.raises(
        IndexError, match=r"copy of KV block -?\d+: that pool has blocks 0 to (8|11); nothing was copied"
    ):
        _native.copy_blocks(source, target, as_array([(0, 0), (1, 1), wrong]), num_threads=2)
    assert np.array_equal(target, before)
    with pytest.raises(IndexError, match="nothing was copied"):
        _native.copy_blocks_in_order(
            target, as_array([(0, 1), wrong if max(wrong) > 11 or min(wrong) < 0 else (0, 12)])
        )
    assert np.array_equal(target, before)


def test_a_pool_without_blocks_says_so() -> None:
    with pytest.raises(IndexError, match="copy of KV block 0: that pool has no blocks"):
        _native.copy_blocks(random_pool(0, 0, 100), random_pool(1, 2, 100), as_array([(0, 0)]), num_threads=1)


def test_copies_within_a_pool_follow_one_another() -> None:
    # Goal: a target is the source of a later pair, also where the pairs look like a run. A block may stay where it is.
    for pairs in (
        [(0, 1), (1, 2), (2, 3)],
        [(3, 2), (2, 1), (1, 0)],
        [(0, 5), (5, 0), (0, 6), (4, 4)],
        [(1, 0), (2, 0), (0, 7)],
    ):
        pool = random_pool(3, 8, 1000)
        expected = pool.copy()
        for source, target in pairs:
            expected[target] = expected[source]
        _native.copy_blocks_in_order(pool, as_array(pairs))
        assert np.array_equal(pool, expected)


def test_nothing_to_copy_is_no_fault() -> None:
    source, target = random_pool(0, 3, 10), random_pool(1, 3, 10)
    before = target.copy()
    _native.copy_blocks(source, target, as_array([]), num_threads=2)
    _native.copy_blocks_in_order(target, as_array([]))
    assert np.array_equal(target, before)


def test_pools_that_do_not_fit_together_are_refused() -> None:
    source, target = random_pool(0, 3, 10), random_pool(1, 3, 11)
    with pytest.raises(ValueError, match="blocks of 10 and of 11 bytes"):
        _native.copy_blocks(source, target, as_array([(0, 0)]), num_threads=1)
    with pytest.raises(ValueError, match="num_threads is 0"):
        _native.copy_blocks(source, source.copy(), as_array([(0, 0)]), num_threads=0)
    with pytest.raises(TypeError):  # not a copy that is written to and lost
        _native.copy_blocks(source, np.zeros((3, 20), np.uint8)[:, ::2], as_array([(0, 0)]), num_threads=1)
    with pytest.raises(TypeError):
        _native.copy_blocks(source, source.copy(), np.zeros((1, 3), np.int64), num_threads=1)
    read_only = source.copy()
    read_only.flags.writeable = False
    with pytest.raises(TypeError):
        _native.copy_blocks(source, read_only, as_array([(0, 0)]), num_threads=1)
