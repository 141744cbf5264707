"""Twenty jobs with one long prefix, and an urgent arrival that needs more than their own blocks."""

from __future__ import annotations

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.plan import PreemptionMode
from tests.world import World

NUM_JOBS, NUM_SHARED = 20, 187  # jobs; full blocks of the prefix
PREFIX = tuple(range(1000, 1000 + 4 * NUM_SHARED))


def make_world(*, host_blocks: int, tails: bool, mode: PreemptionChoice = PreemptionChoice.SWAP) -> World:
    """Twenty running jobs that own two blocks each beside the prefix, and twelve free blocks."""
    world = World(
        device_blocks=NUM_SHARED + 2 * NUM_JOBS + 12,
        host_blocks=host_blocks,
        seats=NUM_JOBS + 1,
        budget=1024,
        mode=mode,
        prefix_caching=True,
        tails=tails,
    )
    world.submit("job0", priority=10, prompt=(*PREFIX, 0, 0), max_tokens=8)
    world.step()
    for number in range(1, NUM_JOBS):
        world.submit(f"job{number}", priority=10, prompt=(*PREFIX, number, 0), max_tokens=8)
    world.step()
    assert all(len(world.blocks_of(f"job{number}")) == NUM_SHARED + 1 for number in range(NUM_JOBS))
    world.steps(3)
    assert world.num_device_blocks_owned == NUM_SHARED + 2 * NUM_JOBS
    return world


def check_everybody_finished(world: World) -> None:
    for number in range(NUM_JOBS):
        assert len(world.tokens[world.finished(f"job{number}").request_id]) == 8
    assert len(world.tokens[world.finished("urgent").request_id]) == 4


@pytest.mark.parametrize("tails", [True, False])
def test_a_prefix_of_twenty_victims_is_copied_to_the_host_once_and_shared_again_afterwards(tails: bool) -> None:
    # Goal: their own blocks are not enough, so the prefix has to go too: one copy of it, whoever of them makes it.
    world = make_world(host_blocks=300, tails=tails)
    world.submit("urgent", priority=0, prompt_tokens=4 * 80, max_tokens=4)
    plan = world.step()
    assert len(plan.preemptions) == NUM_JOBS
    copied = [block for copy in plan.copies_out for block in copy.device_blocks]
    assert len(copied) == len(set(copied)) <= NUM_SHARED + 2 * NUM_JOBS
    assert len(world.tokens[world.request("urgent").request_id]) == 1  # it waits for nobody
    largest = 0
    while world.scheduler.has_work:
        world.step()
        largest = max(largest, world.scheduler.state.kv.device.num_owned)
    world.run_until_idle()
    check_everybody_finished(world)
    brought_back = sum(len(swap_in.copy.device_blocks) for plan in world.plans for swap_in in plan.swap_ins)
    assert brought_back <= NUM_SHARED + 2 * NUM_JOBS
    assert sum(world.finished(f"job{number}").num_recomputed_tokens for number in range(NUM_JOBS)) == 0


@pytest.mark.parametrize("tails", [True, False])
@pytest.mark.parametrize("host_blocks", [5, 100])
def test_a_prefix_that_the_host_has_no_room_for_is_computed_again_once(host_blocks: int, tails: bool) -> None:
    world = make_world(host_blocks=host_blocks, tails=tails)
    world.submit("urgent", priority=0, prompt_tokens=4 * 80, max_tokens=4)
    world.run_until_idle()
    check_everybody_finished(world)
    again = sum(world.finished(f"job{number}").num_recomputed_tokens for number in range(NUM_JOBS))
    assert again <= 4 * NUM_SHARED + NUM_JOBS * 8


@pytest.mark.parametrize("tails", [True, False])
def test_a_dropped_prefix_of_twenty_is_computed_again_once(tails: bool) -> None:
    world = make_world(host_blocks=0, tails=tails, mode=PreemptionChoice.RECOMPUTE)
    world.submit("urgent", priority=0, prompt_tokens=4 * 80, max_tokens=4)
    plan = world.step()
    assert {preemption.mode for preemption in plan.preemptions} == {PreemptionMode.RECOMPUTE}
    world.run_until_idle()
    check_everybody_finished(world)
    again = sum(world.finished(f"job{number}").num_recomputed_tokens for number in range(NUM_JOBS))
    assert again <= 4 * NUM_SHARED + NUM_JOBS * 8
