"""A request taken back, in whatever state: everything it held returns, it ends once, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.events import Finished, TokenEmitted
from giveway.core.ids import CopyId, RequestId
from giveway.core.request import FinishReason, RequestState
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.world import World

SWAP, RECOMPUTE = PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE


def queued(world: World) -> None:
    world.submit("big", priority=0, prompt_tokens=30, max_tokens=3)
    world.submit("R", prompt_tokens=20, max_tokens=4)
    world.step()


def in_mid_chunk(world: World) -> None:
    world.submit("R", prompt_tokens=20, max_tokens=4)
    world.step()


def running(world: World) -> None:
    world.make_resident("R", prompt_tokens=6)


def evicted(world: World) -> None:
    world.make_resident("R", prompt_tokens=6)
    world.give_way("R", RECOMPUTE)
    world.step()


def swapping_out(world: World) -> None:
    world.make_resident("R", prompt_tokens=6)
    world.give_way("R", SWAP)
    world.step()


def swapped(world: World) -> None:
    swapping_out(world)
    world.submit("big", priority=0, prompt_tokens=38, max_tokens=3)
    world.steps(3)


def swapping_in(world: World) -> None:
    swapping_out(world)
    while world.state_of("R") is not RequestState.SWAPPING_IN:
        world.step()


WAYS: list[tuple[Callable[[World], None], RequestState]] = [
    (queued, RequestState.WAITING),
    (in_mid_chunk, RequestState.RUNNING),
    (running, RequestState.RUNNING),
    (evicted, RequestState.PREEMPTED),
    (swapping_out, RequestState.SWAPPING_OUT),
    (swapped, RequestState.SWAPPED),
    (swapping_in, RequestState.SWAPPING_IN),
]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(("bring_about", "state"), WAYS)
def test_an_abort_in_any_state_returns_everything_and_ends_the_request_once(
    bring_about: Callable[[World], None], state: RequestState, twice: bool
) -> None:
    world = World(device_blocks=10, host_blocks=10, budget=8, prefix_caching=True, copies=lambda _: CopyFate(2))
    bring_about(world)
    assert world.state_of("R") is state
    num_tokens = len(world.tokens[RequestId("R")])
    for _ in range(1 + twice):
        world.abort("R")
    world.run_until_idle()  # ends with every pool checked
    assert [event.reason for event in world.events_of("R", Finished)] == [FinishReason.ABORT]
    assert len(world.tokens[RequestId("R")]) == num_tokens, "a token came out after the end"


def test_an_abort_after_the_end_or_of_a_stranger_is_ignored() -> None:
    world = World(device_blocks=10)
    world.submit("R", max_tokens=1)
    world.run_until_idle()
    world.abort("R")
    world.abort("stranger")
    world.run_until_idle()
    assert world.finished("R").reason is FinishReason.LENGTH


def test_an_abort_sent_with_the_request_itself_ends_it_before_it_ever_ran() -> None:
    world = World(device_blocks=10)
    world.submit("R")
    world.abort("R")
    assert world.step().is_empty
    assert world.finished("R").num_output_tokens == 0


def test_a_name_is_free_again_once_its_owner_was_taken_back() -> None:
    world = World(device_blocks=10)
    world.submit("R", max_tokens=3)
    world.step()
    world.abort("R")
    world.step()
    world.submit("R", max_tokens=3)
    world.run_until_idle()
    assert [event.reason for event in world.events_of("R", Finished)] == [FinishReason.ABORT, FinishReason.LENGTH]


def test_results_and_copies_of_somebody_unknown_are_dropped_and_harm_nobody() -> None:
    # Goal: an executor tells of a request and of copies that are gone; B goes on.
    world = World(device_blocks=10, host_blocks=10, copies=lambda _: CopyFate(3))
    world.make_resident("A", prompt_tokens=6)
    world.make_resident("B", prompt_tokens=6)
    world.give_way("A", SWAP)
    world.step()
    world.abort("A")
    plan = world.plan()
    outcome = world.executor.execute(plan, world.scheduler.requests)
    strange = replace(
        outcome,
        sampled={**outcome.sampled, RequestId("A"): 3},
        faults={RequestId("A"): "gone"},
        finished_copies=(CopyId(77),),
        failed_copies=(CopyId(78),),
    )
    events = world.scheduler.commit(plan, strange)
    assert {event.request_id for event in events if isinstance(event, TokenEmitted)} == {"B"}
    world._record(events)
    world._open_plan = None
    world.run_until_idle()
    assert world.finished("B").reason is FinishReason.LENGTH


def test_the_beneficiary_may_go_while_its_victims_are_still_being_copied() -> None:
    # Goal: the promise falls back to everybody; the victims return.
    world = World(device_blocks=4, host_blocks=8, copies=lambda _: CopyFate(3))
    world.make_resident("low", priority=9, prompt_tokens=7, blocks=4)
    world.submit("urgent", priority=0, prompt_tokens=12)
    world.step()
    world.abort("urgent")
    world.run_until_idle()
    assert world.finished("low").reason is FinishReason.LENGTH


def test_fifty_clients_that_go_away_at_every_stage_leave_an_empty_pool() -> None:
    world = World(device_blocks=20, host_blocks=10, seats=8, budget=16, copies=lambda copy: CopyFate(copy.copy_id % 3))
    for number in range(50):
        world.submit(f"r{number}", priority=number % 3, prompt_tokens=5 + number % 9, max_tokens=30)
        world.step()
        world.give_way(f"r{number // 2}", SWAP)
        if number >= 10:
            world.abort(f"r{number - 10}")
    for number in range(50):
        world.abort(f"r{number}")
    world.run_until_idle()
    world.submit("last", max_tokens=3)
    assert world.run_until_idle() == 3
