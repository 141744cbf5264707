"""Several answers to one prompt: they share the KV of the prompt, and each goes its own way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.plan import DeferralReason
from giveway.core.request import FinishReason, RequestState
from giveway.core.sampling import SamplingParams
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.world import World, served, victims, why_not

PROMPT = tuple(range(100, 108))


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("tails", [True, False])
@pytest.mark.parametrize("mode", list(PreemptionChoice))
def test_a_branch_that_displaces_the_one_whose_prompt_it_shares_still_finds_the_prompt(
    mode: PreemptionChoice, tails: bool, prefix_caching: bool
) -> None:
    # Goal: the victim lets go of the prompt in the very step in which the beneficiary takes it over.
    world = World(device_blocks=4, host_blocks=4, mode=mode, tails=tails, prefix_caching=prefix_caching)
    world.submit("slow", priority=10, prompt=PROMPT, max_tokens=9, branch_of="slow")
    while len(world.blocks_of("slow")) < 4:
        world.step()
    world.submit("fast", priority=0, prompt=PROMPT, max_tokens=3, branch_of="slow")
    plan = world.step()
    assert victims(plan) == ["slow"]
    assert served(plan) == {"fast"}
    world.run_until_idle()
    assert len(world.tokens[world.finished("slow").request_id]) == 9


# Several answers from beginning to end

ODD_PROMPT = tuple(range(200, 210))  # two full blocks and half of a third

with_cache = pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
with_tails = pytest.mark.parametrize("tails", [True, False], ids=["tails", "whole"])
with_mode = pytest.mark.parametrize("mode", list(PreemptionChoice))


def send_answers(
    world: World,
    count: int,
    *,
    priority: int = 9,
    max_tokens: Sequence[int] | int = 10,
    prompt: Sequence[int] = ODD_PROMPT,
    first: str = "a0",
) -> list[str]:
    """Send several answers to one prompt, drawn with a seed each."""
    names = [first, *(f"{first}/{number}" for number in range(1, count))]
    for number, name in enumerate(names):
        world.submit(
            name,
            priority=priority,
            prompt=prompt,
            max_tokens=max_tokens if isinstance(max_tokens, int) else max_tokens[number],
            branch_of=first,
            sampling=SamplingParams(temperature=0.9),
            seed=number,
        )
    return names


def check_lengths(world: World, expected: dict[str, int]) -> None:
    assert {name: len(world.tokens[world.finished(name).request_id]) for name in expected} == expected
    assert all(world.finished(name).reason is FinishReason.LENGTH for name in expected)


@with_cache
@with_tails
@with_mode
def test_answers_that_have_ended_stay_ended_when_the_others_give_way(
    mode: PreemptionChoice, tails: bool, prefix_caching: bool
) -> None:
    # Goal: two of four have ended when an urgent request takes the whole pool. Nothing more is told of those two, no
    # token of theirs comes again, and the prompt that they shared with the others is not lost with them.
    world = World(device_blocks=16, host_blocks=16, mode=mode, tails=tails, prefix_caching=prefix_caching)
    names = send_answers(world, 4, max_tokens=[2, 12, 2, 12])
    world.steps(4)
    assert [world.is_finished(name) for name in names] == [True, False, True, False]
    num_events = len(world.events)
    world.submit("urgent", priority=0, prompt_tokens=63, max_tokens=1)
    plan = world.step()
    assert set(victims(plan)) == {"a0/1", "a0/3"}
    world.run_until_idle()
    assert not {event.request_id for event in world.events[num_events:]} & {"a0", "a0/2"}
    check_lengths(world, {"a0": 2, "a0/1": 12, "a0/2": 2, "a0/3": 12})


@with_cache
@with_tails
@with_mode
@pytest.mark.parametrize("overlapped", [True, False], ids=["overlapped", "synchronous"])
def test_answers_that_give_way_in_the_middle_go_on_with_their_own_tokens(
    overlapped: bool, mode: PreemptionChoice, tails: bool, prefix_caching: bool
) -> None:
    # Goal: three answers are told to give way one after another, each in its middle; each goes on where it was, sharing
    # what can be shared, and nothing of one turns up in another.
    world = World(
        device_blocks=24,
        host_blocks=24,
        mode=mode,
        tails=tails,
        prefix_caching=prefix_caching,
        copies=(lambda _: CopyFate(2)) if overlapped else None,
    )
    names = send_answers(world, 3, max_tokens=14)
    world.steps(4)
    for name in names:
        world.give_way(name, mode)
        world.steps(2)
    world.run_until_idle()
    assert [world.num_preemptions(name) for name in names] == [1, 1, 1]
    check_lengths(world, dict.fromkeys(names, 14))
    if mode is PreemptionChoice.SWAP:
        assert all(world.finished(name).num_recomputed_tokens == 0 for name in names)


@with_cache
@with_tails
@with_mode
def test_answers_whose_prompt_went_with_all_of_them_compute_or_copy_it_once(
    mode: PreemptionChoice, tails: bool, prefix_caching: bool
) -> None:
    # Goal: the urgent request needs the prompt's blocks too. With a swap nothing is computed again; by recomputing, the
    # prompt (ten tokens) is computed again once and not once for each answer, beside what each answer has of its own.
    world = World(device_blocks=12, host_blocks=24, mode=mode, tails=tails, prefix_caching=prefix_caching)
    names = send_answers(world, 4, max_tokens=8)
    world.steps(4)
    own = sum(world.request(name).num_computed_tokens - 10 for name in names)
    world.submit("urgent", priority=0, prompt_tokens=47, max_tokens=1)
    assert set(victims(world.step())) == set(names)
    world.run_until_idle()
    check_lengths(world, dict.fromkeys(names, 8))
    again = sum(world.finished(name).num_recomputed_tokens for name in names)
    if mode is PreemptionChoice.RECOMPUTE:
        # Half-filled blocks of the prompt may be computed by each: they are forked only from one that runs.
        assert again <= 10 + own + 3 * 2
    else:
        assert again == 0


STATES = ["waits", "waits for the prompt", "prefills", "decodes", "swapping out", "swapped", "swapping in", "preempted"]


@with_cache
@with_tails
@pytest.mark.parametrize("state", STATES)
def test_an_answer_can_be_taken_back_in_every_state_and_the_others_go_on(
    state: str, tails: bool, prefix_caching: bool
) -> None:
    # Goal: whatever it shares or was to share stays with the others; its own blocks are free on every tier.
    world = World(
        device_blocks=24,
        host_blocks=24,
        budget=8,
        tails=tails,
        prefix_caching=prefix_caching,
        copies=lambda _: CopyFate(2),
    )
    victim, *others = send_answers(world, 3, max_tokens=9)
    if state == "waits for the prompt":
        victim, others = others[0], [victim, others[1]]
        assert why_not(world.step(), victim) is DeferralReason.PROMPT_IN_PROGRESS
    elif state == "prefills":
        world.step()
    elif state != "waits":
        world.steps(4)
    if state in ("swapping out", "swapped", "swapping in", "preempted"):
        world.give_way(victim, PreemptionChoice.RECOMPUTE if state == "preempted" else PreemptionChoice.SWAP)
        world.step()
        if state == "swapping in" and prefix_caching:  # so that its KV is not found on the device any more
            world.submit("urgent", priority=0, prompt_tokens=95, max_tokens=1)
        while world.state_of(victim) is not RequestState[state.upper().replace(" ", "_")]:
            world.step()
    world.abort(victim)
    world.run_until_idle()
    assert world.finished(victim).reason is FinishReason.ABORT
    check_lengths(world, dict.fromkeys(others, 9))
    assert world.num_host_blocks_owned == world.num_device_blocks_owned == 0


@with_cache
@with_tails
@with_mode
@pytest.mark.parametrize("seats", [1, 2, 3])
def test_more_answers_than_seats_are_served_by_and_by(
    seats: int, mode: PreemptionChoice, tails: bool, prefix_caching: bool
) -> None:
    # Goal: seven answers on fewer seats, with an urgent request in between that takes a seat.
    world = World(device_blocks=16, host_blocks=16, seats=seats, mode=mode, tails=tails, prefix_caching=prefix_caching)
    names = send_answers(world, 7, max_tokens=6)
    world.steps(3)
    assert sum(world.state_of(name) is RequestState.RUNNING for name in names) == seats
    world.submit("urgent", priority=0, prompt_tokens=5, max_tokens=3)
    assert "urgent" in served(world.step())
    world.run_until_idle()
    check_lengths(world, dict.fromkeys(names, 6))


@with_cache
def test_two_groups_of_answers_and_a_single_one_with_the_same_prompt_do_not_mix(prefix_caching: bool) -> None:
    # Goal: groups share within themselves; across groups only what the prefix index finds is shared.
    world = World(device_blocks=12, host_blocks=12, seats=4, tails=True, prefix_caching=prefix_caching)
    names = send_answers(world, 3, max_tokens=6, priority=9)
    names += send_answers(world, 3, max_tokens=6, priority=5, first="b0")
    world.submit("single", priority=7, prompt=ODD_PROMPT, max_tokens=6)
    world.run_until_idle()
    check_lengths(world, dict.fromkeys([*names, "single"], 6))


@with_tails
@with_mode
def test_answers_in_a_pool_that_is_too_small_for_all_of_them_end_without_a_cache(
    mode: PreemptionChoice, tails: bool
) -> None:
    # Goal: six answers of up to 30 slots in a pool of 40: they push one another out and back, and share the prompt only
    # with those who run.
    world = World(device_blocks=10, host_blocks=12, seats=6, mode=mode, tails=tails, prefix_caching=False)
    names = send_answers(world, 6, max_tokens=20)
    world.run_until_idle()
    check_lengths(world, dict.fromkeys(names, 20))
    assert sum(len(plan.preemptions) for plan in world.plans) > 0
