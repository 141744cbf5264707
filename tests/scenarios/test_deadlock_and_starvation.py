"""Every step advances somebody: no deadlock, no livelock, no starvation, no collapse."""

from __future__ import annotations

import pytest

from giveway.core.config import PreemptionChoice, SchedulingPolicy
from giveway.core.errors import KVCacheFullError
from giveway.core.events import Admitted, Refused
from giveway.core.plan import DeferralReason
from giveway.core.request import RequestState
from tests.world import World, served, victims, why_not

SWAP, RECOMPUTE = PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE


def test_a_prompt_larger_than_the_pool_is_refused_and_blocks_nobody() -> None:
    # Goal: legal by context length, impossible by pool: refused at once, and the one behind it is served at once.
    world = World(device_blocks=10, max_model_len=100)
    world.submit("R1", prompt_tokens=60)
    world.submit("R2", prompt_tokens=4)
    assert served(world.step()) == {"R2"}
    (refused,) = world.events_of("R1", Refused)
    assert "the device pool has 10" in str(refused.error)


@pytest.mark.parametrize(("prompt_tokens", "is_accepted"), [(40, True), (41, False)])
def test_a_prompt_that_fills_the_pool_exactly_is_served_when_one_token_is_asked(
    prompt_tokens: int, is_accepted: bool
) -> None:
    # Goal: no block is reserved behind the scenes, and the last token needs no slot.
    world = World(device_blocks=10)
    world.submit("r", prompt_tokens=prompt_tokens, max_tokens=1)
    world.run_until_idle()
    assert world.is_finished("r") == is_accepted
    assert [len(tokens) for tokens in world.tokens.values()] == [is_accepted]


def test_a_prompt_that_fills_the_pool_exactly_gets_it_from_less_urgent_work() -> None:
    world = World(device_blocks=10, host_blocks=10)
    for number in range(3):
        world.make_resident(f"low{number}", priority=9, prompt_tokens=8, max_tokens=4)
    world.submit("whole", priority=0, prompt_tokens=40, max_tokens=1)
    assert served(world.step()) == {"whole"}
    assert len(world.tokens[world.finished("whole").request_id]) == 1
    world.run_until_idle()


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_an_evicted_long_request_comes_back_once_it_fits_whole_and_not_chunk_by_chunk(mode: PreemptionChoice) -> None:
    # Goal: A grows from 2 to 8 blocks of 10 beside V, which needs 7 and prefills 8 tokens a step. V is evicted once
    # and recomputes less than twice its length; admitting its first chunk again and again would burn far more.
    world = World(device_blocks=10, host_blocks=10, budget=8, seats=4, mode=mode)
    world.submit("A", prompt_tokens=7, max_tokens=26)
    world.submit("V", prompt_tokens=25, max_tokens=12)
    world.run_until_idle()
    assert world.num_preemptions("V") == 1
    assert world.num_preemptions("A") == 0
    assert world.finished("V").num_recomputed_tokens <= (0 if mode is SWAP else 2 * 37)
    assert len(world.events_of("V", Admitted)) == 2


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_a_pool_that_is_nearly_full_never_gives_an_empty_plan(mode: PreemptionChoice) -> None:
    # Goal: arrivals go on for fifty steps on a full pool; every single step computes something.
    world = World(device_blocks=10, host_blocks=4, mode=mode, seats=6)
    for step in range(50):
        if step % 2 == 0:
            world.submit(f"r{step}", priority=step % 3, prompt_tokens=3 + step % 7, max_tokens=3 + step % 5)
        assert world.step().num_tokens
    world.run_until_idle()
    assert all(plan.num_tokens or plan.swap_ins for plan in world.plans)


def test_a_seat_that_came_free_is_given_away_in_the_next_step() -> None:
    # Goal: two seats, three requests of one token: "the batch is full" is worked out anew in every step.
    world = World(device_blocks=10, seats=2)
    for name in ("a", "b", "c"):
        world.submit(name, prompt_tokens=4, max_tokens=1)
    assert served(world.step()) == {"a", "b"}
    assert served(world.step()) == {"c"}
    assert world.run_until_idle() == 0


