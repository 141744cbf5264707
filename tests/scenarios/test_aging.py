"""Aging: with time a request counts as more urgent, wherever urgency counts. A step of these worlds is a second."""

from __future__ import annotations

import random

import pytest

from giveway.core.config import PreemptionChoice, SchedulingPolicy
from giveway.core.events import Admitted, Preempted
from giveway.core.plan import DeferralReason
from giveway.core.request import RequestState
from tests.world import World, served, victims, why_not

with_mode = pytest.mark.parametrize("mode", list(PreemptionChoice))
with_tails = pytest.mark.parametrize("tails", [True, False], ids=["tails", "whole"])


@with_tails
@with_mode
def test_one_that_has_waited_long_enough_goes_before_fresh_work_of_a_more_urgent_class(
    mode: PreemptionChoice, tails: bool
) -> None:
    # Goal: one seat, and more class 1 work than it can do. After three spans of four seconds "old" of class 4 is of
    # class 1 too, and came first.
    world = World(device_blocks=4, host_blocks=4, seats=1, aging_s=4.0, mode=mode, tails=tails)
    world.submit("old", priority=4, prompt_tokens=3, max_tokens=1)
    for number in range(20):
        world.submit(f"fresh{number}", priority=1, prompt_tokens=3, max_tokens=1)
        if world.is_finished("old"):
            break
        world.step()
    assert world.finished("old").time_s == 13.0  # it was served in the step that began at 12 s
    world.run_until_idle()


@with_tails
@with_mode
def test_one_that_has_aged_past_a_resident_displaces_it(mode: PreemptionChoice, tails: bool) -> None:
    # Goal: "young" sits in the way. At seven seconds both are of class 2 and equals never displace each other; at eight
    # "old" is of class 1, and "young" not yet.
    world = World(device_blocks=4, host_blocks=4, aging_s=4.0, mode=mode, tails=tails)
    world.submit("old", priority=3, prompt_tokens=11, max_tokens=1)
    world.submit("blocker", priority=0, prompt_tokens=6, max_tokens=5)
    world.steps(5)
    assert world.is_finished("blocker")
    world.make_resident("young", priority=2, prompt_tokens=6, max_tokens=8)
    while world.now_s < 8:
        plan = world.step()
        assert why_not(plan, "old") is DeferralReason.NO_DEVICE_BLOCKS
        assert not victims(plan)
    plan = world.step()
    assert victims(plan) == ["young"]
    assert "old" in served(plan)
    world.run_until_idle()


def test_nobody_ages_past_the_most_urgent_class_and_in_it_the_first_to_arrive_goes_first() -> None:
    # Goal: after a hundred spans "aged" is of class 0 and not of a class below: it displaces nobody of class 0.
    world = World(device_blocks=4, aging_s=1.0)
    world.submit("aged", priority=100, prompt_tokens=11, max_tokens=2)
    world.make_resident("urgent", priority=0, prompt_tokens=3, max_tokens=8)
    world._flush()
    world.now_s = 150.0
    world.submit("giant", priority=0, prompt_tokens=15, max_tokens=1)
    plan = world.step()
    assert [world.request(name).rank[0] for name in ("aged", "urgent", "giant")] == [0, 0, 0]
    assert not victims(plan)
    assert served(plan) == {"aged", "urgent"}
    world.run_until_idle()
    assert world.finished("aged").time_s < world.finished("giant").time_s


@with_tails
@with_mode
def test_neither_giving_way_nor_coming_back_makes_anybody_younger(mode: PreemptionChoice, tails: bool) -> None:
    # Goal: a class follows from the arrival and nothing else, through swaps, recomputation, un-admission and failures.
    rng = random.Random(5)
    world = World(device_blocks=10, host_blocks=10, seats=4, budget=16, aging_s=3.0, mode=mode, tails=tails)
    for step in range(150):
        if len(world.scheduler.requests) < 8:
            world.submit(
                f"r{step}", priority=rng.randint(0, 12), prompt_tokens=rng.randint(1, 20), max_tokens=rng.randint(1, 20)
            )
        names = list(world.scheduler.requests)
        if names and rng.random() < 0.2:
            world.give_way(rng.choice(names), rng.choice(list(PreemptionChoice)))
        world.backend.fails_next = rng.random() < 0.05
        world.plan()
        for request in world.scheduler.requests.values():
            spec = request.spec
            assert request.rank[0] == max(spec.priority - int((world.now_s - spec.arrival_s) // 3), 0)
        world.step()
    assert len([event for event in world.events if isinstance(event, Preempted)]) > 20
    world.run_until_idle()


@with_mode
def test_a_victim_that_ages_while_it_waits_comes_back_at_the_cost_of_the_class_it_gave_way_to(
    mode: PreemptionChoice,
) -> None:
    # Goal: "old" of class 1 gives way to class 0 work that never ends. Five seconds later it is of class 0 itself and
    # ahead of whatever arrives.
    world = World(device_blocks=4, host_blocks=4, seats=1, aging_s=5.0, mode=mode)
    world.make_resident("old", priority=1, prompt_tokens=3, max_tokens=4)
    for number in range(10):
        world.submit(f"urgent{number}", priority=0, prompt_tokens=3, max_tokens=1)
        world.step()
    assert world.num_preemptions("old") == 1
    assert 5.0 <= world.events_of("old", Admitted)[0].time_s <= 7.0
    world.run_until_idle()


@pytest.mark.parametrize("asked", ["old", "fresh"])
@pytest.mark.parametrize(("aging_s", "kept"), [(None, "fresh"), (3.0, "old")])
def test_what_an_aged_request_leaves_in_the_cache_counts_as_of_its_aged_class(
    aging_s: float | None, kept: str, asked: str
) -> None:
    # Goal: "old" of class 4 waits until it is of class 0, leaves a block in the cache and ends; then "fresh" of class 2
    # does. Then a single block has to go: that of the class which counts as less urgent, not the older one.
    world = World(device_blocks=8, seats=1, prefix_caching=True, aging_s=aging_s)
    prompts = {"old": [7] * 5, "fresh": [8] * 5}
    world.make_resident("blocker", priority=0, prompt_tokens=3, max_tokens=16)
    world.submit("old", priority=4, prompt=prompts["old"], max_tokens=1)
    world.run_until_idle()
    world.submit("fresh", priority=2, prompt=prompts["fresh"], max_tokens=1)
    world.run_until_idle()
    filler = world.scheduler.state.kv.device.num_free + 1
    world.submit("filler", priority=0, prompt_tokens=4 * filler, max_tokens=1)
    world.run_until_idle()
    world.submit("again", priority=0, prompt=prompts[asked], max_tokens=1)
    world.run_until_idle()
    assert world.events_of("again", Admitted)[0].num_hit_tokens == (4 if asked == kept else 0)


def test_in_order_of_arrival_there_is_nothing_to_age() -> None:
    world = World(device_blocks=4, seats=1, aging_s=1.0, policy=SchedulingPolicy.FCFS)
    world.submit("first", priority=9, prompt_tokens=3, max_tokens=9)
    world.submit("second", priority=0, prompt_tokens=3, max_tokens=1)
    world.steps(5)
    assert world.state_of("second") is RequestState.WAITING
    world.run_until_idle()
