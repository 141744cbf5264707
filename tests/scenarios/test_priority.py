"""Urgent work goes first, in the same step, at the price of exactly those who have to pay."""

from __future__ import annotations

import pytest

from giveway.core.config import PreemptionChoice, SchedulingPolicy
from giveway.core.events import Preempted, Refused, TokenEmitted
from giveway.core.plan import DeferralReason, PreemptionMode
from giveway.core.request import RequestState
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.world import World, served, victims, why_not

RECOMPUTE = PreemptionChoice.RECOMPUTE


def test_urgent_arrival_takes_room_from_the_tail_of_the_ranking() -> None:
    # Goal: the lowest-ranked resident pays, and nobody else loses blocks.
    world = World(device_blocks=4)
    world.make_resident("early", priority=5, prompt_tokens=7)
    world.make_resident("late", priority=5, prompt_tokens=7)
    world.submit("urgent", priority=1, prompt_tokens=7)
    plan = world.step()
    assert victims(plan) == ["late"]
    assert served(plan) == {"urgent", "early"}


def test_an_urgent_arrival_takes_a_seat_when_seats_are_short_and_blocks_are_not() -> None:
    # Goal: two seats, ample room; the newest of the less urgent leaves, and the urgent one starts in the same step.
    world = World(device_blocks=1000, seats=2)
    for name in ("first", "second"):
        world.make_resident(name, priority=5, prompt_tokens=6, max_tokens=500)
    world.submit("urgent", priority=0, prompt_tokens=6, max_tokens=2)
    plan = world.step()
    assert victims(plan) == ["second"]
    assert served(plan) == {"first", "urgent"}
    assert world.events_of("urgent", TokenEmitted)
    world.steps(2)
    assert world.state_of("second") is RequestState.RUNNING


@pytest.mark.parametrize("seats", [2, 8])
def test_equals_never_displace_each_other(seats: int) -> None:
    # Goal: whether seats or blocks are short, a newcomer of the same class waits.
    world = World(device_blocks=8, seats=seats)
    for name in ("first", "second"):
        world.make_resident(name, priority=5, prompt_tokens=15, max_tokens=2)
    world.submit("equal", priority=5, prompt_tokens=4, max_tokens=2)
    plan = world.step()
    assert not plan.preemptions
    assert why_not(plan, "equal") is (DeferralReason.NO_SEAT if seats == 2 else DeferralReason.NO_DEVICE_BLOCKS)
    world.run_until_idle()
    assert not any(plan.preemptions for plan in world.plans)


def test_first_come_first_served_lets_no_newcomer_displace_anybody() -> None:
    world = World(device_blocks=100, seats=2, policy=SchedulingPolicy.FCFS)
    for name in ("first", "second"):
        world.make_resident(name, priority=5, prompt_tokens=6)
    world.submit("urgent", priority=0, prompt_tokens=6)
    plan = world.step()
    assert not plan.preemptions
    assert why_not(plan, "urgent") is DeferralReason.NO_SEAT


def test_a_pool_without_room_is_noticed_in_time_to_make_some() -> None:
    # Goal: seats are ample, blocks are not; the urgent one's first token comes with the step that displaces.
    world = World(device_blocks=8, seats=8)
    for name in ("first", "second"):
        world.make_resident(name, priority=5, prompt_tokens=15, max_tokens=2)
    world.submit("urgent", priority=0, prompt_tokens=8)
    plan = world.step()
    assert victims(plan) == ["second"]
    assert "urgent" in served(plan)
    assert len(world.events_of("urgent", TokenEmitted)) == 1


def three_of_four_blocks(device_blocks: int = 12) -> World:
    world = World(device_blocks=device_blocks)
    for number in range(3):
        world.make_resident(f"low{number}", priority=5, prompt_tokens=13, max_tokens=3)
    return world


def test_exactly_as_many_give_way_as_the_whole_prompt_needs() -> None:
    # Goal: the urgent prompt takes four blocks, one victim has four: one goes, the newest.
    world = three_of_four_blocks()
    world.submit("urgent", priority=0, prompt_tokens=13)
    assert victims(world.step()) == ["low2"]


def test_nobody_gives_way_for_a_request_that_can_never_fit() -> None:
    world = three_of_four_blocks()
    world.submit("urgent", priority=0, prompt_tokens=60)
    assert not victims(world.step())
    assert world.events_of("urgent", Refused)