def test_a_giant_that_waits_does_not_stop_the_small_ones_of_its_class() -> None:
    # Goal: behind the giant, small ones run as guests; they give way all together once that makes it fit.
    world = World(device_blocks=10, host_blocks=20)
    world.make_resident("runs", prompt_tokens=15, max_tokens=8)
    world.submit("giant", prompt_tokens=30, max_tokens=4)
    for number in range(3):
        world.submit(f"small{number}", prompt_tokens=5, max_tokens=30)
    plan = world.step()
    assert why_not(plan, "giant") is DeferralReason.NO_DEVICE_BLOCKS
    assert {"small0", "small1"} <= served(plan)
    assert world.events_of("small0", Admitted)[0].is_guest
    while world.state_of("giant") is RequestState.WAITING:
        plan = world.step()
    assert world.is_finished("runs")
    assert victims(plan)
    assert set(victims(plan)) <= {"small0", "small1", "small2"}
    assert "giant" in served(plan)
    world.run_until_idle()


def test_guests_are_left_alone_as_long_as_the_giant_would_not_fit_anyway() -> None:
    world = World(device_blocks=10)
    world.make_resident("runs", prompt_tokens=15, max_tokens=6)
    world.submit("giant", prompt_tokens=30, max_tokens=4)
    world.submit("small", prompt_tokens=3, max_tokens=5)
    world.steps(5)
    assert world.is_finished("small")
    assert world.num_preemptions("small") == 0


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
@pytest.mark.parametrize("policy", [SchedulingPolicy.PRIORITY, SchedulingPolicy.FCFS])
def test_two_full_equals_in_a_pool_of_four_blocks_both_finish(mode: PreemptionChoice, policy: SchedulingPolicy) -> None:
    # Goal: both need a third block at once. The older gets it, the newer returns once, and neither chases the other.
    world = World(device_blocks=4, host_blocks=4, mode=mode, policy=policy)
    world.make_resident("older", prompt_tokens=8, max_tokens=8, blocks=2)
    world.make_resident("newer", prompt_tokens=8, max_tokens=8, blocks=2)
    plan = world.step()
    assert victims(plan) == ["newer"]
    assert served(plan) == {"older"}
    world.run_until_idle()
    assert world.num_preemptions("older") == 0
    assert world.num_preemptions("newer") == 1


def test_four_that_fit_alone_but_not_together_all_finish_and_only_the_impossible_one_fails() -> None:
    world = World(device_blocks=8, host_blocks=8)
    for number in range(4):
        world.submit(f"r{number}", prompt_tokens=8, max_tokens=20)
    world.submit("impossible", prompt_tokens=8, max_tokens=26)
    world.run_until_idle()
    assert all(world.finished(f"r{n}").num_output_tokens == 20 for n in range(4))
    assert len(world.events_of("impossible", Refused)) == 1


def tutorial(policy: SchedulingPolicy) -> World:
    """Eight requests of five prompt tokens and eight new ones, in a pool of twenty slots."""
    world = World(device_blocks=20, block_size=1, policy=policy)
    for number in range(8):
        world.submit(f"r{number}", prompt_tokens=5, max_tokens=8)
    return world


def test_the_control_policy_loses_the_batch_when_the_pool_is_full() -> None:
    world = tutorial(SchedulingPolicy.NONE)
    with pytest.raises(KVCacheFullError, match=r"KV cache full: used \d+ of 20"):
        world.run_until_idle()
    assert all(not plan.preemptions for plan in world.plans)


@pytest.mark.parametrize("policy", [SchedulingPolicy.FCFS, SchedulingPolicy.PRIORITY])
def test_the_same_batch_finishes_when_somebody_gives_way(policy: SchedulingPolicy) -> None:
    world = tutorial(policy)
    world.run_until_idle()
    assert all(world.finished(f"r{n}").num_output_tokens == 8 for n in range(8))
    assert sum(len(plan.preemptions) for plan in world.plans) > 0
    assert world.num_preemptions("r0") == 0


def test_ten_thousand_that_wait_do_not_cost_ten_thousand_looks() -> None:
    # Goal: the walk stops behind the first that does not fit, after a bounded number of looks for guests.
    world = World(device_blocks=10, seats=8, max_guest_looks=32)
    world.make_resident("runs", prompt_tokens=30, max_tokens=4)
    for number in range(10_000):
        world.submit(f"r{number}", prompt_tokens=20, max_tokens=4)
    assert len(world.plan().deferrals) == 1 + 32


def test_the_smallest_world_of_all_serves_one_request_after_another() -> None:
    # Goal: one block of one token, one seat, a budget of one.
    world = World(device_blocks=1, block_size=1, seats=1, budget=1)
    for number in range(3):
        world.submit(f"r{number}", prompt_tokens=1, max_tokens=1)
    assert world.run_until_idle() == 3
