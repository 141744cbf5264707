"""Whoever is let in should come to something: headroom, the budget of the step, and what a fault leaves behind."""

from __future__ import annotations

from giveway.core.config import PreemptionChoice
from giveway.core.events import Admitted
from giveway.core.plan import DeferralReason
from tests.world import World, served, victims, why_not


def test_one_that_was_swapped_out_does_not_come_back_for_every_block_that_falls_free() -> None:
    # Goal: a swap-in takes a single step, so it needs little headroom; without more of it the request would be brought
    # back and evicted by the next growth, over and over, and the link would do nothing but copy.
    world = World(device_blocks=16, host_blocks=32, block_size=4, seats=8)
    for number in range(4):
        world.submit(f"r{number}", prompt_tokens=9, max_tokens=16)
    world.run_until_idle()
    assert sum(world.num_preemptions(f"r{number}") for number in range(4)) <= 2


def test_nobody_gives_way_to_a_request_that_would_compute_nothing_in_this_step() -> None:
    # Goal: the first urgent prompt spends the whole budget; the second displaces somebody one step later, not in vain.
    world = World(device_blocks=14, host_blocks=14, budget=8, seats=8)
    world.make_resident("low", priority=20, prompt_tokens=14, max_tokens=40)
    world.submit("first", priority=0, prompt_tokens=16)
    world.submit("second", priority=0, prompt_tokens=24)
    plan = world.step()
    assert victims(plan) == []
    assert served(plan) == {"first"}
    assert why_not(plan, "second") is DeferralReason.NO_TOKENS
    world.run_until_idle()


def test_what_a_faulty_request_computed_is_found_by_nobody() -> None:
    # Goal: its logits were not finite, so its KV may not be either; the same prompt is computed anew later.
    world = World(device_blocks=12, prefix_caching=True, budget=8)
    world.backend.faults["bad"] = 15
    prompt = tuple(range(100, 117))
    world.submit("bad", prompt=prompt)
    world.run_until_idle()
    assert world.finished("bad").detail == "logits are not finite"
    world.submit("good", prompt=prompt, max_tokens=2)
    world.run_until_idle()
    (admitted,) = world.events_of("good", Admitted)
    assert admitted.num_hit_tokens == 0


def test_a_request_that_lost_its_seat_during_its_prefill_is_told_as_resumed() -> None:
    world = World(device_blocks=12, budget=4, seats=4)
    world.submit("long", prompt_tokens=16)
    world.steps(2)
    world.give_way("long", PreemptionChoice.RECOMPUTE)
    world.run_until_idle()
    assert [event.is_resume for event in world.events_of("long", Admitted)] == [False, True]
