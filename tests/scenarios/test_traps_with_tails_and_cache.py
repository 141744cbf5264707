"""Small situations in which schedulers went wrong before, with tails and prefix cache in every combination."""

from __future__ import annotations

import pytest

from giveway.core.config import PreemptionChoice, SchedulingPolicy
from giveway.core.events import Admitted, Preempted
from giveway.core.kv_cache import BlockCopy, CopyDirection
from giveway.core.plan import DeferralReason
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.world import World, served, victims, why_not

SWAP, RECOMPUTE = PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE

with_tails = pytest.mark.parametrize("tails", [True, False], ids=["tails", "whole"])
with_cache = pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])


def late_out(copy: BlockCopy) -> CopyFate:
    """Copies off the device take six steps."""
    return CopyFate(6 if copy.direction is CopyDirection.OUT else 0)


# The whole pool


@with_tails
@with_cache
@pytest.mark.parametrize("mode", list(PreemptionChoice))
def test_a_prompt_that_fills_the_pool_exactly_gets_all_of_it_from_less_urgent_work(
    mode: PreemptionChoice, prefix_caching: bool, tails: bool
) -> None:
    # Goal: no block stays behind with anybody who kept a part, in the cache, or in reserve.
    world = World(device_blocks=10, host_blocks=10, mode=mode, tails=tails, prefix_caching=prefix_caching)
    for number in range(3):
        world.make_resident(f"low{number}", priority=9, prompt_tokens=8, max_tokens=4)
    world.submit("whole", priority=0, prompt_tokens=40, max_tokens=1)
    plan = world.step()
    assert served(plan) == {"whole"}
    assert set(victims(plan)) == {"low0", "low1", "low2"}
    assert world.is_finished("whole")
    assert not any(world.scheduler.state.kv.kept.values())
    world.run_until_idle()


@with_tails
@with_cache
def test_a_prompt_that_fills_the_pool_exactly_waits_for_a_keeper_of_its_class_no_longer_than_for_the_rest(
    prefix_caching: bool, tails: bool
) -> None:
    # Goal: "young" has given up a tail for "old" and keeps its head; "whole" came last and needs every block there is.
    # It is served when all others have ended, and not before: keeping a part is no way to starve it or to be starved.
    world = World(device_blocks=6, host_blocks=6, tails=tails, prefix_caching=prefix_caching)
    world.make_resident("old", prompt_tokens=8, max_tokens=10, blocks=2)
    world.make_resident("young", prompt_tokens=15, max_tokens=4, blocks=4)
    world.submit("whole", prompt_tokens=24, max_tokens=1)
    while not world.is_finished("whole"):
        world.step()
    ends = {name: world.finished(name).time_s for name in ("old", "young", "whole")}
    assert ends["whole"] == max(ends["old"], ends["young"]) + 1
    assert len([event for event in world.events_of("young", Preempted) if not event.is_again]) == 1
    world.run_until_idle()


# A giant


@with_tails
@with_cache
@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_behind_a_giant_that_waits_the_small_ones_of_its_class_go_on(
    mode: PreemptionChoice, prefix_caching: bool, tails: bool
) -> None:
    # Goal: the giant cannot be placed before "runs" has ended. Until then seven small ones of its class pass one after
    # another through the rest of the pool, and then the giant is not put off any further.
    world = World(device_blocks=10, host_blocks=20, mode=mode, tails=tails, prefix_caching=prefix_caching)
    world.make_resident("runs", prompt_tokens=15, max_tokens=13)
    world.submit("giant", prompt_tokens=30, max_tokens=4)
    for number in range(7):
        world.submit(f"small{number}", prompt_tokens=5, max_tokens=3)
    while not world.is_finished("runs"):
        plan = world.step()
        assert why_not(plan, "giant") is DeferralReason.NO_DEVICE_BLOCKS
        assert not victims(plan)
    assert all(world.is_finished(f"small{number}") for number in range(7))
    assert "giant" in served(world.step())
    world.run_until_idle()


