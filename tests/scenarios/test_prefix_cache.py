"""Shared prefixes: found only when they exist, never when they are somebody else's, freed with their last owner."""

from __future__ import annotations

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.events import Admitted
from giveway.core.request import FinishReason, RequestState
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.world import World, prompt_of, served, victims

SWAP, RECOMPUTE = PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE


def hits(world: World, name: str) -> list[int]:
    """Tokens found at each admission of a request."""
    return [event.num_hit_tokens for event in world.events_of(name, Admitted)]


@pytest.mark.parametrize(("blocks_taken", "found"), [(1, 4), (2, 0)])
def test_a_block_that_somebody_overwrote_is_found_no_more(blocks_taken: int, found: int) -> None:
    # Goal: X ends, Y computes in its blocks, and the same text again must not read Y's KV. The tail goes first.
    world = World(device_blocks=2, prefix_caching=True)
    text = prompt_of("text", 8)
    world.submit("X", prompt=text, max_tokens=1)
    world.run_until_idle()
    world.submit("Y", prompt_tokens=4 * blocks_taken, max_tokens=1)
    world.run_until_idle()
    world.submit("again", prompt=text, max_tokens=1)
    world.run_until_idle()
    assert hits(world, "again") == [found]
    assert world.tokens[world.finished("again").request_id] == world.tokens[world.finished("X").request_id]


def test_blocks_of_a_request_that_went_before_its_forward_pass_are_not_found() -> None:
    # Goal: four of sixteen tokens are computed when the first one is taken back: exactly those are found.
    world = World(device_blocks=16, prefix_caching=True, budget=4, seats=2)
    text = prompt_of("text", 17)
    world.submit("first", prompt=text)
    world.step()
    world.abort("first")
    world.submit("second", prompt=text)
    world.run_until_idle()
    assert hits(world, "second") == [4]


def test_two_with_one_prefix_admitted_in_one_step_do_not_find_each_others_blocks() -> None:
    world = World(device_blocks=16, prefix_caching=True)
    text = prompt_of("text", 16)
    world.submit("first", prompt=text)
    world.submit("second", prompt=text)
    assert served(world.step()) == {"first", "second"}
    world.run_until_idle()
    assert hits(world, "first") == hits(world, "second") == [0]


def test_blocks_of_a_step_that_failed_are_not_found() -> None:
    # Goal: the content of every block that the failed step meant to write is unknown.
    world = World(device_blocks=16, prefix_caching=True)
    text = prompt_of("text", 16)
    world.backend.fails_next = True
    world.submit("first", prompt=text)
    world.step()
    assert world.finished("first").reason is FinishReason.ERROR
    world.submit("second", prompt=text)
    world.run_until_idle()
    assert hits(world, "second") == [0]


def test_idle_blocks_that_a_failed_step_overwrote_are_not_found() -> None:
    # Goal: the failed step had taken cached blocks; they hold nonsense now, though nobody ever owned them.
    world = World(device_blocks=4, prefix_caching=True)
    text = prompt_of("text", 16)
    world.submit("first", prompt=text, max_tokens=1)
    world.run_until_idle()
    world.backend.fails_next = True
    world.submit("other", prompt_tokens=7)
    world.run_until_idle()
    world.submit("again", prompt=text, max_tokens=1)
    world.run_until_idle()
    assert hits(world, "again") == [8]


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_prompt_that_is_cached_whole_still_runs_its_last_block(max_tokens: int) -> None:
    # Goal: sixteen tokens sent twice: twelve are found, four run, the text is that of the cold run.
    world = World(device_blocks=12, prefix_caching=True)
    text = prompt_of("text", 16)
    world.submit("cold", prompt=text, max_tokens=max_tokens)
    world.run_until_idle()
    world.submit("warm", prompt=text, max_tokens=max_tokens)
    plan = world.step()
    assert [(chunk.start, chunk.num_tokens, chunk.samples) for chunk in plan.chunks] == [(12, 4, True)]
    world.run_until_idle()
    assert world.tokens[world.finished("warm").request_id] == world.tokens[world.finished("cold").request_id]


def test_a_resume_whose_context_is_cached_whole_still_runs_a_token() -> None:
    # Goal: with one token a block, everything but the last token is found again.
    world = World(device_blocks=12, block_size=1, prefix_caching=True)
    world.make_resident("r", prompt_tokens=6, max_tokens=6)
    world.give_way("r", RECOMPUTE)
    world.step()
    plan = world.step()
    assert hits(world, "r") == [6]
    assert plan.num_tokens == 1
    world.run_until_idle()
    assert world.finished("r").num_recomputed_tokens == 0


