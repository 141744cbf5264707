"""A fault ends one request, never the engine, and leaves no trace in anybody else's tokens."""

from __future__ import annotations

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.events import Finished
from giveway.core.plan import DeferralReason
from giveway.core.request import FinishReason
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.world import World, served

SWAP, RECOMPUTE = PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE


def reasons(world: World) -> dict[str, FinishReason]:
    return {event.request_id: event.reason for event in world.events if isinstance(event, Finished)}


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("position", [0, 5, 9])
@pytest.mark.parametrize("num_requests", [1, 2, 5, 8])
def test_a_request_that_poisons_its_batch_ends_alone(num_requests: int, position: int, prefix_caching: bool) -> None:
    # Goal: whenever "poison" computes that position the whole step fails. It alone ends with an error.
    world = World(device_blocks=40, seats=8, prefix_caching=prefix_caching)
    for number in range(num_requests - 1):
        world.submit(f"r{number}", prompt_tokens=3 + number, max_tokens=6)
    world.submit("poison", prompt_tokens=6, max_tokens=8)
    world.backend.poison["poison"] = position
    world.run_until_idle()
    others = {f"r{n}": FinishReason.LENGTH for n in range(num_requests - 1)}
    assert reasons(world) == {**others, "poison": FinishReason.ERROR}
    assert world.finished("poison").detail == "the device went away in the middle of a step"


@pytest.mark.parametrize(("culprits", "num_failures"), [(["r11"], 5), (["r1", "r12"], 9)])
def test_culprits_are_found_by_halving_and_not_one_by_one(culprits: list[str], num_failures: int) -> None:
    # Goal: of sixteen, one culprit costs five failed steps: 16, 8, 4, 2, 1. A second one in the other half costs four
    # more, for the halves that wait to be tried are not forgotten over the one that failed.
    world = World(device_blocks=64, seats=16, budget=256)
    for number in range(16):
        world.submit(f"r{number}", prompt_tokens=5, max_tokens=4)
    world.backend.poison.update(dict.fromkeys(culprits, 0))
    world.run_until_idle()
    assert world.backend.num_failures == num_failures
    assert [name for name, reason in reasons(world).items() if reason is FinishReason.ERROR] == culprits


def test_two_culprits_in_one_batch_both_end_and_nobody_else() -> None:
    world = World(device_blocks=40)
    for number in range(6):
        world.submit(f"r{number}", prompt_tokens=5, max_tokens=5)
    world.backend.poison.update({"r1": 5, "r4": 5})
    world.run_until_idle()
    assert {n for n, reason in reasons(world).items() if reason is FinishReason.ERROR} == {"r1", "r4"}


def test_a_step_that_failed_once_by_bad_luck_ends_nobody() -> None:
    world = World(device_blocks=40, host_blocks=10)
    for number in range(4):
        world.submit(f"r{number}", prompt_tokens=5, max_tokens=5)
    world.steps(2)
    world.backend.fails_next = True
    world.run_until_idle()
    assert set(reasons(world).values()) == {FinishReason.LENGTH}


def test_residents_that_were_not_in_the_failed_batch_wait_untouched() -> None:
    # Goal: while halves are tried, nobody else runs, and nobody else loses KV.
    world = World(device_blocks=40, budget=8, seats=8)
    for number in range(3):
        world.make_resident(f"r{number}", priority=0, prompt_tokens=5, max_tokens=5)
    world.make_resident("bystander", priority=9, prompt_tokens=20, computed=4, max_tokens=4)
    world.submit("urgent", priority=0, prompt_tokens=20, max_tokens=2)
    world.backend.fails_next = True
    world.step()
    held = world.blocks_of("bystander")
    plan = world.step()
    assert "bystander" not in served(plan)
    assert DeferralReason.FAULT_ISOLATION in {d.reason for d in plan.deferrals if d.request_id == "bystander"}
    assert world.blocks_of("bystander") == held
    world.run_until_idle()
    assert world.num_preemptions("bystander") == 0


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_a_failed_step_that_moved_kv_about_leaves_all_kv_right(mode: PreemptionChoice, overlapped: bool) -> None:
    # Goal: the step that fails evicts, copies out, copies in, admits and prefills at once.
    world = World(
        device_blocks=12,
        host_blocks=12,
        mode=mode,
        prefix_caching=True,
        copies=(lambda copy: CopyFate(copy.copy_id % 2)) if overlapped else None,
    )
    for name in ("a", "b", "c"):
        world.make_resident(name, priority=9, prompt_tokens=7, max_tokens=20)
    world.give_way("a", SWAP)
    world.steps(2)
    for _ in range(12):
        world.submit(f"urgent{world.now_s}", priority=0, prompt_tokens=14, max_tokens=2)
        world.give_way("b", SWAP)
        world.backend.fails_next = True
        world.steps(4)
    world.run_until_idle()
    assert all(
        reason is FinishReason.LENGTH or name in world.backend.failed_alone for name, reason in reasons(world).items()
    )


