"""What the scheduler refuses, and the order in which its methods may be called."""

from __future__ import annotations

from dataclasses import replace

import pytest

from giveway.core.commands import Abort
from giveway.core.config import PreemptionChoice
from giveway.core.errors import InvalidRequestError, InvariantError, RequestTooLargeError
from giveway.core.events import Accepted, Refused, TokensComputed
from giveway.core.ids import RequestId
from giveway.core.plan import StepOutcome
from giveway.core.request import FinishReason, RequestState, StopDecision
from tests.world import World


def refusal(world: World, name: str) -> InvalidRequestError:
    world.step()
    (event,) = world.events_of(name, Refused)
    return event.error


def test_a_request_larger_than_the_pool_is_refused_with_the_two_ways_out() -> None:
    world = World(device_blocks=10)
    world.submit("r7", prompt_tokens=30, max_tokens=20)
    error = refusal(world, "r7")
    assert isinstance(error, RequestTooLargeError)
    assert str(error) == (
        "request 'r7' can never fit: 30 prompt + 20 output tokens need 13 KV blocks, the device pool has 10 "
        "(4 tokens each). Lower max_tokens to 11 or raise --num-kv-blocks to 13."
    )
    world.submit("fits", prompt_tokens=30, max_tokens=11)  # the advice is exact
    world.submit("too long", prompt_tokens=30, max_tokens=12)
    world.step()
    assert world.events_of("fits", Accepted)
    assert world.events_of("too long", Refused)


def test_a_prompt_that_alone_is_larger_than_the_pool_is_told_to_be_shorter() -> None:
    world = World(device_blocks=10)
    world.submit("r", prompt_tokens=41, max_tokens=1)
    assert "Shorten the prompt or raise --num-kv-blocks to 11" in str(refusal(world, "r"))


def test_a_request_longer_than_the_context_is_refused_with_the_limit() -> None:
    world = World(device_blocks=100, max_model_len=32)
    world.submit("r", prompt_tokens=30, max_tokens=3)
    message = str(refusal(world, "r"))
    assert "max_model_len is 32. Lower max_tokens to 2 or raise --max-model-len." in message


def test_an_empty_prompt_is_refused() -> None:
    world = World(device_blocks=4)
    world.submit("r", prompt_tokens=0)
    assert "empty prompt" in str(refusal(world, "r"))


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_asking_for_no_token_at_all_is_refused(max_tokens: int) -> None:
    world = World(device_blocks=4)
    world.submit("r", max_tokens=max_tokens)
    assert f"max_tokens is {max_tokens}; at least 1" in str(refusal(world, "r"))


def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    world = World(device_blocks=4)
    world.submit("r", prompt_tokens=4, max_tokens=3)
    world.step()
    world.submit("r", prompt_tokens=9, max_tokens=1)
    assert "already in use" in str(refusal(world, "r"))
    world.run_until_idle()
    assert len(world.tokens[RequestId("r")]) == 3


def test_a_refused_request_leaves_nothing_behind() -> None:
    world = World(device_blocks=4, prefix_caching=True)
    world.submit("r", prompt_tokens=99)
    world.step()
    assert not world.scheduler.requests
    assert not world.scheduler.has_work
    world.checks.check_drained()


def test_a_second_plan_before_the_first_is_applied_is_refused() -> None:
    # Goal: with one plan open at a time, no token can be in flight while its request is evicted.
    world = World(device_blocks=4)
    world.submit("r")
    world.plan()
    with pytest.raises(InvariantError, match="plan was called twice"):
        world.scheduler.plan()


def test_nothing_is_taken_in_between_plan_and_commit() -> None:
    # Goal: an abort can never land between a plan and its outcome.
    world = World(device_blocks=4)
    world.submit("r")
    world.plan()
    with pytest.raises(InvariantError, match="between plan and commit"):
        world.scheduler.accept([Abort(RequestId("r"))], 0.0)


def test_a_plan_made_on_an_older_state_is_refused() -> None:
    world = World(device_blocks=4)
    world.submit("r")
    old = world.plan()
    world.step()
    world.plan()
    with pytest.raises(InvariantError, match="step 0 was planned on state"):
        world.scheduler.commit(old, StepOutcome(old.step_id, 0.0))
    with pytest.raises(InvariantError, match="was given for step 0"):
        world.scheduler.commit(old, StepOutcome(5, 0.0))


