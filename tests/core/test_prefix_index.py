"""Chained hashes, and a map that never points at a block with other content."""

from __future__ import annotations

import random
from array import array

import pytest

from giveway.core.errors import InvariantError
from giveway.core.ids import DeviceBlockId
from giveway.core.prefix_index import ROOT, PrefixIndex, chain, root


def test_equal_blocks_after_different_beginnings_have_different_hashes() -> None:
    # Goal: the KV of a block depends on everything before it, so its hash must too.
    assert chain(chain(ROOT, (1, 2)), (5, 6)) != chain(chain(ROOT, (1, 3)), (5, 6))
    assert chain(chain(ROOT, (1, 2)), (5, 6)) == chain(chain(ROOT, [1, 2]), [5, 6])


def test_token_ids_do_not_run_into_each_other() -> None:
    assert chain(ROOT, (1, 23)) != chain(ROOT, (12, 3))
    assert chain(ROOT, (1,)) != chain(ROOT, (1, 0))


def test_without_a_salt_a_chain_starts_where_it_always_did() -> None:
    assert root(b"") == ROOT


def test_two_salts_never_share_a_prefix() -> None:
    # Goal: whoever has another salt, or none, cannot find out what somebody else asked.
    salts = [b"", b"\0", b"a", b"b", b"ab", b"a" * 1000, bytes(16)]
    for tokens in ([], [(1, 2)], [(1, 2), (3, 4)]):
        ends = set()
        for salt in salts:
            end = root(salt)
            for block in tokens:
                end = chain(end, block)
            ends.add(end)
        assert len(ends) == len(salts)
    assert root(b"a") == root(b"a")


def test_a_salt_spelled_like_a_block_is_not_taken_for_that_block() -> None:
    # Goal: a salt is chosen by a caller, who must not be able to start in the middle of somebody else's prefix.
    spelled = ROOT + array("I", (1, 2)).tobytes()
    assert root(spelled) != chain(ROOT, (1, 2))
    assert len(root(spelled)) == len(ROOT)


def test_the_second_copy_of_a_prefix_is_not_published() -> None:
    index = PrefixIndex()
    first = chain(ROOT, (1, 2))
    assert index.put(first, DeviceBlockId(3))
    assert not index.put(first, DeviceBlockId(4))
    assert index.find(first) == 3
    assert index.hash_of(DeviceBlockId(4)) is None
    assert len(index) == 1


def test_dropping_a_block_forgets_it_both_ways() -> None:
    index = PrefixIndex()
    first = chain(ROOT, (1, 2))
    index.put(first, DeviceBlockId(3))
    index.drop(DeviceBlockId(3))
    index.drop(DeviceBlockId(3))
    assert index.find(first) is None
    assert index.hash_of(DeviceBlockId(3)) is None
    index.check()


def test_a_block_cannot_hold_two_prefixes() -> None:
    index = PrefixIndex()
    index.put(chain(ROOT, (1,)), DeviceBlockId(0))
    with pytest.raises(InvariantError, match="two prefixes"):
        index.put(chain(ROOT, (2,)), DeviceBlockId(0))


@pytest.mark.parametrize("seed", range(5))
def test_the_index_is_a_one_to_one_map(seed: int) -> None:
    rng = random.Random(seed)
    index, oracle = PrefixIndex(), dict[bytes, int]()
    hashes = [chain(ROOT, (number,)) for number in range(8)]
    for _ in range(200):
        block, block_hash = DeviceBlockId(rng.randrange(6)), rng.choice(hashes)
        if rng.random() < 0.5:
            oracle = {h: b for h, b in oracle.items() if b != block}
            index.drop(block)
        elif block not in oracle.values():
            assert index.put(block_hash, block) == (block_hash not in oracle)
            oracle.setdefault(block_hash, block)
        index.check()
        assert {h: index.find(h) for h in hashes if index.find(h) is not None} == oracle
