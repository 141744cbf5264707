"""What a plan may count on: a draft takes, shares, releases and promises without writing anything."""

from __future__ import annotations

import pytest

from giveway.core.config import CacheConfig
from giveway.core.errors import InvariantError
from giveway.core.ids import BlockTable, CopyId, DeviceBlockId, HostBlockId, RequestId
from giveway.core.kv_cache import BlockCopy, CopyDirection, KVCache, Tier
from giveway.core.kv_draft import KVDraft

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def table(*numbers: int) -> BlockTable:
    return tuple(DeviceBlockId(number) for number in numbers)


def make_cache(*, device: int = 6, on_host: int = 6, on_disk: int = 0) -> KVCache:
    return KVCache(CacheConfig(device, on_host, block_size=2, enable_prefix_caching=True, num_disk_blocks=on_disk))


def cache_with_prefix(*, owner_stays: bool) -> KVCache:
    """Tokens 1..5 were computed in blocks 0, 1, 2, by request a; c knows the same tokens."""
    kv = make_cache()
    for name in (A, C):
        kv.learn(name, 5, lambda start, stop: [1, 2, 3, 4, 5][start:stop])
    kv.admit(A, hits=(), new=table(0, 1, 2))
    kv.publish(A, 5)
    if not owner_stays:
        kv.release(A)
    return kv


def begin_copy_out(kv: KVCache, name: RequestId, number: int, blocks: BlockTable) -> None:
    hosts = tuple(HostBlockId(number * 3 + place) for place in range(len(blocks)))
    kv.begin_copy_out(BlockCopy(CopyId(number), name, CopyDirection.OUT, blocks, hosts), num_kept=0, parked=hosts)


def test_a_draft_writes_nothing() -> None:
    kv = cache_with_prefix(owner_stays=True)
    draft = KVDraft(kv)
    draft.release(table(0, 1, 2))
    draft.take(6)
    draft.take_parked(Tier.HOST, 2)
    kv.check()
    assert (kv.device.num_owned, kv.host.num_owned) == (3, 0)


def test_free_blocks_go_before_idle_ones_and_those_before_victims() -> None:
    # Goal: content that may be hit again is given up last.
    kv = cache_with_prefix(owner_stays=False)
    kv.admit(B, hits=(), new=table(5))
    draft = KVDraft(kv)
    draft.release(table(5))
    assert draft.num_available == 6
    assert draft.take(2) == table(2, 3)  # block 2 was never full, so it is free
    assert draft.take(2) == table(4, 1)
    assert draft.take(2) == table(0, 5)
    with pytest.raises(InvariantError, match="takes 1 blocks of 0 available"):
        draft.take(1)


def test_a_block_handed_out_by_the_plan_is_no_prefix_hit_any_more() -> None:
    # Goal: a later request of the same plan must not share what an earlier one will overwrite.
    draft = KVDraft(cache_with_prefix(owner_stays=False))
    assert draft.find_prefix(C, 5) == table(0, 1)
    draft.take(5)  # four free ones and the tail of the prefix
    assert draft.find_prefix(C, 5) == table(0)


def test_a_victims_block_that_somebody_took_is_no_prefix_hit_any_more() -> None:
    draft = KVDraft(cache_with_prefix(owner_stays=True))
    draft.release(table(0, 1, 2))
    draft.take(6)
    assert draft.find_prefix(C, 5) == ()


def test_sharing_an_idle_block_takes_as_much_room_as_a_new_one() -> None:
    draft = KVDraft(cache_with_prefix(owner_stays=False))
    hits = draft.find_prefix(C, 5)
    assert (draft.num_available, draft.num_unreferenced(hits)) == (6, 2)
    draft.share(hits)
    assert (draft.num_available, draft.num_unreferenced(hits)) == (4, 0)
    assert not set(draft.take(4)) & set(hits)


def test_sharing_a_block_of_a_resident_takes_no_room() -> None:
    draft = KVDraft(cache_with_prefix(owner_stays=True))
    hits = draft.find_prefix(C, 5)
    draft.share(hits)
    assert draft.num_available == 3
    draft.release(table(0, 1, 2))  # its other owner gives way: only block 2 comes free
    assert draft.num_available == 4


def test_a_hit_on_a_victim_of_the_same_plan_keeps_the_block_alive() -> None:
    draft = KVDraft(cache_with_prefix(owner_stays=True))
    draft.release(table(0, 1, 2))
    draft.share(table(0, 1))
    assert draft.num_available == 4
    assert not set(draft.take(4)) & {0, 1}


def test_a_shared_block_is_freed_when_its_last_owner_goes() -> None:
    kv = cache_with_prefix(owner_stays=True)
    kv.hold_hits(table(0, 1))
    kv.admit(B, hits=table(0, 1), new=table(3))
    draft = KVDraft(kv)
    first, second = table(0, 1, 2), table(0, 1, 3)
    freed, all_but_0 = draft.freed_blocks(()), draft.freed_blocks(table(0))
    freed.add(first)
    assert freed.count == 1
    freed.add(second)
    assert freed.count == 4
    freed.take_out(first)
    assert freed.count == 1
    all_but_0.add(first)
    all_but_0.add(second)
    assert all_but_0.count == 3
    draft.release(first)
    after = draft.freed_blocks(())
    after.add(second)
    assert after.count == 3


