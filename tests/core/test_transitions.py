"""What happens to requests when copies and moves end well, badly or never."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.events import CopyEnded, ParkedMoved, Preempted
from giveway.core.ids import RequestId
from giveway.core.kv_cache import CopyDirection, Tier
from giveway.core.plan import PreemptionMode, StepOutcome, StepPlan
from giveway.core.request import RequestState
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.world import World

SWAP = PreemptionChoice.SWAP


def step_with(world: World, change: Callable[[StepPlan, StepOutcome], StepOutcome]) -> StepPlan:
    """A step whose outcome tells something else than what the executor found."""
    plan = world.plan()
    world.now_s += 1.0
    outcome = change(plan, world.executor.execute(plan, world.scheduler.requests))
    world._open_plan = None
    world._record(world.scheduler.commit(plan, outcome))
    return plan


def as_it_was(_: StepPlan, outcome: StepOutcome) -> StepOutcome:
    return outcome


def without_copies(_: StepPlan, outcome: StepOutcome) -> StepOutcome:
    return replace(outcome, finished_copies=())


def without_moves(plan: StepPlan, outcome: StepOutcome) -> StepOutcome:
    moved = {move.copy_id for move in plan.moves}
    return replace(
        outcome,
        finished_copies=tuple(copy_id for copy_id in outcome.finished_copies if copy_id not in moved),
        failed_copies=tuple(moved),
    )


def kept(world: World, name: str) -> int:
    return len(world.scheduler.state.kv.kept.get(RequestId(name), ()))


def tail_given_up(*, copies: Callable[[object], CopyFate] | None = None, timeout_s: float = 20.0) -> World:
    """A world whose next plan takes two of the four blocks of `low`, by swap."""
    world = World(device_blocks=6, host_blocks=6, tails=True, copies=copies, copy_timeout_s=timeout_s)
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=4)
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=1)
    return world


def test_a_preemption_tells_who_what_where_and_how_much_stays() -> None:
    world = tail_given_up()
    world.step()
    assert world.events_of("low", Preempted) == [
        Preempted(RequestId("low"), 1.0, RequestId("urgent"), PreemptionMode.SWAP, 2, 2, Tier.HOST)
    ]
    world.run_until_idle()


def test_a_failed_copy_of_a_tail_costs_the_tail_and_not_what_was_kept() -> None:
    world = tail_given_up()
    step_with(world, without_copies)
    assert (world.state_of("low"), kept(world, "low")) == (RequestState.PREEMPTED, 2)
    assert world.request("low").num_computed_tokens == 8
    assert world.num_host_blocks_owned == 0
    (event,) = world.events_of("low", CopyEnded)
    assert (event.direction, event.num_blocks, event.tier, event.failed) == (CopyDirection.OUT, 2, Tier.HOST, True)
    world.run_until_idle()
    assert world.finished("low").num_recomputed_tokens == 7


def test_a_failed_copy_back_costs_everything_because_the_kept_head_went_into_the_table() -> None:
    world = tail_given_up()
    world.step()
    plan = step_with(world, without_copies)
    assert [swap_in.copy.request_id for swap_in in plan.swap_ins] == ["low"]
    assert (world.state_of("low"), world.request("low").num_computed_tokens) == (RequestState.PREEMPTED, 0)
    assert (world.num_device_blocks_owned, world.num_host_blocks_owned) == (0, 0)
    world.run_until_idle()


def test_an_overdue_copy_of_a_tail_leaves_what_was_kept_and_pins_only_its_own_blocks() -> None:
    world = tail_given_up(copies=lambda _: CopyFate(is_lost=True), timeout_s=3.0)
    world.steps(5)
    world.plan()  # gives up on the copy before it decides
    assert (kept(world, "low"), world.request("low").num_computed_tokens) == (2, 8)
    assert world.state_of("low") is RequestState.PREEMPTED
    assert (world.num_device_blocks_owned, world.num_host_blocks_owned) == (2 + 2, 2)


def test_a_lost_copy_does_not_pin_the_part_of_a_tail_that_was_parked_before() -> None:
    # Once: the first part of the tail lies on the host, nobody writes it, and its owner computes it again; yet the
    # lost copy of the second part holds it for ever, as if it could still be written.
    lost: set[int] = set()
    world = World(
        device_blocks=6,
        host_blocks=6,
        tails=True,
        copies=lambda copy: CopyFate(is_lost=copy.copy_id in lost),
        copy_timeout_s=3.0,
    )
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=4)
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=9)
    world.step()
    assert world.num_host_blocks_owned == 2
    lost.add(1)
    plan = step_with(world, as_it_was)
    while not plan.copies_out:
        plan = step_with(world, as_it_was)
    assert [len(copy.device_blocks) for copy in plan.copies_out] == [1]
    for _ in range(4):
        step_with(world, as_it_was)
    world._flush()
    assert world.scheduler.state.kv.lost
    assert world.num_host_blocks_owned == 1


# From the host to the disk


def move_ahead(tmp_path: Path) -> World:
    """A world whose next plan sends the parked KV of `low` from the host to the disk, for `mid`."""
    world = World(device_blocks=8, host_blocks=3, disk_blocks=6, disk_dir=tmp_path)
    world.make_resident("low", priority=9, prompt_tokens=11, max_tokens=4)
    world.give_way("low", SWAP)
    world.submit("top", priority=0, prompt_tokens=31, max_tokens=1)
    world.step()
    world.make_resident("mid", priority=5, prompt_tokens=11, max_tokens=4)
    world.submit("urgent", priority=0, prompt_tokens=31, max_tokens=1)
    return world


def test_a_move_that_failed_costs_its_owner_the_parked_kv_and_the_victim_takes_the_place(tmp_path: Path) -> None:
    world = move_ahead(tmp_path)
    plan = step_with(world, without_moves)
    assert [move.request_id for move in plan.moves] == ["low"]
    assert (world.state_of("low"), world.state_of("mid")) == (RequestState.PREEMPTED, RequestState.SWAPPED)
    assert world.events_of("low", ParkedMoved) == [ParkedMoved(RequestId("low"), 2.0, 3, None)]
    assert world.scheduler.state.kv.disk.num_owned == 0
    assert world.scheduler.state.num_disk_failures == 1
    world.run_until_idle()
    assert world.finished("mid").num_recomputed_tokens == 0
    assert world.finished("low").num_recomputed_tokens == 11


def test_a_write_that_succeeds_makes_up_for_those_that_failed_before(tmp_path: Path) -> None:
    world = move_ahead(tmp_path)
    world.scheduler.state.num_disk_failures = 2
    world.step()
    assert world.scheduler.state.num_disk_failures == 0
    world.run_until_idle()


@pytest.mark.parametrize("is_dropped", [False, True])
def test_when_a_step_fails_whose_place_on_the_host_was_given_away_has_lost_its_kv(
    tmp_path: Path, is_dropped: bool
) -> None:
    # Goal: the place may be overwritten already, so nobody may read it again.
    if is_dropped:
        world = World(device_blocks=8, host_blocks=3)
        world.make_resident("low", priority=9, prompt_tokens=11, max_tokens=4)
        world.give_way("low", SWAP)
        world.submit("top", priority=0, prompt_tokens=31, max_tokens=1)
        world.step()
        world.make_resident("mid", priority=5, prompt_tokens=11, max_tokens=4)
        world.submit("urgent", priority=0, prompt_tokens=31, max_tokens=1)
    else:
        world = move_ahead(tmp_path)
    world.backend.fails_next = True
    plan = world.step()
    assert (plan.dropped == ("low",)) is is_dropped
    assert world.state_of("low") is RequestState.PREEMPTED
    world.run_until_idle()