def test_nobody_gives_way_in_vain() -> None:
    # Goal: if all less urgent residents together would not make room, none of them goes.
    world = World(device_blocks=12)
    world.make_resident("equal", priority=0, prompt_tokens=30, max_tokens=3)
    world.make_resident("low", priority=5, prompt_tokens=13, max_tokens=3)
    world.submit("urgent", priority=0, prompt_tokens=16)
    plan = world.step()
    assert not plan.preemptions
    assert why_not(plan, "urgent") is DeferralReason.NO_DEVICE_BLOCKS
    assert served(plan) == {"equal", "low"}


def test_the_least_urgent_class_pays_first() -> None:
    world = World(device_blocks=12)
    for name, priority in (("low", 9), ("middle", 5), ("also low", 9)):
        world.make_resident(name, priority=priority, prompt_tokens=13, max_tokens=3)
    world.submit("urgent", priority=0, prompt_tokens=28)
    assert victims(world.step()) == ["also low", "low"]


def test_requests_with_one_stamp_and_one_class_keep_the_order_in_which_they_were_sent() -> None:
    # Goal: a total order by a counter; request objects are never compared.
    world = World(device_blocks=100, seats=1)
    for number in range(6):
        world.submit(f"r{number}", prompt_tokens=4, max_tokens=1)
    order = [next(iter(served(plan))) for plan in world.steps(6)]
    assert order == [f"r{number}" for number in range(6)]


def test_an_urgent_prefill_takes_tokens_that_less_urgent_decodes_would_have_had() -> None:
    # Goal: 256 decodes at a budget of 256. The urgent prompt gets all its hundred tokens in the step after it arrives.
    world = World(device_blocks=1000, seats=256, budget=256)
    for number in range(256):
        world.make_resident(f"low{number}", priority=9, prompt_tokens=2, max_tokens=6)
    world.submit("urgent", priority=0, prompt_tokens=100, max_tokens=2)
    plan = world.step()
    assert victims(plan) == ["low255"]  # for its seat
    chunk = plan.chunk_of(world.request("urgent").request_id)
    assert chunk is not None
    assert chunk.num_tokens == 100
    assert len(plan.decodes) == 156
    world.run_until_idle()


def test_a_full_house_of_decodes_cannot_starve_the_best_prefill_of_their_class() -> None:
    # Goal: at least a block of tokens a step; the other decodes keep their token.
    world = World(device_blocks=100, seats=8, budget=8)
    world.make_resident("prefill", prompt_tokens=20, computed=4)
    for number in range(7):
        world.make_resident(f"decode{number}", prompt_tokens=2, max_tokens=9)
    plan = world.step()
    chunk = plan.chunk_of(world.request("prefill").request_id)
    assert chunk is not None
    assert chunk.num_tokens == 4
    assert len(plan.decodes) == 4


def test_decodes_keep_their_token_against_a_prefill_of_their_class() -> None:
    world = World(device_blocks=100, seats=8, budget=16)
    world.make_resident("prefill", prompt_tokens=40, computed=4)
    for number in range(7):
        world.make_resident(f"decode{number}", prompt_tokens=2, max_tokens=9)
    plan = world.step()
    assert [chunk.num_tokens for chunk in plan.chunks] == [9]
    assert len(plan.decodes) == 7


def test_an_admission_that_computed_nothing_is_taken_back_and_goes_behind_the_newcomer() -> None:
    # Goal: "seated" got a seat but no token; the urgent arrival takes both, and the two do not chase each other.
    world = World(device_blocks=8, seats=2, budget=4)
    world.submit("busy", priority=5, prompt_tokens=8, max_tokens=4)
    world.submit("seated", priority=9, prompt_tokens=8, max_tokens=4)
    world.step()
    assert world.state_of("seated") is RequestState.RUNNING
    assert world.request("seated").num_computed_tokens == 0
    world.submit("urgent", priority=0, prompt_tokens=8, max_tokens=4)
    plan = world.step()
    assert victims(plan) == ["seated"]
    assert plan.preemptions[0].mode is PreemptionMode.UN_ADMIT
    assert world.state_of("seated") is RequestState.WAITING
    assert world.blocks_of("seated") == ()
    world.run_until_idle()
    assert world.finished("seated").num_preemptions == 0
    assert world.num_preemptions("urgent") == 0
    assert len(world.events_of("seated", Preempted)) == 1


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_victim_returns_before_everybody_of_its_class_who_came_later(overlapped: bool) -> None:
    world = World(device_blocks=8, host_blocks=8, copies=(lambda _: CopyFate(1)) if overlapped else None)
    for name in ("first", "second"):
        world.make_resident(name, priority=5, prompt_tokens=15, max_tokens=4)
    world.submit("urgent", priority=0, prompt_tokens=13, max_tokens=2)
    world.submit("later", priority=5, prompt_tokens=13, max_tokens=4)
    world.run_until_idle()
    ends = [event.request_id for event in world.events if type(event).__name__ == "Finished"]
    assert ends.index(world.finished("second").request_id) < ends.index(world.finished("later").request_id)
    assert world.num_preemptions("first") == 0