def test_blocks_under_a_copy_are_promised_and_not_available() -> None:
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0, 1, 2))
    begin_copy_out(kv, A, 0, table(0, 1, 2))
    draft = KVDraft(kv)
    assert (draft.num_available, draft.num_promised) == (3, 3)
    kv.lost.add(CopyId(0))
    assert KVDraft(kv).num_promised == 0


def test_a_block_that_two_copies_read_is_promised_once() -> None:
    # Goal: victims that share a prefix promise it together; not counting it would cost a further victim every step.
    kv = cache_with_prefix(owner_stays=True)
    kv.hold_hits(table(0, 1))
    kv.admit(B, hits=table(0, 1), new=table(3))
    during_plan = KVDraft(kv)
    during_plan.promise(table(0, 1, 2))
    assert during_plan.num_promised == 1
    during_plan.promise(table(0, 1, 3))
    assert during_plan.num_promised == 4
    begin_copy_out(kv, A, 0, table(0, 1, 2))
    begin_copy_out(kv, B, 1, table(0, 1, 3))
    assert KVDraft(kv).num_promised == 4


def test_a_block_under_a_copy_cannot_be_taken_when_its_other_owner_drops_it() -> None:
    # Goal: the copy still reads it; what the dropped owner frees is promised, not available.
    kv = cache_with_prefix(owner_stays=True)
    kv.hold_hits(table(0, 1))
    kv.admit(B, hits=table(0, 1), new=table(3))
    draft = KVDraft(kv)
    draft.promise(table(0, 1, 2))
    draft.release(table(0, 1, 3))
    assert (draft.num_available, draft.num_promised) == (3, 3)
    assert draft.take(3) == table(4, 5, 3)


def test_a_resident_whose_blocks_are_being_read_in_promises_none_of_them() -> None:
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0))
    begin_copy_out(kv, A, 0, table(0))
    kv.end_copy(CopyId(0), keep=True)
    back = BlockCopy(CopyId(1), A, CopyDirection.IN, table(4), kv.parked[A].blocks)
    kv.begin_copy_in(back, hits=(), new=table(4, 5))
    assert KVDraft(kv).num_promised == 0
    kv.forget(A)  # aborted: now the copy alone holds block 4
    assert KVDraft(kv).num_promised == 1


def test_what_is_held_for_a_waiting_request_is_out_of_reach_for_the_rest_of_the_plan() -> None:
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0, 1, 2))
    begin_copy_out(kv, A, 0, table(0, 1, 2))
    draft = KVDraft(kv)
    draft.hold(5)
    assert (draft.num_available, draft.num_promised) == (0, 1)


@pytest.mark.parametrize("tier", Tier)
def test_room_off_the_device_is_asked_for_before_it_is_taken(tier: Tier) -> None:
    draft = KVDraft(make_cache(on_host=3, on_disk=3))
    assert draft.num_parked_available(tier) == 3
    assert draft.take_parked(tier, 2) == (0, 1)
    assert draft.num_parked_available(tier) == 1
    with pytest.raises(InvariantError, match=f"parks 2 blocks on the {tier.value}, which lacks room"):
        draft.take_parked(tier, 2)
    assert draft.take_parked(tier, 1) == (2,)
    assert draft.take_parked(tier, 0) == ()
    other = Tier.DISK if tier is Tier.HOST else Tier.HOST
    assert draft.num_parked_available(other) == 3


def test_places_that_parked_kv_leaves_within_the_plan_are_handed_out_again_after_the_free_ones() -> None:
    # Goal: what moves on to the disk makes room on the host for a victim of the same plan.
    kv = make_cache(on_host=3)
    kv.admit(A, hits=(), new=table(0))
    begin_copy_out(kv, A, 0, table(0))
    kv.end_copy(CopyId(0), keep=True)
    draft = KVDraft(kv)
    assert draft.num_parked_available(Tier.HOST) == 2
    draft.free_parked(Tier.HOST, kv.parked[A].blocks)
    assert draft.num_parked_available(Tier.HOST) == 3
    assert draft.take_parked(Tier.HOST, 3) == (1, 2, 0)
    assert draft.num_parked_available(Tier.HOST) == 0
    kv.check()


def test_what_was_kept_counts_as_held_and_can_be_released_by_a_plan() -> None:
    kv = make_cache()
    kv.admit(A, hits=(), new=table(0, 1, 2))
    kv.give_up(A, 2)
    draft = KVDraft(kv)
    assert (draft.num_available, draft.references(DeviceBlockId(0))) == (4, 1)
    draft.release(table(1))
    assert draft.num_available == 5
    assert draft.take(5) == table(2, 3, 4, 5, 1)
