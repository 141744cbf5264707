"""Tables, prefixes and copies: who holds which block, and when it comes back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from giveway.core.config import CacheConfig
from giveway.core.errors import InvariantError
from giveway.core.ids import BlockTable, CopyId, DeviceBlockId, HostBlockId, RequestId, TokenId
from giveway.core.kv_cache import BlockCopy, CopyDirection, KVCache

A, B = RequestId("a"), RequestId("b")


def table(*numbers: int) -> BlockTable:
    return tuple(DeviceBlockId(number) for number in numbers)


def host(*numbers: int) -> tuple[HostBlockId, ...]:
    return tuple(HostBlockId(number) for number in numbers)


def make_cache(*, device: int = 6, on_host: int = 4, prefix_caching: bool = True) -> KVCache:
    return KVCache(CacheConfig(device, on_host, block_size=2, enable_prefix_caching=prefix_caching))


def learn(kv: KVCache, name: RequestId, tokens: Sequence[TokenId]) -> None:
    kv.learn(name, len(tokens), lambda start, stop: tokens[start:stop])


def cached_prefix(kv: KVCache, name: RequestId, tokens: Sequence[TokenId], blocks: BlockTable) -> None:
    """One request computes its tokens and ends; its full blocks stay findable."""
    learn(kv, name, tokens)
    kv.admit(name, hits=(), new=blocks)
    kv.publish(name, len(tokens))
    kv.forget(name)


def test_blocks_are_findable_only_once_they_are_computed() -> None:
    # Goal: blocks handed out for a prefix are no hit before the forward pass that fills them.
    kv = make_cache()
    learn(kv, A, [1, 2, 3, 4, 5])
    learn(kv, B, [1, 2, 3, 4, 5])
    kv.admit(A, hits=(), new=table(0, 1, 2))
    assert kv.find_prefix(B, 5) == ()
    kv.publish(A, 3)
    assert kv.find_prefix(B, 5) == table(0)
    kv.publish(A, 5)
    assert kv.find_prefix(B, 5) == table(0, 1)
    kv.check()


def test_a_prompt_that_is_cached_whole_leaves_one_token_to_run() -> None:
    kv = make_cache()
    cached_prefix(kv, A, [1, 2, 3, 4], table(0, 1))
    learn(kv, B, [1, 2, 3, 4])
    assert kv.find_prefix(B, 4) == table(0)


def test_taking_an_idle_block_drops_its_prefix_entry() -> None:
    # Goal: nobody ever finds a block that another request computes in now.
    kv = make_cache()
    cached_prefix(kv, A, [1, 2, 3, 4, 5], table(0, 1, 2))
    kv.admit(B, hits=(), new=table(0))
    learn(kv, A, [1, 2, 3, 4, 5])
    assert kv.find_prefix(A, 5) == ()
    kv.check()


def test_two_requests_with_one_prefix_publish_one_copy_of_it() -> None:
    kv = make_cache()
    for name, blocks in ((A, table(0, 1)), (B, table(2, 3))):
        learn(kv, name, [1, 2, 3])
        kv.admit(name, hits=(), new=blocks)
        kv.publish(name, 3)
    kv.forget(B)
    assert kv.device.num_free == 4
    assert kv.find_prefix(A, 3) == table(0)
    kv.check()


def test_blocks_of_unknown_content_are_found_no_more() -> None:
    kv = make_cache()
    cached_prefix(kv, A, [1, 2, 3, 4, 5], table(0, 1, 2))
    kv.forget_content(table(1, 4))
    learn(kv, B, [1, 2, 3, 4, 5])
    assert kv.find_prefix(B, 5) == table(0)
    assert kv.device.num_free == 5
    kv.check()


def test_releasing_somebody_who_is_gone_is_a_no_op() -> None:
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0))
    kv.release(A)
    kv.release(A)
    kv.forget(A)
    assert kv.device.num_owned == 0
    kv.check()


def test_a_table_only_grows_at_its_end() -> None:
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0, 1))
    with pytest.raises(InvariantError, match="does not start with the old one"):
        kv.grow(A, table(1, 0, 2))
    with pytest.raises(InvariantError, match="already has a block table"):
        kv.admit(A, hits=(), new=table(3))


def test_a_copy_out_keeps_its_blocks_until_it_ends_even_if_the_request_ends_first() -> None:
    # Goal: blocks return to the pool after the copy that reads them, never before.
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0, 1, 2))
    kv.begin_copy(BlockCopy(CopyId(0), A, CopyDirection.OUT, table(0, 1), host(0, 1)))
    assert kv.device.num_owned == 2  # block 2 held nothing yet and is not copied
    kv.forget(A)
    kv.check()
    assert (kv.device.num_owned, kv.host.num_owned) == (2, 2)
    assert kv.end_copy(CopyId(0), keep=False) is not None
    assert (kv.device.num_owned, kv.host.num_owned) == (0, 0)
    assert kv.end_copy(CopyId(0), keep=False) is None
    kv.check()


def test_a_round_trip_ends_with_the_kv_in_new_blocks_and_the_host_empty() -> None:
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0, 1))
    kv.begin_copy(BlockCopy(CopyId(0), A, CopyDirection.OUT, table(0, 1), host(2, 3)))
    kv.end_copy(CopyId(0), keep=True)
    assert kv.host_tables == {A: host(2, 3)}
    back = BlockCopy(CopyId(1), A, CopyDirection.IN, table(4, 5), host(2, 3))
    kv.begin_copy(back, table=table(4, 5, 3))
    kv.check()
    assert kv.host.num_owned == 2  # pinned while it is read
    kv.end_copy(CopyId(1), keep=True)
    assert kv.tables == {A: table(4, 5, 3)}
    assert kv.host.num_owned == 0
    kv.check()


def test_a_copy_of_blocks_that_are_not_the_requests_own_is_refused() -> None:
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0, 1))
    with pytest.raises(InvariantError, match="does not read the request's own blocks"):
        kv.begin_copy(BlockCopy(CopyId(0), A, CopyDirection.OUT, table(1), host(0)))


def test_a_copy_begun_twice_is_refused() -> None:
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0))
    kv.begin_copy(BlockCopy(CopyId(0), A, CopyDirection.OUT, table(0), host(0)))
    with pytest.raises(InvariantError, match="begun twice"):
        kv.begin_copy(BlockCopy(CopyId(0), A, CopyDirection.OUT, table(0), host(0)))


def test_only_copies_that_can_still_end_count_as_live() -> None:
    kv = make_cache()
    for number, name in enumerate((A, B)):
        kv.admit(name, hits=(), new=table(number))
        kv.begin_copy(BlockCopy(CopyId(number), name, CopyDirection.OUT, table(number), host(number)))
    kv.lost.add(CopyId(0))
    assert [copy.request_id for copy in kv.live_copies()] == [B]
    kv.end_copy(CopyId(1), keep=False)
    assert not kv.has_live_copies


def test_the_check_sees_a_reference_that_nobody_holds() -> None:
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0))
    kv.device.share(table(0))
    with pytest.raises(InvariantError, match="counts 2 references but 1 hold it"):
        kv.check()
