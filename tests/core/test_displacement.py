"""Who gives way in a plan, how much of what, and where it goes: small worlds, one plan at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from giveway.core.config import PreemptionChoice, VictimOrder
from giveway.core.cost_profile import SHIPPED
from giveway.core.events import ParkedMoved, Preempted
from giveway.core.ids import RequestId
from giveway.core.kv_cache import Tier
from giveway.core.plan import DeferralReason, Preemption, PreemptionMode, StepPlan
from giveway.core.request import RequestState
from tests.world import World, served, victims, why_not

SWAP, RECOMPUTE, AUTO = PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE, PreemptionChoice.AUTO
M = PreemptionMode
SYSTEM = tuple(range(100, 108))  # two blocks of four tokens that several prompts begin with


def given_up(plan: StepPlan, victim: str) -> Preemption:
    (preemption,) = [preemption for preemption in plan.preemptions if preemption.victim == victim]
    return preemption


def kept(world: World, name: str) -> tuple[int, ...]:
    return world.scheduler.state.kv.kept.get(RequestId(name), ())


def parked(world: World, name: str) -> tuple[Tier, int] | None:
    """The tier on which KV of a request is parked, and how many blocks of it."""
    found = world.scheduler.state.kv.parked.get(RequestId(name))
    return None if found is None else (found.tier, len(found.blocks))


# How much


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_a_victim_keeps_what_is_not_lacking(mode: PreemptionChoice) -> None:
    # Goal: two blocks of four are lacking, so two of four stay, and only eight tokens are ever computed again.
    world = World(device_blocks=6, host_blocks=6, tails=True, mode=mode)
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=4)
    table = world.blocks_of("low")
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=1)
    plan = world.step()
    assert given_up(plan, "low").num_kept == 2
    assert kept(world, "low") == table[:2]
    assert parked(world, "low") == ((Tier.HOST, 2) if mode is SWAP else None)
    assert served(plan) == {"urgent"}
    world.run_until_idle()
    assert world.finished("low").num_recomputed_tokens == (0 if mode is SWAP else 7)


def test_without_tails_a_victim_gives_up_everything() -> None:
    world = World(device_blocks=6, host_blocks=6, tails=False)
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=4)
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=1)
    preemption = given_up(world.step(), "low")
    assert (preemption.num_kept, preemption.num_blocks, preemption.whole) == (0, 4, None)
    world.run_until_idle()


def test_a_tail_tells_what_giving_up_everything_would_have_cost() -> None:
    world = World(device_blocks=6, tails=True, mode=RECOMPUTE)
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=4)
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=1)
    preemption = given_up(world.plan(), "low")
    assert preemption.cost.recompute_s == SHIPPED.recompute_s(8, 15)
    assert preemption.whole is not None
    assert preemption.whole.recompute_s == SHIPPED.recompute_s(0, 15)


@pytest.mark.parametrize("mode", PreemptionChoice)
def test_whoever_loses_its_seat_only_is_paused_and_keeps_everything(mode: PreemptionChoice) -> None:
    world = World(device_blocks=20, host_blocks=20, seats=1, tails=True, mode=mode)
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=4)
    table = world.blocks_of("low")
    world.submit("urgent", priority=0, prompt_tokens=5, max_tokens=1)
    plan = world.step()
    assert given_up(plan, "low").mode is M.PAUSE
    assert not plan.copies_out
    assert kept(world, "low") == table
    assert world.request("low").num_computed_tokens == 15
    world.run_until_idle()
    assert world.finished("low").num_recomputed_tokens == 0


def test_a_block_that_holds_nothing_yet_is_given_up_for_free() -> None:
    # Goal: 16 tokens are computed into five blocks; the fifth is empty, so nothing is lost or copied.
    world = World(device_blocks=6, tails=True, mode=RECOMPUTE)
    world.make_resident("low", priority=9, prompt_tokens=16, max_tokens=4)
    world.submit("urgent", priority=0, prompt_tokens=7, max_tokens=1)
    preemption = given_up(world.step(), "low")
    assert (preemption.mode, preemption.num_blocks, preemption.num_kept) == (M.PAUSE, 1, 4)
    world.run_until_idle()
    assert world.finished("low").num_recomputed_tokens == 0


def test_of_two_victims_the_less_urgent_gives_up_everything_and_the_other_what_is_still_lacking() -> None:
    world = World(device_blocks=8, tails=True, mode=RECOMPUTE)
    world.make_resident("mid", priority=5, prompt_tokens=15, max_tokens=4)
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=4)
    world.submit("urgent", priority=0, prompt_tokens=19, max_tokens=1)
    plan = world.step()
    assert {name: given_up(plan, name).num_kept for name in victims(plan)} == {"low": 0, "mid": 3}
    world.run_until_idle()


def test_one_that_computed_nothing_of_its_own_is_un_admitted_whole() -> None:
    world = World(device_blocks=6, tails=True)
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=4, computed=0)
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=1)
    preemption = given_up(world.step(), "low")
    assert (preemption.mode, preemption.num_kept) == (M.UN_ADMIT, 0)
    assert world.state_of("low") is RequestState.WAITING
    world.run_until_idle()


def test_whoever_has_paid_for_its_class_keeps_nothing_that_its_class_could_take_later() -> None:
    world = World(device_blocks=6, tails=True, mode=RECOMPUTE)
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=4)
    world.request("low").has_paid = True
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=1)
    assert given_up(world.step(), "low").num_kept == 0
    world.run_until_idle()


# Those who have given way already


def low_keeps_two(mode: PreemptionChoice = SWAP) -> World:
    """A world in which `low`, of class 9, keeps two blocks of four, behind an urgent resident that will grow twice."""
    world = World(device_blocks=6, host_blocks=6, tails=True, mode=mode)
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=4)
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=9)
    world.step()
    assert len(kept(world, "low")) == 2
    return world


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_whoever_kept_a_part_gives_up_more_of_it_block_by_block(mode: PreemptionChoice) -> None:
    # Goal: the urgent one grows every four tokens, and each time one more block goes, from the tail on.
    world = low_keeps_two(mode)
    world.run_until_idle()
    again = [event for event in world.events_of("low", Preempted) if event.is_again]
    assert [(event.num_blocks, event.num_kept) for event in again] == [(1, 1), (1, 0)]
    assert world.finished("low").num_preemptions == 1
    assert world.finished("low").num_recomputed_tokens == (0 if mode is SWAP else 15)


def test_whoever_gives_up_more_in_a_step_is_not_served_in_it() -> None:
    world = low_keeps_two()
    plan = world.step()
    while not victims(plan):
        plan = world.step()
    assert why_not(plan, "low") is DeferralReason.GIVES_WAY
    world.run_until_idle()


def test_a_keeper_gives_way_before_a_resident_of_its_class() -> None:
    # Goal: at most one of a class is left with a part of its KV.
    world = World(device_blocks=8, tails=True, mode=RECOMPUTE, seats=3)
    world.make_resident("a", priority=9, prompt_tokens=11, max_tokens=4)
    world.make_resident("b", priority=9, prompt_tokens=11, max_tokens=4)
    world.submit("first", priority=0, prompt_tokens=11, max_tokens=2)
    plan = world.step()
    assert (victims(plan), len(kept(world, "b"))) == (["b"], 2)
    world.submit("second", priority=0, prompt_tokens=7, max_tokens=1)
    plan = world.step()
    assert (victims(plan), kept(world, "b")) == (["b"], ())
    assert world.state_of("a") is RequestState.RUNNING
    world.run_until_idle()


def test_a_second_beneficiary_takes_more_from_the_same_victim_and_it_is_one_preemption() -> None:
    world = World(device_blocks=6, host_blocks=6, tails=True)
    world.make_resident("low", priority=9, prompt_tokens=23, max_tokens=2)
    for name in ("first", "second"):
        world.submit(name, priority=0, prompt_tokens=7, max_tokens=1)
    plan = world.step()
    preemption = given_up(plan, "low")
    assert (preemption.beneficiary, preemption.num_blocks, preemption.num_kept) == ("first", 4, 2)
    assert [len(copy.device_blocks) for copy in plan.copies_out] == [4]
    assert served(plan) == {"first", "second"}
    assert parked(world, "low") == (Tier.HOST, 4)
    world.run_until_idle()
    assert world.finished("low").num_preemptions == 1
    assert world.finished("low").num_recomputed_tokens == 0


def test_if_the_host_has_no_room_for_the_second_part_the_first_is_not_copied_either() -> None:
    # Goal: KV behind a hole is of no use, so its place on the host is free for others.
    world = World(device_blocks=6, host_blocks=3, tails=True)
    world.make_resident("low", priority=9, prompt_tokens=23, max_tokens=2)
    for name in ("first", "second"):
        world.submit(name, priority=0, prompt_tokens=7, max_tokens=1)
    plan = world.step()
    assert (given_up(plan, "low").mode, given_up(plan, "low").num_kept) == (M.RECOMPUTE, 2)
    assert not plan.copies_out
    assert world.num_host_blocks_owned == 0
    world.run_until_idle()


# Shared blocks


def sharing_world(*, device: int, host: int = 0, mode: PreemptionChoice = RECOMPUTE, tails: bool = True) -> World:
    """Two residents of class 9 that begin with the same two blocks, and have two and three blocks of their own."""
    world = World(device_blocks=device, host_blocks=host, tails=tails, mode=mode, prefix_caching=True)
    world.submit("a", priority=9, prompt=(*SYSTEM, *range(200, 204)), max_tokens=4)
    world.step()
    world.submit("b", priority=9, prompt=(*SYSTEM, *range(300, 308)), max_tokens=4)
    world.step()
    assert world.blocks_of("a")[:2] == world.blocks_of("b")[:2]
    return world


@pytest.mark.parametrize("tails", [False, True])
def test_a_victim_keeps_the_prefix_that_others_hold_too(tails: bool) -> None:
    # Goal: letting go of it would free nothing, and cost its computation.
    world = sharing_world(device=7, tails=tails)
    world.submit("urgent", priority=0, prompt_tokens=11, max_tokens=1)
    plan = world.step()
    assert (victims(plan), given_up(plan, "b").num_kept) == (["b"], 2)
    assert kept(world, "b") == world.blocks_of("a")[:2]
    world.run_until_idle()


def test_a_set_that_must_free_the_shared_prefix_cuts_it_at_the_same_depth_and_copies_it_once() -> None:
    # Goal: six of seven blocks are lacking: the three and two own ones, and the second shared one.
    world = sharing_world(device=7, host=8, mode=SWAP)
    world.submit("urgent", priority=0, prompt_tokens=23, max_tokens=1)
    shared = world.blocks_of("a")[1]
    plan = world.step()
    assert {name: given_up(plan, name).num_kept for name in victims(plan)} == {"a": 1, "b": 1}
    copied = [block for copy in plan.copies_out for block in copy.device_blocks]
    assert copied.count(shared) == 1
    first, second = (preemption.parked for preemption in plan.preemptions)
    assert first[0] == second[0]  # one place on the host stands for the block in both
    assert world.num_host_blocks_owned == len(copied)
    world.run_until_idle()
    assert [world.finished(name).num_recomputed_tokens for name in ("a", "b")] == [0, 0]


def test_a_failed_copy_of_a_shared_block_costs_everybody_who_shares_it_what_lay_behind() -> None:
    world = sharing_world(device=7, host=8, mode=SWAP)
    world.submit("urgent", priority=0, prompt_tokens=23, max_tokens=1)
    plan = world.plan()
    outcome = world.executor.execute(plan, world.scheduler.requests)
    writer = plan.copies_out[0]
    finished = tuple(copy.copy_id for copy in plan.copies_out[1:])
    outcome = replace(outcome, finished_copies=finished, failed_copies=(writer.copy_id,))
    world.now_s += 1.0
    world._open_plan = None
    world._record(world.scheduler.commit(plan, outcome))
    assert {world.state_of(name) for name in ("a", "b")} == {RequestState.PREEMPTED}
    assert {world.request(name).num_computed_tokens for name in ("a", "b")} == {4}
    assert world.num_host_blocks_owned == 0
    world.run_until_idle()


# Where


@pytest.mark.parametrize(
    ("host", "disk", "mode", "tier"),
    [
        (2, 0, M.SWAP, Tier.HOST),
        (2, 2, M.SWAP, Tier.HOST),
        (1, 2, M.SWAP, Tier.DISK),
        (0, 2, M.SWAP, Tier.DISK),
        (1, 1, M.RECOMPUTE, None),
        (0, 0, M.RECOMPUTE, None),
    ],
)
def test_a_tail_goes_to_the_host_else_to_the_disk_else_it_is_computed_again(
    tmp_path: Path, host: int, disk: int, mode: PreemptionMode, tier: Tier | None
) -> None:
    world = World(device_blocks=6, host_blocks=host, disk_blocks=disk, disk_dir=tmp_path, tails=True)
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=4)
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=1)
    cost = given_up(world.step(), "low").cost
    assert (cost.mode, cost.tier) == (mode, tier)
    assert parked(world, "low") == (None if tier is None else (tier, 2))
    world.run_until_idle()
    assert (world.finished("low").num_recomputed_tokens > 0) == (mode is M.RECOMPUTE)


def parked_behind(world: World, *, mid: int, low: int) -> None:
    """`low` is parked whole, and `mid` sits where it was; classes as given."""
    world.make_resident("low", priority=low, prompt_tokens=11, max_tokens=4)
    world.give_way("low", SWAP)
    world.submit("top", priority=0, prompt_tokens=31, max_tokens=1)
    world.step()
    assert parked(world, "low") == (Tier.HOST, 3)
    world.make_resident("mid", priority=mid, prompt_tokens=11, max_tokens=4)
    world.submit("urgent", priority=0, prompt_tokens=31, max_tokens=1)


@pytest.mark.parametrize(("mid", "low"), [(5, 9), (9, 9)])
def test_a_full_host_is_cleared_of_lower_ranked_kv_which_moves_on_to_the_disk(
    tmp_path: Path, mid: int, low: int
) -> None:
    world = World(device_blocks=8, host_blocks=3, disk_blocks=3, disk_dir=tmp_path)
    if mid == low:  # the older of one class is the better-ranked one
        world.submit("mid", priority=mid, prompt_tokens=11, max_tokens=4)
        world.step()
        world.submit("low", priority=low, prompt_tokens=11, max_tokens=4)
        world.step()
        world.give_way("low", SWAP)
        world.submit("urgent", priority=0, prompt_tokens=19, max_tokens=1)
        world.step()
        world.submit("more", priority=0, prompt_tokens=31, max_tokens=1)
    else:
        parked_behind(world, mid=mid, low=low)
    plan = world.step()
    assert [(move.request_id, len(move.host_blocks)) for move in plan.moves] == [("low", 3)]
    assert given_up(plan, "mid").cost.tier is Tier.HOST
    assert (parked(world, "mid"), parked(world, "low")) == ((Tier.HOST, 3), (Tier.DISK, 3))
    assert [event.tier for event in world.events_of("low", ParkedMoved)] == [Tier.DISK]
    world.run_until_idle()
    assert [world.finished(name).num_recomputed_tokens for name in ("mid", "low")] == [0, 0]


def test_kv_of_a_less_urgent_class_is_dropped_from_a_full_host_if_there_is_no_disk() -> None:
    world = World(device_blocks=8, host_blocks=3)
    parked_behind(world, mid=5, low=9)
    plan = world.step()
    assert plan.dropped == ("low",)
    assert (parked(world, "mid"), parked(world, "low")) == ((Tier.HOST, 3), None)
    assert world.state_of("low") is RequestState.PREEMPTED
    assert [event.tier for event in world.events_of("low", ParkedMoved)] == [None]
    world.run_until_idle()
    assert world.finished("mid").num_recomputed_tokens == 0
    assert world.finished("low").num_recomputed_tokens == 11


@pytest.mark.parametrize(("mid", "low"), [(9, 9), (9, 5)])
def test_kv_of_an_equal_or_more_urgent_class_stays_on_the_host_and_the_victim_recomputes(mid: int, low: int) -> None:
    world = World(device_blocks=8, host_blocks=3)
    parked_behind(world, mid=mid, low=low)
    plan = world.step()
    assert (plan.dropped, given_up(plan, "mid").mode) == ((), M.RECOMPUTE)
    assert parked(world, "low") == (Tier.HOST, 3)
    world.run_until_idle()


def test_a_disk_that_failed_too_often_is_left_alone(tmp_path: Path) -> None:
    world = World(device_blocks=6, disk_blocks=8, disk_dir=tmp_path, tails=True)
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=4)
    world.scheduler.state.num_disk_failures = 3
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=1)
    preemption = given_up(world.plan(), "low")
    assert (preemption.mode, preemption.giving.disk_room) == (M.RECOMPUTE, 0)
    world.run_until_idle()


def test_the_second_part_of_a_tail_follows_the_first_to_the_disk(tmp_path: Path) -> None:
    # Goal: by then the host has room, but the KV of one request lies on one tier.
    world = World(device_blocks=6, host_blocks=1, disk_blocks=8, disk_dir=tmp_path, tails=True)
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=4)
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=9)
    world.step()
    assert parked(world, "low") == (Tier.DISK, 2)
    plan = world.step()
    while not victims(plan):
        plan = world.step()
    assert given_up(plan, "low").giving.bound_to is Tier.DISK
    assert parked(world, "low") == (Tier.DISK, 3)
    world.run_until_idle()
    assert world.finished("low").num_recomputed_tokens == 0


# Which one of a class


@pytest.mark.parametrize(
    ("order", "victim"),
    [(VictimOrder.NEWEST, "new"), (VictimOrder.LEAST_WORK, "short"), (VictimOrder.CHEAPEST, "short")],
)
def test_the_victim_order_chooses_inside_the_class(order: VictimOrder, victim: str) -> None:
    # Goal: by recomputing, a token at an early position costs less; the newest has computed most.
    costs = replace(SHIPPED, token_s=0.0, context_s=1e-3)
    world = World(device_blocks=12, mode=RECOMPUTE, victim_order=order, costs=costs)
    world.make_resident("old", priority=9, prompt_tokens=15, max_tokens=2)
    world.make_resident("short", priority=9, prompt_tokens=10, max_tokens=2)
    world.make_resident("new", priority=9, prompt_tokens=15, max_tokens=2)
    world.submit("urgent", priority=0, prompt_tokens=14, max_tokens=1)
    assert victims(world.step()) == [victim]
    world.run_until_idle()


# Suspected bugs


@pytest.mark.parametrize("has_disk", [True, False])
def test_kv_that_moves_on_in_a_plan_is_not_added_to_on_the_host_in_the_same_plan(
    tmp_path: Path, has_disk: bool
) -> None:
    # Fails with a disk: `keeper` is asked for more of what it kept after its parked tail was sent to the disk by the
    # same plan; it is still taken as bound to the host, and commit ends in "parked on two tiers".
    world = World(device_blocks=8, host_blocks=4, tails=True, disk_blocks=8 if has_disk else 0, disk_dir=tmp_path)
    world.make_resident("keeper", priority=9, prompt_tokens=15, max_tokens=5)
    world.make_resident("v", priority=5, prompt_tokens=11, max_tokens=4)
    world.submit("u", priority=0, prompt_tokens=9, max_tokens=1)
    world.step()
    assert (len(kept(world, "keeper")), parked(world, "keeper")) == (2, (Tier.HOST, 2))
    world.give_way("v", SWAP)
    world.submit("u2", priority=0, prompt_tokens=27, max_tokens=1)
    world.step()
    world.run_until_idle()


def test_kept_blocks_that_a_failed_step_overwrote_are_not_used_again() -> None:
    # Goal: whoever kept blocks, and gave them up in the very plan that failed, must not find its KV in them again.
    world = World(device_blocks=5, tails=True, mode=RECOMPUTE)
    world.make_resident("grows", priority=0, prompt_tokens=7, max_tokens=10)
    world.make_resident("keeps", priority=9, prompt_tokens=11, max_tokens=4)
    while world.request("grows").num_computed_tokens < 12:
        world.step()
    assert len(kept(world, "keeps")) == 2
    world.backend.fails_next = True
    assert victims(world.step()) == ["keeps"]
    world.run_until_idle()


def test_nobody_is_displaced_for_a_prefill_that_gets_no_token_in_this_step() -> None:
    # Once: the time target leaves nothing for a second prefill, yet `mid` is seated, computes nothing, and `low`,
    # which would have decoded, has given way for it. (The budget of tokens is looked at first; the time is not.)
    world = World(device_blocks=20, seats=3, budget=64, target_step_s=1e-6, tails=True)
    world.make_resident("top", priority=0, prompt_tokens=40, max_tokens=2, computed=4)
    world.make_resident("first", priority=4, prompt_tokens=15, max_tokens=1, computed=0)
    world.make_resident("low", priority=9, prompt_tokens=4, max_tokens=8)
    world.submit("mid", priority=5, prompt_tokens=4, max_tokens=2)
    plan = world.plan()
    assert why_not(plan, "mid") is DeferralReason.NO_TOKENS
    assert victims(plan) == []
