"""What becomes of a victim's KV: every way, every price, and where each of them is impossible."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.cost_model import choose_mode
from giveway.core.cost_profile import CostProfile
from giveway.core.kv_cache import CopyDirection, Tier
from giveway.core.plan import Giving, PreemptionCost, PreemptionMode

AUTO, SWAP, RECOMPUTE = PreemptionChoice.AUTO, PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE
M = PreemptionMode
SIZE = 4

# Round numbers: a token costs 1 s to compute; a block costs 4 s to the host and back, 40 s to the disk and back, and
# each copy one second more.
PLAIN = CostProfile(
    step_s=1.0,
    token_s=1.0,
    context_s=0.0,
    copy_s=1.0,
    slot_out_s=0.5,
    slot_in_s=0.5,
    slot_to_disk_s=5.0,
    slot_from_disk_s=5.0,
)


# A victim of three full blocks that gives up all of them, with room everywhere.
WHOLE = Giving(
    num_blocks=3,
    num_computed_tokens=12,
    num_kept_tokens=0,
    num_copied_blocks=3,
    is_untouched=False,
    host_room=9,
    disk_room=9,
)


def choose(giving: Giving, wanted: PreemptionChoice, costs: CostProfile = PLAIN) -> PreemptionCost:
    return choose_mode(giving, costs, wanted, block_size=SIZE)


@pytest.mark.parametrize("wanted", PreemptionChoice)
def test_whoever_computed_nothing_of_its_own_is_un_admitted_for_nothing(wanted: PreemptionChoice) -> None:
    giving = replace(WHOLE, num_computed_tokens=8, num_copied_blocks=2, is_untouched=True)
    assert choose(giving, wanted) == PreemptionCost(M.UN_ADMIT, None, 0.0, None, None)


@pytest.mark.parametrize("wanted", PreemptionChoice)
@pytest.mark.parametrize(("computed", "kept"), [(12, 12), (9, 9), (0, 0)])
def test_whoever_keeps_all_that_it_computed_is_only_paused(wanted: PreemptionChoice, computed: int, kept: int) -> None:
    # Goal: a seat, or blocks not yet written, cost nothing whatever was asked for.
    giving = replace(WHOLE, num_computed_tokens=computed, num_kept_tokens=kept, num_copied_blocks=0, host_room=0)
    assert choose(giving, wanted) == PreemptionCost(M.PAUSE, None, 0.0, None, None)


@pytest.mark.parametrize(
    ("wanted", "host_room", "disk_room", "mode", "tier"),
    [
        (SWAP, 3, 0, M.SWAP, Tier.HOST),
        (SWAP, 3, 9, M.SWAP, Tier.HOST),
        (SWAP, 2, 3, M.SWAP, Tier.DISK),  # the host pool is one block short
        (SWAP, 0, 2, M.RECOMPUTE, None),  # so are both
        (SWAP, 0, 0, M.RECOMPUTE, None),
        (AUTO, 0, 0, M.RECOMPUTE, None),
        (RECOMPUTE, 9, 9, M.RECOMPUTE, None),
    ],
)
def test_a_swap_takes_the_nearest_tier_with_room_and_none_is_no_error(
    wanted: PreemptionChoice, host_room: int, disk_room: int, mode: PreemptionMode, tier: Tier | None
) -> None:
    cost = choose(replace(WHOLE, host_room=host_room, disk_room=disk_room), wanted)
    assert (cost.mode, cost.tier) == (mode, tier)
    assert (cost.host_s is None, cost.disk_s is None) == (host_room < 3, disk_room < 3)


def test_every_way_is_priced_whichever_is_chosen() -> None:
    # Two copies a second each, and 12 slots there and back: 14 s by the host, 122 s by the disk.
    for wanted in PreemptionChoice:
        cost = choose(WHOLE, wanted)
        assert (cost.recompute_s, cost.host_s, cost.disk_s) == (12.0, 14.0, 122.0)


def test_a_swap_that_was_asked_for_is_made_even_where_recomputing_is_cheaper() -> None:
    assert choose(WHOLE, SWAP).mode is M.SWAP
    assert choose(WHOLE, AUTO).mode is M.RECOMPUTE


def test_a_swap_takes_the_host_even_where_the_disk_is_cheaper_and_auto_does_not() -> None:
    fast_disk = replace(PLAIN, slot_to_disk_s=0.1, slot_from_disk_s=0.1)
    assert choose(WHOLE, SWAP, fast_disk).tier is Tier.HOST
    assert choose(WHOLE, AUTO, fast_disk).tier is Tier.DISK


def test_of_equal_prices_the_tier_nearer_to_the_device_is_taken_and_recomputing_before_a_swap() -> None:
    equal = replace(PLAIN, token_s=9.0, slot_to_disk_s=0.5, slot_from_disk_s=0.5)
    assert choose(WHOLE, AUTO, equal).tier is Tier.HOST
    as_dear = replace(PLAIN, copy_s=0.0)
    cost = choose(WHOLE, AUTO, as_dear)
    assert cost.recompute_s == cost.host_s
    assert cost.mode is M.RECOMPUTE


def test_auto_recomputes_short_contexts_and_swaps_long_ones_where_the_lines_cross() -> None:
    # Goal: a copy that costs 25 ms whatever its size, then little; recomputing costs 1 ms a token.
    costs = replace(PLAIN, token_s=0.001, copy_s=0.025, slot_out_s=1e-6, slot_in_s=1e-6)
    modes = {
        blocks: choose(
            replace(WHOLE, num_computed_tokens=blocks * SIZE, num_copied_blocks=blocks, host_room=99), AUTO, costs
        ).mode
        for blocks in (5, 12, 13, 40)
    }
    assert modes == {5: M.RECOMPUTE, 12: M.RECOMPUTE, 13: M.SWAP, 40: M.SWAP}


def test_a_tail_is_priced_by_what_is_given_up_alone() -> None:
    # Goal: two of three blocks are kept: four tokens to compute again, or one block to copy.
    tail = replace(WHOLE, num_blocks=1, num_kept_tokens=8, num_copied_blocks=1)
    cost = choose(tail, SWAP)
    assert (cost.recompute_s, cost.host_s, cost.disk_s) == (4.0, 6.0, 42.0)


def test_a_tail_at_a_late_position_costs_its_attention_to_all_that_was_kept() -> None:
    costs = replace(PLAIN, token_s=0.0, context_s=1.0)
    tail = replace(WHOLE, num_kept_tokens=8)
    assert choose(tail, RECOMPUTE, costs).recompute_s == 9 + 10 + 11 + 12


def test_blocks_that_another_copy_of_the_plan_carries_already_are_not_paid_for_again() -> None:
    cost = choose(replace(WHOLE, num_copied_blocks=0, host_room=0, disk_room=0), SWAP)
    assert (cost.mode, cost.tier, cost.host_s) == (M.SWAP, Tier.HOST, 2.0)


@pytest.mark.parametrize(("bound_to", "tier"), [(None, Tier.HOST), (Tier.HOST, Tier.HOST), (Tier.DISK, Tier.DISK)])
@pytest.mark.parametrize("wanted", [SWAP, AUTO])
def test_the_rest_follows_the_part_that_is_parked_already(
    wanted: PreemptionChoice, bound_to: Tier | None, tier: Tier
) -> None:
    # Goal: the KV of one request lies on one tier. Recomputing is made dear, so that `auto` swaps.
    cost = choose(replace(WHOLE, bound_to=bound_to), wanted, replace(PLAIN, token_s=99.0))
    assert cost.tier is tier
    assert (cost.host_s is None) == (bound_to is Tier.DISK)
    assert (cost.disk_s is None) == (bound_to is Tier.HOST)


@pytest.mark.parametrize("bound_to", Tier)
def test_where_the_tier_that_the_rest_is_bound_to_is_full_everything_is_recomputed(bound_to: Tier) -> None:
    bound = replace(WHOLE, bound_to=bound_to)
    cost = choose(replace(bound, host_room=0) if bound_to is Tier.HOST else replace(bound, disk_room=0), SWAP)
    assert cost == PreemptionCost(M.RECOMPUTE, None, 12.0, None, None)


def test_a_place_on_the_host_that_others_must_clear_costs_the_move_of_their_blocks_to_the_disk() -> None:
    # Two blocks, 8 slots at 5 s and the copy itself: 41 s beyond the 14 s of the swap.
    moved = replace(WHOLE, num_moved_blocks=2)
    assert choose(moved, SWAP).host_s == 14.0 + 41.0
    assert choose(moved, SWAP).disk_s == 122.0
    assert choose(moved, SWAP).tier is Tier.HOST
    dear = replace(PLAIN, token_s=99.0)
    assert choose(moved, AUTO, dear).tier is Tier.HOST
    assert choose(moved, AUTO, replace(dear, slot_from_disk_s=0.1)).tier is Tier.HOST
    assert choose(replace(moved, num_moved_blocks=9), AUTO, replace(dear, slot_from_disk_s=0.1)).tier is Tier.DISK


def test_a_beneficiary_that_waits_for_the_copy_out_pays_for_that_wait() -> None:
    awaited = replace(WHOLE, is_awaited=True)
    cost = choose(awaited, SWAP)
    assert (cost.recompute_s, cost.host_s, cost.disk_s) == (12.0, 14.0 + 7.0, 122.0 + 61.0)


@pytest.mark.parametrize("seed", range(30))
def test_auto_is_never_beaten_by_a_way_that_was_possible(seed: int) -> None:
    # Oracle: price every way with the profile itself and take the smallest.
    rng = random.Random(seed)
    for _ in range(50):
        computed = rng.randint(1, 40)
        kept = rng.randrange(0, computed, SIZE)
        copied = rng.randint(0, -(-computed // SIZE) - kept // SIZE)
        giving = Giving(
            num_blocks=copied,
            num_computed_tokens=computed,
            num_kept_tokens=kept,
            num_copied_blocks=copied,
            is_untouched=False,
            host_room=rng.randint(0, 12),
            disk_room=rng.randint(0, 12),
            num_moved_blocks=rng.choice([0, 0, 2]),
            bound_to=rng.choice([None, None, *Tier]),
            is_awaited=rng.random() < 0.5,
        )
        costs = replace(PLAIN, **{name: rng.choice([0.0, 0.1, 1.0, 3.0]) for name in PLAIN.as_dict()})
        expected = {M.RECOMPUTE: costs.recompute_s(kept, computed)}
        prices: dict[Tier, float] = {}
        for tier, room in ((Tier.HOST, giving.host_room), (Tier.DISK, giving.disk_room)):
            if copied <= room and giving.bound_to in (None, tier):
                out_s = costs.copy_one_way_s(CopyDirection.OUT, tier, copied * SIZE)
                prices[tier] = out_s * (2 if giving.is_awaited else 1)
                prices[tier] += costs.copy_one_way_s(CopyDirection.IN, tier, copied * SIZE)
                if giving.num_moved_blocks and (tier is Tier.HOST or giving.bound_to is Tier.DISK):
                    prices[tier] += costs.copy_one_way_s(CopyDirection.OUT, Tier.DISK, giving.num_moved_blocks * SIZE)
        if prices:
            expected[M.SWAP] = min(prices.values())
        cost = choose(giving, AUTO, costs)
        assert (cost.host_s, cost.disk_s) == pytest.approx((prices.get(Tier.HOST), prices.get(Tier.DISK)))
        chosen = cost.recompute_s if cost.tier is None else prices[cost.tier]
        assert chosen == pytest.approx(min(expected.values()))