def test_an_urgent_resident_is_served_before_less_urgent_ones_get_the_last_token() -> None:
    world = World(device_blocks=100, seats=4, budget=4)
    world.make_resident("low", priority=9, prompt_tokens=2)
    world.make_resident("urgent", priority=0, prompt_tokens=20, computed=8)
    plan = world.step()
    assert served(plan) == {"urgent"}
    assert why_not(plan, "low") is DeferralReason.NO_TOKENS


def test_room_into_which_those_above_will_grow_is_not_given_to_a_newcomer() -> None:
    # Goal: one block is free, but the resident above needs it while the newcomer's prefill runs.
    world = World(device_blocks=4, budget=8)
    world.make_resident("above", priority=0, prompt_tokens=7, max_tokens=6)
    world.submit("below", priority=5, prompt_tokens=7, max_tokens=2)
    plan = world.step()
    assert why_not(plan, "below") is DeferralReason.NO_DEVICE_BLOCKS
    world.run_until_idle()
    assert world.num_preemptions("below") == 0


def test_growth_that_this_step_gives_is_not_kept_free_a_second_time() -> None:
    # Goal: the resident above grows now, and needs no more while the newcomer's prefill runs: the rest is free.
    world = World(device_blocks=5)
    world.make_resident("above", priority=0, prompt_tokens=8, max_tokens=4, blocks=2)
    world.submit("below", priority=5, prompt_tokens=7, max_tokens=2)
    assert served(world.step()) == {"above", "below"}
    world.run_until_idle()


def test_somebody_admitted_beside_one_that_waits_for_a_copy_is_no_guest() -> None:
    # Goal: the room of the one that waits is held for it, so nobody else can do harm, or has to fear it.
    world = World(device_blocks=8, host_blocks=3, copies=lambda _: CopyFate(3))
    for name in ("first", "second"):
        world.make_resident(name, priority=9, prompt_tokens=11, max_tokens=5, blocks=4)
    world.submit("urgent", priority=0, prompt_tokens=14, max_tokens=2)
    world.submit("middle", priority=5, prompt_tokens=14, max_tokens=2)
    plan = world.step()
    assert why_not(plan, "urgent") is DeferralReason.COPY_IN_FLIGHT
    assert {p.victim: (p.beneficiary, p.mode) for p in plan.preemptions} == {
        "second": ("urgent", PreemptionMode.SWAP),
        "first": ("middle", PreemptionMode.RECOMPUTE),  # the host has no room left
    }
    assert [(admission.request_id, admission.is_guest) for admission in plan.admissions] == [("middle", False)]
    world.run_until_idle()


def test_what_growth_frees_beyond_its_need_does_not_go_past_an_urgent_request_that_was_deferred() -> None:
    # Goal: "back" waits for a block and may displace no equal. "first" grows at the cost of "second", who has two: the
    # one left over is for "back" in the next step, not for less urgent work that would have to give way to it again.
    world = World(device_blocks=3)
    world.make_resident("back", priority=0, prompt_tokens=1, max_tokens=4)
    world.make_resident("first", priority=0, prompt_tokens=3, max_tokens=8, blocks=1)
    world.give_way("back", RECOMPUTE)
    world.step()
    world.make_resident("second", priority=0, prompt_tokens=6, max_tokens=3)
    world.submit("low", priority=9, prompt_tokens=2, max_tokens=2)
    plan = world.step()
    assert victims(plan) == ["second"]
    assert served(plan) == {"first"}
    assert served(world.step()) == {"back", "first"}
    world.run_until_idle()
    assert world.num_preemptions("low") == 0
