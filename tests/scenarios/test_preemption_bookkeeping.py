"""Preemption inside one step: nobody is served and evicted at once, and resuming continues exactly where it stopped."""

from __future__ import annotations

import pytest

from giveway.core.commands import GiveWay
from giveway.core.config import PreemptionChoice
from giveway.core.events import Admitted, Preempted, TokensComputed
from giveway.core.plan import DeferralReason, PreemptionMode
from giveway.core.request import FinishReason, RequestState
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.world import World, served, victims, why_not

SWAP, RECOMPUTE = PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE


def test_a_victim_that_arrived_first_is_not_part_of_the_step_that_evicts_it() -> None:
    # Goal: B grows by a block of A, who is older but less urgent; the batch is B alone and costs one token.
    world = World(device_blocks=4)
    world.make_resident("A", priority=5, prompt_tokens=7)
    world.make_resident("B", priority=0, prompt_tokens=8, blocks=2)
    plan = world.step()
    assert victims(plan) == ["A"]
    assert served(plan) == {"B"}
    assert plan.num_tokens == 1
    assert len(world.blocks_of("B")) == 3
    world.run_until_idle()
    assert len(world.tokens[world.finished("A").request_id]) == 8


def test_an_admission_takes_the_next_slot_too_so_that_set_up_is_not_reached_by_arrivals() -> None:
    # Goal: eight prompt tokens take three blocks at admission; beside A there is room for two.
    world = World(device_blocks=4)
    world.submit("A", priority=5, prompt_tokens=7)
    world.step()
    world.submit("B", priority=0, prompt_tokens=8)
    plan = world.step()
    assert victims(plan) == ["A"]
    assert len(world.blocks_of("B")) == 3
    world.run_until_idle()


