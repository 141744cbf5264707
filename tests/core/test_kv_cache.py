"""Tables, prefixes and copies: who holds which block, and when it comes back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from giveway.core.config import CacheConfig
from giveway.core.errors import InvariantError
from giveway.core.ids import BlockTable, CopyId, DeviceBlockId, DiskBlockId, HostBlockId, RequestId, TokenId
from giveway.core.kv_cache import BlockCopy, CopyDirection, KVCache, Parked, ParkedTable, Tier, TierMove

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
OUT, IN = CopyDirection.OUT, CopyDirection.IN


def table(*numbers: int) -> BlockTable:
    return tuple(DeviceBlockId(number) for number in numbers)


def host(*numbers: int) -> tuple[HostBlockId, ...]:
    return tuple(HostBlockId(number) for number in numbers)


def disk(*numbers: int) -> tuple[DiskBlockId, ...]:
    return tuple(DiskBlockId(number) for number in numbers)


def make_cache(*, device: int = 6, on_host: int = 4, on_disk: int = 0, prefix_caching: bool = True) -> KVCache:
    return KVCache(
        CacheConfig(device, on_host, block_size=2, enable_prefix_caching=prefix_caching, num_disk_blocks=on_disk)
    )


def copy_out(
    kv: KVCache,
    number: int,
    name: RequestId,
    blocks: BlockTable,
    to: ParkedTable,
    *,
    num_kept: int = 0,
    parked: ParkedTable | None = None,
    tier: Tier = Tier.HOST,
) -> None:
    """Begin a copy out; parked: where all of the tail will be, if that is not just what the copy writes."""
    copy = BlockCopy(CopyId(number), name, OUT, blocks, to, tier)
    kv.begin_copy_out(copy, num_kept=num_kept, parked=to if parked is None else parked)


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
    copy_out(kv, 0, A, table(0, 1), host(0, 1))
    assert kv.device.num_owned == 2  # block 2 held nothing yet and is not copied
    kv.forget(A)
    kv.check()
    assert (kv.device.num_owned, kv.host.num_owned) == (2, 2)
    assert kv.end_copy(CopyId(0), keep=False) is not None
    assert (kv.device.num_owned, kv.host.num_owned) == (0, 0)
    assert kv.end_copy(CopyId(0), keep=False) is None
    kv.check()


@pytest.mark.parametrize("tier", Tier)
def test_a_round_trip_ends_with_the_kv_in_new_blocks_and_the_tier_empty(tier: Tier) -> None:
    kv = make_cache(on_disk=4)
    kv.admit(A, hits=(), new=table(0, 1))
    to: ParkedTable = host(2, 3) if tier is Tier.HOST else disk(2, 3)
    copy_out(kv, 0, A, table(0, 1), to, tier=tier)
    assert kv.parked == {}  # nothing is complete before the copy has ended
    kv.end_copy(CopyId(0), keep=True)
    assert kv.parked == {A: Parked(tier, to)}
    kv.begin_copy_in(BlockCopy(CopyId(1), A, IN, table(4, 5), to, tier), hits=(), new=table(4, 5, 3))
    kv.check()
    assert kv.pool_of(tier).num_owned == 2  # pinned while it is read
    assert kv.parked == {}
    kv.end_copy(CopyId(1), keep=True)
    assert kv.tables == {A: table(4, 5, 3)}
    assert kv.pool_of(tier).num_owned == 0
    kv.check()


def test_a_copy_of_blocks_that_are_not_the_requests_own_is_refused() -> None:
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0, 1))
    with pytest.raises(InvariantError, match="does not read the request's own blocks"):
        copy_out(kv, 0, A, table(2), host(0))


def test_a_copy_of_blocks_that_the_request_keeps_is_refused() -> None:
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0, 1))
    with pytest.raises(InvariantError, match="does not read the request's own blocks"):
        copy_out(kv, 0, A, table(0), host(0), num_kept=1)


def test_a_copy_begun_twice_is_refused() -> None:
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0))
    copy_out(kv, 0, A, table(0), host(0))
    with pytest.raises(InvariantError, match="begun twice"):
        copy_out(kv, 0, A, table(0), host(0))


def test_only_copies_that_can_still_end_count_as_live() -> None:
    kv = make_cache()
    for number, name in enumerate((A, B)):
        kv.admit(name, hits=(), new=table(number))
        copy_out(kv, number, name, table(number), host(number))
    kv.lost.add(CopyId(0))
    assert [copy.request_id for copy in kv.live_copies()] == [B]
    kv.end_copy(CopyId(1), keep=False)
    assert not kv.has_live_copies


# Tails


def test_whoever_gives_up_a_tail_keeps_the_head_and_gets_it_back_with_the_next_admission() -> None:
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0, 1, 2))
    kv.give_up(A, 1)
    assert (kv.tables, kv.kept) == ({}, {A: table(0)})
    assert kv.device.num_owned == 1
    kv.check()
    kv.admit(A, hits=(), new=table(4, 5))
    assert (kv.tables, kv.kept) == ({A: table(0, 4, 5)}, {})
    kv.check()


@pytest.mark.parametrize(("num_kept", "left"), [(2, {A: (0, 1)}), (1, {A: (0,)}), (0, {})])
def test_what_was_kept_can_be_given_up_later_as_far_as_asked(num_kept: int, left: dict[str, tuple[int, ...]]) -> None:
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0, 1, 2))
    kv.give_up(A, 2)
    kv.give_up(A, num_kept)
    assert kv.kept == left
    assert kv.device.num_owned == num_kept
    kv.check()


def test_a_tail_is_parked_in_pieces_and_lies_on_the_tier_in_logical_order() -> None:
    # Goal: first the third block goes, later the second: what is parked reads second, third.
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0, 1, 2))
    copy_out(kv, 0, A, table(2), host(3), num_kept=2)
    kv.end_copy(CopyId(0), keep=True)
    assert (kv.kept, kv.parked) == ({A: table(0, 1)}, {A: Parked(Tier.HOST, host(3))})
    copy_out(kv, 1, A, table(1), host(0), num_kept=1)
    kv.check()
    assert kv.parked == {}  # not complete while the second piece is under way
    kv.end_copy(CopyId(1), keep=True)
    assert (kv.kept, kv.parked) == ({A: table(0)}, {A: Parked(Tier.HOST, host(0, 3))})
    kv.check()


def test_a_failed_second_piece_takes_the_first_one_with_it_and_spares_what_was_kept() -> None:
    # Goal: KV behind a hole is of no use.
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0, 1, 2))
    copy_out(kv, 0, A, table(2), host(3), num_kept=2)
    kv.end_copy(CopyId(0), keep=True)
    copy_out(kv, 1, A, table(1), host(0), num_kept=1)
    kv.end_copy(CopyId(1), keep=False)
    assert (kv.kept, kv.parked) == ({A: table(0)}, {})
    assert (kv.device.num_owned, kv.host.num_owned) == (1, 0)
    kv.check()


def test_the_kv_of_one_request_never_lies_on_two_tiers() -> None:
    kv = make_cache(on_disk=4)
    kv.admit(A, hits=(), new=table(0, 1))
    copy_out(kv, 0, A, table(1), host(0), num_kept=1)
    kv.end_copy(CopyId(0), keep=True)
    with pytest.raises(InvariantError, match="parked on two tiers"):
        copy_out(kv, 1, A, table(0), disk(0), tier=Tier.DISK)


def test_what_comes_back_takes_its_place_behind_what_was_kept_and_found() -> None:
    # Goal: kept block 0, a hit for the second block, the third from the host, the fourth new.
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0, 1, 2))
    learn(kv, B, [1, 2])
    kv.admit(B, hits=(), new=table(5))
    kv.publish(B, 2)
    copy_out(kv, 0, A, table(1, 2), host(0, 1), num_kept=1)
    kv.end_copy(CopyId(0), keep=True)
    kv.hold_hits(table(5))
    kv.begin_copy_in(BlockCopy(CopyId(1), A, IN, table(3), host(1)), hits=table(5), new=table(3, 4))
    assert kv.tables[A] == table(0, 5, 3, 4)
    assert kv.host.num_owned == 1  # host block 0 was not needed
    kv.check()


# Blocks that several victims share


def shared_tail(kv: KVCache) -> None:
    """Two requests share device block 0, and give up everything: the copy of the first writes it for both."""
    learn(kv, A, [1, 2, 3])
    kv.admit(A, hits=(), new=table(0, 1))
    kv.publish(A, 2)
    kv.hold_hits(table(0))
    kv.admit(B, hits=table(0), new=table(2))
    copy_out(kv, 0, A, table(0, 1), host(0, 1))
    copy_out(kv, 1, B, table(2), host(2), parked=host(0, 2))
    kv.check()


def test_a_block_that_two_victims_share_is_written_once_and_held_by_both() -> None:
    kv = make_cache()
    shared_tail(kv)
    assert kv.host.num_owned == 3
    for number in (0, 1):
        kv.end_copy(CopyId(number), keep=True)
    kv.check()
    assert kv.parked == {A: Parked(Tier.HOST, host(0, 1)), B: Parked(Tier.HOST, host(0, 2))}
    kv.drop_parked(A)
    assert kv.host.num_owned == 2
    kv.check()


def test_a_copy_out_knows_whose_parked_kv_depends_on_it() -> None:
    kv = make_cache()
    shared_tail(kv)
    first, second = kv.copies[CopyId(0)], kv.copies[CopyId(1)]
    assert kv.sharing_parked(first) == [B]  # its own copy is still under way
    assert kv.sharing_parked(second) == []
    kv.end_copy(CopyId(1), keep=True)
    assert kv.sharing_parked(first) == [B]  # now it is complete but for the first


# From the host to the disk


def test_parked_kv_moves_on_to_the_disk_and_leaves_the_host_to_others() -> None:
    kv = make_cache(on_disk=4)
    kv.admit(A, hits=(), new=table(0, 1))
    copy_out(kv, 0, A, table(1), host(2), num_kept=1)
    kv.end_copy(CopyId(0), keep=True)
    kv.move_to_disk(TierMove(CopyId(1), A, host(2), disk(3)))
    assert kv.parked == {A: Parked(Tier.DISK, disk(3))}
    assert kv.kept == {A: table(0)}
    assert (kv.host.num_owned, kv.disk.num_owned) == (0, 1)
    kv.check()


def test_a_move_of_blocks_that_are_not_the_requests_own_is_refused() -> None:
    kv = make_cache(on_disk=4)
    kv.admit(A, hits=(), new=table(0))
    copy_out(kv, 0, A, table(0), host(2))
    kv.end_copy(CopyId(0), keep=True)
    with pytest.raises(InvariantError, match="does not read the request's own host blocks"):
        kv.move_to_disk(TierMove(CopyId(1), A, host(1), disk(3)))


def test_a_request_that_ends_leaves_nothing_on_any_tier() -> None:
    kv = make_cache(on_disk=4)
    for number, name in enumerate((A, B, C)):
        kv.admit(name, hits=(), new=table(2 * number, 2 * number + 1))
    copy_out(kv, 0, A, table(1), host(0), num_kept=1)
    copy_out(kv, 1, B, table(2, 3), disk(0, 1), tier=Tier.DISK)
    for number in (0, 1):
        kv.end_copy(CopyId(number), keep=True)
    kv.give_up(C, 1)
    for name in (A, B, C):
        kv.forget(name)
    assert [pool.num_owned for pool in (kv.device, kv.host, kv.disk)] == [0, 0, 0]
    kv.check()


# The eviction order


def test_idle_blocks_of_an_urgent_class_outlive_later_ones_of_a_less_urgent_class() -> None:
    # Goal: with a lead of a minute a class, class 0 at 100 s counts like class 1 at 160 s.
    kv = make_cache(device=2)
    for name, tokens, block, priority, now_s in ((A, [1, 2], 0, 0, 100.0), (B, [3, 4], 1, 1, 150.0)):
        learn(kv, name, tokens)
        kv.now_s = now_s
        kv.admit(name, hits=(), new=table(block), priority=priority)
        kv.publish(name, 2)
        kv.forget(name)
    assert list(kv.device.idle_blocks()) == [1, 0]


def test_the_check_sees_a_reference_that_nobody_holds() -> None:
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0))
    kv.device.share(table(0))
    with pytest.raises(InvariantError, match="counts 2 references but 1 hold it"):
        kv.check()