def test_a_plan_is_applied_once() -> None:
    world = World(device_blocks=4)
    world.submit("r")
    plan = world.step()
    with pytest.raises(InvariantError):
        world.scheduler.commit(plan, StepOutcome(plan.step_id, 0.0))
    with pytest.raises(InvariantError):
        world.scheduler.discard(plan, "late", 0.0)


def test_a_step_that_computed_nothing_cannot_have_failed() -> None:
    world = World(device_blocks=4)
    plan = world.plan()
    with pytest.raises(InvariantError, match="computed nothing, yet failed"):
        world.scheduler.discard(plan, "why?", 0.0)


def test_planning_changes_nothing_but_the_promise_to_commit() -> None:
    world = World(device_blocks=6, host_blocks=6, prefix_caching=True)
    for name in ("a", "b"):
        world.make_resident(name, priority=9, prompt_tokens=11)
    world.submit("urgent", priority=0, prompt_tokens=15)
    plan = world.plan()
    state = world.scheduler.state
    assert plan.preemptions
    assert (state.version, state.next_step_id, state.next_copy_id) == (plan.state_version, plan.step_id, 0)
    assert len(world.blocks_of("a")) == len(world.blocks_of("b")) == 3
    assert world.num_host_blocks_owned == 0


def test_a_sampled_token_that_is_missing_ends_that_request_alone() -> None:
    world = World(device_blocks=8)
    world.make_resident("a", prompt_tokens=4)
    world.make_resident("b", prompt_tokens=4)
    plan = world.plan()
    outcome = world.executor.execute(plan, world.scheduler.requests)
    world.backend.faults["a"] = 0  # it may end with an error
    sampled = {name: token for name, token in outcome.sampled.items() if name != "a"}
    world._record(world.scheduler.commit(plan, replace(outcome, sampled=sampled)))
    world._open_plan = None
    assert world.finished("a").reason is FinishReason.ERROR
    assert world.finished("a").detail == "the executor gave no token for it"
    world.run_until_idle()
    assert world.finished("b").reason is FinishReason.LENGTH


def test_a_stop_decided_outside_ends_the_request_with_that_very_token() -> None:
    world = World(device_blocks=8)
    world.make_resident("a", prompt_tokens=4)
    plan = world.plan()
    outcome = world.executor.execute(plan, world.scheduler.requests)
    stop = {RequestId("a"): StopDecision(FinishReason.STOP, "END")}
    events = world.scheduler.commit(plan, replace(outcome, stops=stop))
    assert [(type(event).__name__) for event in events] == ["TokenEmitted", "Finished"]
    assert not world.scheduler.requests


def test_a_stop_token_ends_the_request_and_is_its_last_token() -> None:
    world = World(device_blocks=8, vocab_size=2)  # half of all tokens stop
    world.submit("a", prompt_tokens=4, max_tokens=12, stop_token_ids=frozenset({1}))
    world.run_until_idle()
    assert world.finished("a").reason is FinishReason.STOP
    assert world.tokens[RequestId("a")].count(1) == 1


def test_prefill_progress_is_told_also_when_it_is_a_single_token() -> None:
    # Goal: statistics count every computed token once: decodes by their emission, everything else by TokensComputed.
    world = World(device_blocks=8, seats=1, budget=1)
    world.submit("a", prompt_tokens=5, max_tokens=3)
    world.run_until_idle()
    assert [event.num_tokens for event in world.events_of("a", TokensComputed)] == [1] * 5


def test_a_synchronous_copy_that_the_outcome_does_not_tell_of_counts_as_failed() -> None:
    # Goal: never "saved" without being told so.
    world = World(device_blocks=8, host_blocks=8)
    world.make_resident("r", prompt_tokens=6)
    world.give_way("r", PreemptionChoice.SWAP)
    plan = world.plan()
    outcome = world.executor.execute(plan, world.scheduler.requests)
    assert outcome.finished_copies
    world._record(world.scheduler.commit(plan, replace(outcome, finished_copies=())))
    world._open_plan = None
    assert world.state_of("r") is RequestState.PREEMPTED
    assert world.num_host_blocks_owned == 0
    world.run_until_idle()