@with_tails
@with_cache
@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_guests_let_the_giant_in_as_soon_as_they_are_all_that_is_in_its_way(
    mode: PreemptionChoice, prefix_caching: bool, tails: bool
) -> None:
    # Goal: the small ones run for long; the step after "runs" has ended belongs to the giant all the same.
    world = World(device_blocks=10, host_blocks=20, mode=mode, tails=tails, prefix_caching=prefix_caching)
    world.make_resident("runs", prompt_tokens=15, max_tokens=4)
    world.submit("giant", prompt_tokens=30, max_tokens=4)
    for number in range(2):
        world.submit(f"small{number}", prompt_tokens=5, max_tokens=30)
    while not world.is_finished("runs"):
        assert {"small0", "small1"} <= served(world.step())
    plan = world.step()
    assert "giant" in served(plan)
    assert set(victims(plan)) <= {"small0", "small1"}
    world.run_until_idle()


# Copies that take their time


@with_tails
@with_cache
def test_while_a_copy_takes_six_steps_nobody_else_has_to_go(prefix_caching: bool, tails: bool) -> None:
    # Goal: the room is promised to the one that waits. No second victim, no third beneficiary of the room, and whoever
    # else has room goes on computing.
    world = World(device_blocks=8, host_blocks=16, copies=late_out, tails=tails, prefix_caching=prefix_caching)
    for name in ("first", "second"):
        world.make_resident(name, priority=9, prompt_tokens=4, max_tokens=12, blocks=4)
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=2)
    assert victims(world.step()) == ["second"]
    world.submit("small", priority=9, prompt_tokens=2, max_tokens=2)
    for plan in world.steps(6):
        assert not plan.preemptions
        assert why_not(plan, "urgent") is DeferralReason.COPY_IN_FLIGHT
        assert served(plan) == {"first"}
    assert "urgent" in served(world.step())
    world.run_until_idle()
    assert sum(len(plan.preemptions) for plan in world.plans) == 1


@with_tails
def test_a_second_urgent_arrival_during_the_copy_takes_its_own_victim_and_not_the_room_of_the_first(
    tails: bool,
) -> None:
    # Goal: promises are kept: the second one asks for what it lacks itself, once, and both start when the copies end.
    world = World(device_blocks=8, host_blocks=16, copies=late_out, tails=tails)
    for name in ("low0", "low1"):
        world.make_resident(name, priority=9, prompt_tokens=13, max_tokens=4)
    world.submit("first", priority=0, prompt_tokens=15, max_tokens=2)
    assert victims(world.step()) == ["low1"]
    world.submit("second", priority=0, prompt_tokens=15, max_tokens=2)
    plan = world.step()
    assert victims(plan) == ["low0"]
    for name in ("first", "second"):
        assert why_not(plan, name) is DeferralReason.COPY_IN_FLIGHT
    assert not any(plan.preemptions for plan in world.steps(8))
    world.run_until_idle()


# The budget of a step


@with_tails
@with_cache
def test_two_hundred_and_fifty_six_decodes_at_a_budget_of_256_do_not_keep_an_urgent_prefill_waiting(
    prefix_caching: bool, tails: bool
) -> None:
    # Goal: the decodes spend every seat and the whole budget, a token each. One of them leaves its seat, nothing more,
    # and the urgent prompt gets all its tokens at once; the most urgent decodes share what is left.
    world = World(device_blocks=512, block_size=16, seats=256, budget=256, prefix_caching=prefix_caching, tails=tails)
    for number in range(256):
        world.make_resident(f"decode{number}", priority=9, prompt_tokens=2, max_tokens=4)
    assert len(world.step().decodes) == 256
    world.submit("urgent", priority=0, prompt_tokens=100, max_tokens=1)
    plan = world.step()
    assert [(chunk.request_id, chunk.num_tokens) for chunk in plan.chunks] == [("urgent", 100)]
    assert len(plan.decodes) == 156
    assert len(plan.preemptions) == 1
    assert world.is_finished("urgent")
    world.run_until_idle()


@with_tails
@with_cache
@pytest.mark.parametrize("policy", [SchedulingPolicy.PRIORITY, SchedulingPolicy.FCFS])
def test_a_prefill_above_as_many_decodes_of_its_class_as_the_budget_has_tokens_gets_a_block_of_them(
    policy: SchedulingPolicy, prefix_caching: bool, tails: bool
) -> None:
    # Goal: an equal takes no token of a decode but for one block of tokens a step, so that nothing can starve it.
    world = World(
        device_blocks=512,
        block_size=16,
        seats=256,
        budget=256,
        policy=policy,
        prefix_caching=prefix_caching,
        tails=tails,
    )
    world.make_resident("prefill", prompt_tokens=100, computed=4)
    for number in range(255):
        world.make_resident(f"decode{number}", prompt_tokens=2, max_tokens=4)
    plan = world.step()
    assert [(chunk.request_id, chunk.num_tokens) for chunk in plan.chunks] == [("prefill", 16)]
    assert len(plan.decodes) == 240
    world.run_until_idle()