def test_logits_that_are_not_finite_end_their_request_and_the_batch_goes_on() -> None:
    world = World(device_blocks=40)
    for number in range(4):
        world.submit(f"r{number}", prompt_tokens=5, max_tokens=6)
    world.backend.faults["r2"] = 7
    world.run_until_idle()
    assert reasons(world).pop("r2") is FinishReason.ERROR
    assert world.finished("r2").detail == "logits are not finite"
    assert world.finished("r2").num_output_tokens == 3
    assert all(not plan.preemptions for plan in world.plans)


def test_suspects_that_find_no_room_beside_a_lost_copy_do_not_stop_the_engine() -> None:
    # Goal: a lost copy pins a block for good. A suspect without room beside the others is let go of, not waited for.
    world = World(device_blocks=8, host_blocks=4, seats=4, copies=lambda _: CopyFate(is_lost=True), copy_timeout_s=3.0)
    world.make_resident("loses", priority=9, prompt_tokens=3, max_tokens=2)
    world.give_way("loses", SWAP)
    world.steps(6)
    while not world.is_finished("loses"):
        world.step()
    for name in ("a", "b", "c"):
        world.submit(name, prompt_tokens=7, max_tokens=8)
    world.step()  # eight tokens known, in two blocks each: whoever starts over needs three, and seven are left
    world.backend.fails_next = True
    world.run_until_idle()
    assert set(reasons(world).values()) == {FinishReason.LENGTH}


def test_an_abort_of_a_suspect_lets_the_others_go_on() -> None:
    world = World(device_blocks=40)
    for number in range(4):
        world.submit(f"r{number}", prompt_tokens=5, max_tokens=5)
    world.backend.poison["r3"] = 4
    world.step()
    for number in range(4):
        if number != 1:
            world.abort(f"r{number}")
    world.run_until_idle()
    assert reasons(world)["r1"] is FinishReason.LENGTH


def test_urgent_work_that_arrives_while_suspects_are_tried_is_served_afterwards() -> None:
    world = World(device_blocks=10, seats=4)
    for number in range(4):
        world.submit(f"r{number}", priority=9, prompt_tokens=5, max_tokens=5)
    world.backend.poison["r2"] = 0
    world.step()
    world.submit("urgent", priority=0, prompt_tokens=20, max_tokens=2)
    world.run_until_idle()
    assert reasons(world)["urgent"] is FinishReason.LENGTH
    assert reasons(world)["r2"] is FinishReason.ERROR


def test_copies_of_a_failed_step_and_of_the_next_one_do_not_share_a_number() -> None:
    # Goal: a late word of a copy whose step was discarded must find nobody.
    world = World(device_blocks=12, host_blocks=12)
    for name in ("swapped", "a", "b"):
        world.make_resident(name, prompt_tokens=6)
    world.give_way("swapped", SWAP)
    world.backend.fails_next = True
    first = world.step()
    world.give_way("swapped", SWAP)
    second = world.step()
    assert [copy.copy_id for copy in first.copies_out] == [0]
    assert [copy.copy_id for copy in second.copies_out] == [1]
    world.run_until_idle()