@pytest.mark.parametrize("num_known", range(3, 14))
@pytest.mark.parametrize("choice", [SWAP, RECOMPUTE])
def test_a_victim_evicted_around_a_block_boundary_goes_on_as_if_never_evicted(
    num_known: int, choice: PreemptionChoice
) -> None:
    # Goal: the prefill that resumes yields the next token, like a first prefill; blocks are those of the length.
    world = World(device_blocks=8, host_blocks=8)
    world.make_resident("r", prompt_tokens=2, max_tokens=14)
    while world.request("r").num_known_tokens < num_known:
        world.step()
    world.give_way("r", choice)
    assert served(world.step()) == set()
    assert world.state_of("r") is (RequestState.SWAPPED if choice is SWAP else RequestState.PREEMPTED)
    found = world.num_found(num_known - 1, num_known)
    plan = world.step()
    if choice is SWAP and found < num_known - 1:
        assert plan.num_tokens == 0  # KV comes back in this step and is used in the next
        plan = world.step()
    chunk = plan.chunk_of(world.request("r").request_id)
    assert chunk is not None
    assert chunk.samples
    assert (chunk.start, chunk.num_tokens) == ((num_known - 1, 1) if choice is SWAP else (found, num_known - found))
    assert world.request("r").num_known_tokens == num_known + 1
    assert len(world.blocks_of("r")) == -(-(num_known + 1) // 4)
    world.run_until_idle()


def test_a_resumed_request_that_hits_its_own_old_blocks_computes_only_the_rest() -> None:
    # Goal: ten tokens known, eight found: two are planned, from position eight. One number for budget, chunk and place.
    world = World(device_blocks=8, prefix_caching=True)
    world.make_resident("r", prompt_tokens=9)
    world.give_way("r", RECOMPUTE)
    world.step()
    chunk = world.step().chunk_of(world.request("r").request_id)
    assert chunk is not None
    assert (chunk.start, chunk.num_tokens, chunk.samples) == (8, 2, True)
    assert world.events_of("r", Admitted)[-1].num_hit_tokens == 8
    world.run_until_idle()
    assert world.finished("r").num_recomputed_tokens == 1  # position nine; position ten was new


def test_the_last_request_that_cannot_grow_ends_alone_and_its_blocks_return() -> None:
    # Goal: a lost copy pins a block for good, so the pool is smaller than `accept` knew. The request that can never go
    # on ends with an error; neither the engine, nor the older one of its class that waits for its blocks.
    world = World(device_blocks=3, host_blocks=3, copies=lambda _: CopyFate(is_lost=True), copy_timeout_s=5.0)
    world.make_resident("older", prompt_tokens=2, max_tokens=2, blocks=1)
    world.give_way("older", SWAP)
    world.submit("grows", prompt_tokens=7, max_tokens=5)
    world.run_until_idle()
    assert world.finished("grows").reason is FinishReason.ERROR
    detail = world.finished("grows").detail
    assert detail is not None
    assert "1 lost copies pin the rest" in detail
    assert world.finished("older").reason is FinishReason.LENGTH
    world.submit("small", prompt_tokens=4, max_tokens=4)
    world.run_until_idle()
    assert world.finished("small").reason is FinishReason.LENGTH


def test_the_same_shortage_without_a_lost_copy_is_refused_at_the_door() -> None:
    # Goal: pool 2, eight prompt tokens and four new ones: it could never finish, so it never starts.
    world = World(device_blocks=2)
    world.submit("r", prompt_tokens=8, max_tokens=4)
    world.submit("small", prompt_tokens=4, max_tokens=5)
    world.run_until_idle()
    assert world.finished("small").num_output_tokens == 5
    assert not world.is_finished("r")


@pytest.mark.parametrize("choice", [SWAP, RECOMPUTE])
@pytest.mark.parametrize("delay", [0, 3])
def test_preempting_somebody_who_is_not_running_is_a_no_op(choice: PreemptionChoice, delay: int) -> None:
    # Goal: told to give way in every step, a request counts one preemption each time it really had something to give.
    world = World(device_blocks=8, host_blocks=8, copies=lambda _: CopyFate(delay_steps=delay))
    world.make_resident("r", prompt_tokens=6, max_tokens=10)
    world.make_resident("other", prompt_tokens=6, max_tokens=10)
    while not world.is_finished("other"):
        world.give_way("r", choice)
        world.step()
    evictions = [event for event in world.events_of("r", Preempted) if event.mode is not PreemptionMode.UN_ADMIT]
    assert world.request("r").num_preemptions == len(evictions) > 1
    world.run_until_idle()


def test_telling_an_unknown_request_to_give_way_does_nothing() -> None:
    world = World(device_blocks=4)
    world.submit("r")
    world.give_way("nobody", SWAP)
    world.give_way("r", SWAP)  # waits, so it has nothing to give
    plan = world.step()
    assert not plan.preemptions
    world.run_until_idle()
    assert world.num_preemptions("r") == 0


def test_an_order_to_give_way_does_not_outlive_its_step() -> None:
    world = World(device_blocks=4)
    world.scheduler.accept([GiveWay(world.submit("r").request_id, RECOMPUTE)], 0.0)
    world.steps(3)
    assert world.num_preemptions("r") == 0


def test_a_request_told_to_give_way_says_so_and_comes_back_in_the_next_step() -> None:
    world = World(device_blocks=4)
    world.make_resident("r", prompt_tokens=6)
    world.give_way("r", RECOMPUTE)
    plan = world.step()
    assert why_not(plan, "r") is DeferralReason.FORCED_OUT
    assert plan.preemptions[0].beneficiary is None
    assert served(world.step()) == {"r"}


def test_ten_seats_of_background_work_make_place_for_one_urgent_request_at_once() -> None:
    # Goal: the urgent one computes in the step after it arrives, and all sixteen finish with their own tokens.
    world = World(device_blocks=100, host_blocks=100, seats=10)
    for number in range(15):
        world.submit(f"low{number}", priority=10, prompt_tokens=6, max_tokens=12)
    world.steps(4)
    world.submit("urgent", priority=0, prompt_tokens=6, max_tokens=3)
    plan = world.step()
    assert "urgent" in served(plan)
    assert victims(plan) == ["low9"]
    world.run_until_idle()
    assert all(world.finished(f"low{n}").num_output_tokens == 12 for n in range(15))


@pytest.mark.parametrize("choice", [SWAP, RECOMPUTE])
def test_a_victim_in_the_middle_of_its_prefill_loses_no_place(choice: PreemptionChoice) -> None:
    # Goal: eight of twenty prompt tokens are computed; swap keeps them, recompute starts over, both say what it cost.
    world = World(device_blocks=8, host_blocks=8, budget=8)
    world.submit("r", prompt_tokens=20, max_tokens=2)
    world.step()
    world.give_way("r", choice)
    world.run_until_idle()
    starts = [chunk.start for plan in world.plans for chunk in plan.chunks]
    lost = 0 if choice is SWAP else 8 - world.num_found(8, 20)
    assert starts == ([0, 0, 8, 16] if lost else [0, 8, 16])
    assert sum(event.num_recomputed for event in world.events_of("r", TokensComputed)) == lost


def test_five_that_grow_at_one_boundary_take_no_more_victims_than_they_need() -> None:
    # Goal: five residents need a block each; below them five own two blocks, one token in the second. Three must go.
    world = World(device_blocks=20, seats=10)
    for number in range(5):
        world.make_resident(f"top{number}", priority=0, prompt_tokens=8, max_tokens=4, blocks=2)
    for number in range(5):
        world.make_resident(f"tail{number}", priority=9, prompt_tokens=5, max_tokens=4)
    plan = world.step()
    assert victims(plan) == ["tail4", "tail3", "tail2"]
    assert served(plan) == {f"top{n}" for n in range(5)} | {"tail0", "tail1"}
    world.run_until_idle()
