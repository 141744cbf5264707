"""How a step is chosen: one walk down the ranking, which writes nothing and looks no further than it has to."""

from __future__ import annotations

from giveway.core.config import PreemptionChoice, SchedulingPolicy
from giveway.core.ids import RequestId
from giveway.core.plan import DeferralReason
from giveway.core.planner import plan_step
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.world import World, served, victims, why_not


def test_the_same_state_gives_the_same_plan() -> None:
    # Goal: deciding reads state and returns a value; asked twice, it decides the same.
    world = World(device_blocks=8, host_blocks=8, prefix_caching=True)
    for name in ("a", "b"):
        world.make_resident(name, priority=9, prompt_tokens=11)
    world.submit("urgent", priority=0, prompt_tokens=20)
    plan = world.plan()
    assert plan.preemptions
    assert plan_step(world.scheduler.state) == plan == plan_step(world.scheduler.state)


def test_every_request_that_was_looked_at_is_served_or_told_why_not() -> None:
    world = World(device_blocks=8, seats=3, budget=8)
    world.make_resident("decodes", priority=0, prompt_tokens=3)
    world.make_resident("prefills", priority=5, prompt_tokens=16, computed=4)
    world.submit("waits", priority=5, prompt_tokens=20)
    plan = world.plan()
    assert served(plan) == {"decodes", "prefills"}
    assert why_not(plan, "waits") is DeferralReason.NO_DEVICE_BLOCKS


def test_nobody_is_looked_at_behind_one_that_found_no_seat() -> None:
    # Goal: whoever ranks lower could displace nobody else, so a look would be in vain.
    world = World(device_blocks=100, seats=1)
    world.make_resident("runs", priority=0, prompt_tokens=3)
    for number in range(5):
        world.submit(f"r{number}", prompt_tokens=3)
    assert [deferral.request_id for deferral in world.plan().deferrals] == ["r0"]


def test_the_control_policy_keeps_arrival_order_and_passes_nobody_by() -> None:
    # Goal: behind one that does not fit, nobody else is let in either.
    world = World(device_blocks=8, policy=SchedulingPolicy.NONE)
    world.make_resident("runs", prompt_tokens=15, max_tokens=4)
    world.submit("big", priority=9, prompt_tokens=20, max_tokens=2)
    world.submit("small", priority=0, prompt_tokens=2, max_tokens=2)
    plan = world.plan()
    assert served(plan) == {"runs"}
    assert [deferral.request_id for deferral in plan.deferrals] == ["big"]
    world.run_until_idle()
    assert not any(plan.preemptions for plan in world.plans)


def test_a_newcomer_is_visited_at_its_place_in_the_ranking_and_not_after_all_residents() -> None:
    # Goal: the urgent newcomer gets its tokens before the less urgent resident gets what is left.
    world = World(device_blocks=20, seats=2, budget=8)
    world.make_resident("low", priority=9, prompt_tokens=12, computed=4)
    world.submit("urgent", priority=0, prompt_tokens=6, max_tokens=2)
    plan = world.plan()
    assert [(chunk.request_id, chunk.num_tokens) for chunk in plan.chunks] == [("urgent", 6), ("low", 2)]


def test_copies_of_one_plan_bear_different_numbers() -> None:
    world = World(device_blocks=8, host_blocks=8)
    for name in ("a", "b"):
        world.make_resident(name, priority=9, prompt_tokens=15, max_tokens=2)
    world.submit("urgent", priority=0, prompt_tokens=28, max_tokens=1)
    plan = world.step()
    assert [copy.copy_id for copy in plan.copies_out] == [0, 1]
    later = world.step()
    assert [swap_in.copy.copy_id for swap_in in later.swap_ins] == [2, 3]
    world.run_until_idle()


def test_blocks_that_hold_nothing_yet_are_not_copied() -> None:
    # Goal: five tokens known and four computed: one block travels, the other is free at once.
    world = World(device_blocks=4, host_blocks=4, copies=lambda _: CopyFate(3))
    world.make_resident("r", prompt_tokens=4)
    world.give_way("r", PreemptionChoice.SWAP)
    plan = world.step()
    assert [(len(copy.device_blocks), len(copy.parked_blocks)) for copy in plan.copies_out] == [(1, 1)]
    assert world.num_device_blocks_owned == 1


def test_a_resident_on_its_way_back_is_nobodys_victim() -> None:
    # Goal: its blocks are pinned by the copy; the urgent one waits for the end of the copy and takes them then.
    world = World(device_blocks=4, host_blocks=4, copies=lambda copy: CopyFate(3 if copy.copy_id else 0))
    world.make_resident("back", priority=9, prompt_tokens=11, max_tokens=4)
    world.give_way("back", PreemptionChoice.SWAP)
    world.steps(2)
    world.submit("urgent", priority=0, prompt_tokens=8, max_tokens=2)
    plan = world.step()
    assert not victims(plan)
    assert why_not(plan, "back") is DeferralReason.COPY_IN_FLIGHT
    while RequestId("urgent") not in served(plan):
        plan = world.step()
    assert victims(plan) == ["back"] or world.num_preemptions("back") == 2
    world.run_until_idle()
