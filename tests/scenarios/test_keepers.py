"""Whoever gave up a tail keeps leading blocks: they are taken later, lost, or found right."""

from __future__ import annotations

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.kv_cache import BlockCopy
from giveway.core.request import RequestState
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.faulty_disk import FaultyDisk
from tests.world import World, victims

PREFIX_CACHE = (False,)  # blocks on each tier are counted one by one here


@pytest.mark.parametrize("mode", [PreemptionChoice.RECOMPUTE, PreemptionChoice.SWAP])
def test_a_failed_step_that_wrote_into_what_a_keeper_gave_up_leaves_it_nothing_wrong(mode: PreemptionChoice) -> None:
    # Goal: "old" grows into the block that "young" had kept, and that very step fails. The step is taken back, so the
    # keeper still lists the block, but its content is gone: it must not be read any more.
    world = World(device_blocks=5, host_blocks=5, tails=True, mode=mode)
    world.make_resident("old", prompt_tokens=7, max_tokens=12, blocks=2)
    world.make_resident("young", prompt_tokens=11, max_tokens=4, blocks=3)
    while not any(victims(plan) == ["young"] for plan in world.plans):
        world.step()
    assert len(world.scheduler.state.kv.kept[world.request("young").request_id]) == 2
    while victims(world.plan()) != ["young"]:
        world.step()
    world.backend.fails_next = True
    world.step()
    world.run_until_idle()
    assert len(world.tokens[world.finished("young").request_id]) == 4


def test_a_lost_copy_of_a_keeper_pins_only_what_it_reads_and_writes() -> None:
    # Goal: the first tail is safe on the host when the copy of the second one is lost. The request computes both
    # again, so nobody needs the first any more, and the lost copy never touches it: its place is free.
    fates = [CopyFate(), CopyFate(is_lost=True)]

    def fate_of(_: BlockCopy) -> CopyFate:
        return fates.pop(0) if fates else CopyFate()

    world = World(device_blocks=4, host_blocks=4, tails=True, copies=fate_of, copy_timeout_s=5.0)
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=2)
    world.submit("first", priority=0, prompt_tokens=3, max_tokens=1)
    world.steps(2)
    assert world.state_of("low") is RequestState.SWAPPED
    assert world.num_host_blocks_owned == 1
    world.submit("second", priority=0, prompt_tokens=7, max_tokens=1)
    world.run_until_idle()
    assert world.num_host_blocks_owned == 1


def test_a_keeper_whose_parked_tail_moves_to_the_disk_gives_up_the_rest_in_the_same_step() -> None:
    # Goal: the tail moves on to make room on the host for "forced"; then "u2" needs what "keeper" has kept. All of
    # its KV must end up on one tier, or be computed again.
    world = World(device_blocks=5, host_blocks=2, tails=True, disk_blocks=8, disk=FaultyDisk(8, 4))
    world.make_resident("keeper", priority=10, prompt_tokens=11, max_tokens=2)
    world.make_resident("forced", priority=5, prompt_tokens=2, max_tokens=3)
    world.submit("u1", priority=0, prompt_tokens=11, max_tokens=1)
    assert victims(world.step()) == ["keeper"]
    assert world.num_host_blocks_owned == 2
    world.give_way("forced", PreemptionChoice.SWAP)
    world.submit("u2", priority=0, prompt_tokens=19, max_tokens=1)
    plan = world.step()
    assert set(victims(plan)) == {"forced", "keeper"}
    assert [move.request_id for move in plan.moves] == ["keeper"]
    world.run_until_idle()
    assert len(world.tokens[world.finished("keeper").request_id]) == 2


def test_a_keeper_that_must_compute_again_and_is_then_spared_has_lost_what_was_parked_all_the_same() -> None:
    # Goal: "u2" takes a block of "low", for which the host has no room, so what is parked of it is of no use any more.
    # "u3" then asks "low" and "idle", and gets all it lacks from "idle", which has computed nothing. So the second time
    # takes nothing from "low"; it must not turn the first into a pause that leaves its parked KV behind.
    world = World(device_blocks=5, host_blocks=1, tails=True)
    world.make_resident("low", priority=9, prompt_tokens=11, max_tokens=2)
    world.submit("u1", priority=0, prompt_tokens=11, max_tokens=1)
    world.step()
    assert world.num_host_blocks_owned == 1
    world.make_resident("idle", priority=9, prompt_tokens=7, max_tokens=2, computed=0)
    world.submit("u2", priority=0, prompt_tokens=7, max_tokens=1)
    world.submit("u3", priority=0, prompt_tokens=7, max_tokens=1)
    assert set(victims(world.step())) == {"low", "idle"}
    world.run_until_idle()
    assert len(world.tokens[world.finished("low").request_id]) == 2


@pytest.mark.parametrize("mode", [PreemptionChoice.RECOMPUTE, PreemptionChoice.SWAP])
def test_a_keeper_from_whom_nothing_is_taken_does_not_give_way_again(mode: PreemptionChoice) -> None:
    # Goal: "low" has kept a block. "u2" asks it first, but "idle", which has computed nothing, must go whole and that
    # alone is enough: "low" keeps its block, no copy of nothing is begun, and no event says that it gave way.
    world = World(device_blocks=5, host_blocks=4, tails=True, mode=mode)
    world.make_resident("low", priority=9, prompt_tokens=11, max_tokens=2)
    world.submit("u1", priority=0, prompt_tokens=15, max_tokens=1)
    assert victims(world.step()) == ["low"]
    assert len(world.scheduler.state.kv.kept[world.request("low").request_id]) == 1
    world.make_resident("idle", priority=9, prompt_tokens=11, max_tokens=2, computed=0)
    world.submit("u2", priority=0, prompt_tokens=15, max_tokens=1)
    plan = world.step()
    assert victims(plan) == ["idle"]
    assert not plan.copies_out
    world.run_until_idle()