def test_without_prefix_caching_progress_of_a_chunked_prefill_lives_in_the_request() -> None:
    # Goal: prompt 20, chunk 8, pool 8: chunks start at 0, 8, 16 and six blocks are in use at most.
    world = World(device_blocks=8, budget=8)
    world.submit("r", prompt_tokens=20, max_tokens=2)
    peak = 0
    starts = []
    while not world.is_finished("r"):
        starts += [chunk.start for chunk in world.step().chunks]
        peak = max(peak, world.num_device_blocks_owned)
    assert starts == [0, 8, 16]
    assert peak == 6


def test_shared_blocks_are_let_go_once_by_each_owner_whoever_ended_before() -> None:
    # Goal: of three that share a prefix one is finished when the other two give way together.
    world = World(device_blocks=12, prefix_caching=True)
    text = prompt_of("text", 8)
    for number in range(3):
        world.submit(f"r{number}", prompt=(*text, number), max_tokens=3 + 3 * min(number, 1))
        world.step()
    while not world.is_finished("r0"):
        world.step()
    shared = set(world.blocks_of("r1")) & set(world.blocks_of("r2"))
    assert len(shared) == 2
    world.give_way("r1", RECOMPUTE)
    world.give_way("r2", RECOMPUTE)
    world.step()
    assert world.num_device_blocks_owned == 0
    world.run_until_idle()
    assert hits(world, "r1")[-1] >= 8


def shared_prefix_world(*, host_blocks: int = 0, overlapped: bool = False) -> World:
    """Twenty jobs, each with a prefix of 187 blocks in common and two blocks of its own, in a pool they fill."""
    world = World(
        device_blocks=187 + 40,
        host_blocks=host_blocks,
        seats=32,
        budget=2048,
        prefix_caching=True,
        copies=(lambda _: CopyFate(2)) if overlapped else None,
    )
    text = prompt_of("prefix", 187 * 4)
    for number in range(20):
        world.submit(f"job{number}", priority=9, prompt=(*text, 1000 + number, 1, 2), max_tokens=5)
        if number == 0:
            world.step()
    world.step()
    assert len({block for n in range(20) for block in world.blocks_of(f"job{n}")}) >= 187 + 20
    return world


def test_sharers_go_one_by_one_while_their_own_blocks_are_enough() -> None:
    # Goal: a shared block is freed when its last owner goes; the set of victims is counted together.
    world = shared_prefix_world()
    owned = world.num_device_blocks_owned
    free = 227 - owned
    world.submit("urgent", priority=0, prompt_tokens=(free + 10) * 4 - 1, max_tokens=1)
    plan = world.step()
    assert 0 < len(victims(plan)) < 20
    assert "urgent" in served(plan)
    world.run_until_idle()


@pytest.mark.parametrize("host_blocks", [0, 400])
def test_an_arrival_that_needs_more_than_the_sharers_own_blocks_takes_the_shared_ones_too(host_blocks: int) -> None:
    # Goal: all twenty go in one step, the urgent one runs in it, and all twenty finish with their own tokens.
    world = shared_prefix_world(host_blocks=host_blocks)
    world.submit("urgent", priority=0, prompt_tokens=60 * 4, max_tokens=2)
    plan = world.step()
    assert len(victims(plan)) == 20
    assert "urgent" in served(plan)
    world.run_until_idle()
    assert all(world.finished(f"job{n}").num_output_tokens == 5 for n in range(20))


def test_victims_that_share_a_prefix_promise_it_together_while_their_copies_run() -> None:
    # Goal: both victims' copies hold the shared blocks; the request that waits for them takes no third victim.
    world = World(device_blocks=13, host_blocks=20, prefix_caching=True, copies=lambda _: CopyFate(4))
    text = prompt_of("text", 12)
    world.make_resident("bystander", priority=5, prompt_tokens=10, max_tokens=20)
    world.submit("one", priority=9, prompt=(*text, 1), max_tokens=9)
    world.step()
    world.submit("two", priority=9, prompt=(*text, 2), max_tokens=9)
    world.step()
    assert len(set(world.blocks_of("one")) & set(world.blocks_of("two"))) == 3
    world.submit("urgent", priority=0, prompt_tokens=34, max_tokens=2)
    plan = world.step()
    assert set(victims(plan)) == {"one", "two"}
    later = world.steps(6)
    assert not any(plan.preemptions for plan in later)
    assert world.is_finished("urgent")
    assert world.num_preemptions("bystander") == 0
    world.run_until_idle()


def test_a_prefix_survives_the_swap_of_its_owner_and_serves_others() -> None:
    # Goal: the copy only reads; the same text sent meanwhile finds the blocks, and the wrong bytes never.
    world = World(device_blocks=16, host_blocks=16, prefix_caching=True, copies=lambda _: CopyFate(3))
    text = prompt_of("text", 12)
    world.make_resident("V", prompt=text, max_tokens=6)
    world.give_way("V", SWAP)
    world.submit("same", prompt=text, max_tokens=6)
    world.steps(2)
    assert hits(world, "same")[0] == 8
    assert world.state_of("V") is RequestState.SWAPPING_OUT
    world.run_until_idle()