# Equals


@with_tails
@with_cache
@pytest.mark.parametrize("mode", list(PreemptionChoice))
@pytest.mark.parametrize("policy", [SchedulingPolicy.PRIORITY, SchedulingPolicy.FCFS])
def test_two_full_equals_in_a_pool_of_four_blocks_take_turns_once(
    policy: SchedulingPolicy, mode: PreemptionChoice, prefix_caching: bool, tails: bool
) -> None:
    # Goal: both need a third block in the same step. The older one gets it and runs to its end; the newer one gives way
    # in one piece or in two, comes back once, and neither chases the other.
    world = World(device_blocks=4, host_blocks=4, mode=mode, policy=policy, prefix_caching=prefix_caching, tails=tails)
    world.make_resident("older", prompt_tokens=8, max_tokens=8, blocks=2)
    world.make_resident("newer", prompt_tokens=8, max_tokens=8, blocks=2)
    plan = world.step()
    assert victims(plan) == ["newer"]
    assert served(plan) == {"older"}
    world.run_until_idle()
    assert world.num_preemptions("older") == 0
    assert [event.is_again for event in world.events_of("newer", Preempted)] in ([False], [False, True])
    assert len(world.events_of("newer", Admitted)) == 1
    assert world.finished("newer").num_recomputed_tokens <= (8 if mode is not SWAP else 0)


# A block boundary


def at_a_boundary(num_tail_blocks: int, *, tails: bool, prefix_caching: bool) -> World:
    """Five who need a block each, above five who hold so many, of which the last has a single token in it."""
    world = World(
        device_blocks=5 * (2 + num_tail_blocks), host_blocks=40, seats=10, tails=tails, prefix_caching=prefix_caching
    )
    for number in range(5):
        world.make_resident(f"top{number}", priority=0, prompt_tokens=8, max_tokens=4, blocks=2)
    for number in range(5):
        world.make_resident(f"tail{number}", priority=9, prompt_tokens=4 * num_tail_blocks - 3, max_tokens=4)
    assert world.scheduler.state.kv.device.num_available == 0
    return world


@with_tails
@with_cache
@pytest.mark.parametrize("num_tail_blocks", [5, 6])
def test_five_at_a_block_boundary_ask_one_below_as_long_as_its_blocks_suffice(
    num_tail_blocks: int, prefix_caching: bool, tails: bool
) -> None:
    # Goal: not a tail of one token from each of five, which would all lose their seat, but all five from the last.
    world = at_a_boundary(num_tail_blocks, tails=tails, prefix_caching=prefix_caching)
    plan = world.step()
    assert victims(plan) == ["tail4"]
    assert served(plan) == {f"top{n}" for n in range(5)} | {f"tail{n}" for n in range(4)}
    kept = len(world.scheduler.state.kv.kept.get(world.request("tail4").request_id, ()))
    assert kept == (num_tail_blocks - 5 if tails else 0)
    world.run_until_idle()
    assert sum(len(plan.preemptions) for plan in world.plans) == 1


@with_tails
@with_cache
def test_five_at_a_block_boundary_ask_the_next_one_only_when_the_first_has_nothing_left(
    prefix_caching: bool, tails: bool
) -> None:
    # Goal: two blocks each, so three must go, the last of them with half of what it has. At most one of a class keeps a
    # part of its KV.
    world = at_a_boundary(2, tails=tails, prefix_caching=prefix_caching)
    plan = world.step()
    assert victims(plan) == ["tail4", "tail3", "tail2"]
    assert served(plan) == {f"top{n}" for n in range(5)} | {"tail0", "tail1"}
    kept = {name: len(table) for name, table in world.scheduler.state.kv.kept.items() if table}
    assert kept == ({"tail2": 1} if tails else {})
    world.run_until_idle()
