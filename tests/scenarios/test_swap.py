"""KV on its way to the host and back: late, failed and lost copies, full host pools, and what must stay pinned."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.events import Admitted, CopyEnded, Preempted
from giveway.core.kv_cache import BlockCopy, CopyDirection
from giveway.core.plan import DeferralReason, PreemptionMode
from giveway.core.request import RequestState
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.world import World, prompt_of, served, victims, why_not

SWAP, RECOMPUTE = PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE
OUT, IN = CopyDirection.OUT, CopyDirection.IN


def only(direction: CopyDirection, fate: CopyFate) -> Callable[[BlockCopy], CopyFate]:
    """A script that has one fate for one direction, and nothing special for the other."""
    return lambda copy: fate if copy.direction is direction else CopyFate()


def test_blocks_are_reused_only_after_the_copy_that_reads_them_has_ended() -> None:
    # Goal: bytes move when the copy ends. B starts in the step after, V's tokens and those of its text are unharmed.
    world = World(device_blocks=4, host_blocks=8, prefix_caching=True, copies=only(OUT, CopyFate(3)))
    text = prompt_of("text", 11)
    world.make_resident("V", priority=9, prompt=text, max_tokens=5)
    world.submit("B", priority=0, prompt_tokens=12, max_tokens=4)
    plans = world.steps(5)
    assert [served(plan) for plan in plans] == [set(), set(), set(), set(), {"B"}]
    assert why_not(plans[0], "B") is DeferralReason.COPY_IN_FLIGHT
    assert world.state_of("V") is RequestState.SWAPPED
    world.submit("same", priority=9, prompt=text, max_tokens=5)
    world.run_until_idle()
    assert world.tokens[world.finished("same").request_id] == world.tokens[world.finished("V").request_id]


def test_a_copy_that_takes_six_steps_does_not_cost_a_second_victim() -> None:
    # Goal: the room is promised to the one that waits: nobody else goes, and nobody below takes it meanwhile.
    world = World(device_blocks=8, host_blocks=16, copies=only(OUT, CopyFate(6)))
    for name in ("first", "second"):
        world.make_resident(name, priority=9, prompt_tokens=4, max_tokens=12, blocks=4)
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=2)
    plan = world.step()
    assert victims(plan) == ["second"]
    world.submit("small", priority=9, prompt_tokens=2, max_tokens=2)
    for plan in world.steps(6):
        assert not plan.preemptions
        assert why_not(plan, "urgent") is DeferralReason.COPY_IN_FLIGHT
        assert served(plan) <= {"first"}
    assert "urgent" in served(world.step())
    world.run_until_idle()
    assert sum(len(plan.preemptions) for plan in world.plans) == 1


def test_growth_waits_for_a_promised_block_instead_of_evicting_somebody_else() -> None:
    world = World(device_blocks=6, host_blocks=8, copies=only(OUT, CopyFate(4)))
    world.make_resident("top", priority=0, prompt_tokens=8, max_tokens=6, blocks=2)
    for name in ("middle", "low"):
        world.make_resident(name, priority=9, prompt_tokens=6, max_tokens=3)
    plan = world.step()
    assert victims(plan) == ["low"]
    assert why_not(plan, "top") is DeferralReason.COPY_IN_FLIGHT
    world.run_until_idle()
    assert world.num_preemptions("middle") == 0


def test_a_seat_of_a_victim_is_free_while_its_copy_still_runs() -> None:
    # Goal: seats are short, blocks are not: the urgent one starts in the same step although the copy takes four.
    world = World(device_blocks=100, host_blocks=8, seats=1, copies=only(OUT, CopyFate(4)))
    world.make_resident("low", priority=9, prompt_tokens=6)
    world.submit("urgent", priority=0, prompt_tokens=6)
    assert served(world.step()) == {"urgent"}
    world.run_until_idle()


def test_host_blocks_that_are_being_read_are_not_given_to_another_victim() -> None:
    # Goal: the host pool is full of V, which is on its way back; W has to recompute, V keeps its bytes.
    world = World(device_blocks=12, host_blocks=2, copies=only(IN, CopyFate(3)), prefix_caching=False)
    world.make_resident("V", prompt_tokens=6, max_tokens=8)
    world.make_resident("W", prompt_tokens=6, max_tokens=12)
    world.give_way("V", SWAP)
    world.steps(2)
    assert world.state_of("V") is RequestState.SWAPPING_IN
    world.give_way("W", SWAP)
    plan = world.step()
    assert [preemption.mode for preemption in plan.preemptions] == [PreemptionMode.RECOMPUTE]
    assert world.num_host_blocks_owned == 2
    world.run_until_idle()


def test_a_return_and_an_eviction_in_one_step_do_not_share_a_host_block() -> None:
    world = World(device_blocks=4, host_blocks=2)
    world.make_resident("V", priority=0, prompt_tokens=6, max_tokens=8)
    world.make_resident("W", priority=9, prompt_tokens=6, max_tokens=8)
    world.give_way("V", SWAP)
    world.step()
    world.give_way("W", SWAP)
    plan = world.step()
    assert [swap_in.copy.request_id for swap_in in plan.swap_ins] == ["V"]
    assert [preemption.mode for preemption in plan.preemptions] == [PreemptionMode.RECOMPUTE]
    world.run_until_idle()


@pytest.mark.parametrize("delay", [0, 2])
def test_a_copy_out_that_failed_is_not_taken_for_saved(delay: int) -> None:
    # Goal: its KV is gone and is computed again; device and host blocks come back.
    world = World(device_blocks=4, host_blocks=4, copies=only(OUT, CopyFate(delay, fails=True)))
    world.make_resident("V", prompt_tokens=6, max_tokens=6)
    world.give_way("V", SWAP)
    world.steps(1 + delay)
    assert world.state_of("V") is RequestState.PREEMPTED
    assert (world.num_device_blocks_owned, world.num_host_blocks_owned) == (0, 0)
    assert [event.failed for event in world.events_of("V", CopyEnded)] == [True]
    world.run_until_idle()
    assert world.finished("V").num_recomputed_tokens == 6 - world.num_found(6, 7)


def test_a_copy_in_that_failed_is_computed_again() -> None:
    world = World(device_blocks=4, host_blocks=4, copies=only(IN, CopyFate(2, fails=True)))
    world.make_resident("V", prompt_tokens=6, max_tokens=6)
    world.give_way("V", SWAP)
    world.steps(4)
    assert world.state_of("V") is RequestState.PREEMPTED
    assert (world.num_device_blocks_owned, world.num_host_blocks_owned) == (0, 0)
    world.run_until_idle()


@pytest.mark.parametrize("direction", [OUT, IN])
def test_a_lost_copy_ends_the_waiting_and_pins_its_blocks(direction: CopyDirection) -> None:
    # Goal: after the time-out the request recomputes; a late copy may still write, so its blocks never come back.
    fates = only(direction, CopyFate(is_lost=True))
    world = World(device_blocks=6, host_blocks=4, copies=fates, copy_timeout_s=4.0, prefix_caching=False)
    world.make_resident("V", prompt_tokens=6, max_tokens=6)
    world.give_way("V", SWAP)
    world.run_until_idle()
    assert world.finished("V").num_recomputed_tokens == 6
    assert (world.num_device_blocks_owned, world.num_host_blocks_owned) == (2, 2)


def test_a_copy_that_was_given_up_and_ends_after_all_gives_its_blocks_back() -> None:
    world = World(device_blocks=14, host_blocks=4, copies=only(OUT, CopyFate(9)), copy_timeout_s=3.0)
    world.make_resident("V", prompt_tokens=6, max_tokens=12)
    world.make_resident("other", prompt_tokens=6, max_tokens=12)
    world.give_way("V", SWAP)
    world.steps(6)
    assert world.state_of("V") is not RequestState.SWAPPING_OUT
    assert world.num_host_blocks_owned == 2
    world.run_until_idle()
    assert (world.num_device_blocks_owned, world.num_host_blocks_owned) == (0, 0)


@pytest.mark.parametrize(
    ("host_blocks", "modes"),
    [
        (0, {PreemptionMode.RECOMPUTE}),
        (1, {PreemptionMode.RECOMPUTE}),
        (4, {PreemptionMode.SWAP}),
    ],
)
def test_a_host_pool_without_room_means_recompute_and_not_an_error(
    host_blocks: int, modes: set[PreemptionMode]
) -> None:
    # Goal: pool 8, two requests of four blocks that grow; the newer gives way by what the host has room for.
    world = World(device_blocks=8, host_blocks=host_blocks)
    for name in ("older", "newer"):
        world.make_resident(name, prompt_tokens=15, max_tokens=8)
    world.run_until_idle()
    assert {event.mode for event in world.events_of("newer", Preempted)} == modes
    assert world.num_preemptions("older") == 0


def test_the_host_pool_is_shared_out_victim_by_victim() -> None:
    # Goal: room for one of two victims: one swaps, the other recomputes, in the same step.
    world = World(device_blocks=8, host_blocks=3)
    for name in ("first", "second"):
        world.make_resident(name, priority=9, prompt_tokens=11, max_tokens=4, blocks=4)
    world.submit("urgent", priority=0, prompt_tokens=28, max_tokens=2)
    plan = world.step()
    assert {p.victim: p.mode for p in plan.preemptions} == {
        "second": PreemptionMode.SWAP,
        "first": PreemptionMode.RECOMPUTE,
    }
    world.run_until_idle()


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_a_resume_brings_back_prompt_and_generated_tokens_into_a_new_table(
    mode: PreemptionChoice, prefix_caching: bool
) -> None:
    # Goal: blocks of 16, two requests of just over two blocks and as much output, pool of 7: the second is evicted.
    world = World(device_blocks=7, block_size=16, host_blocks=7, mode=mode, prefix_caching=prefix_caching)
    for name in ("one", "two"):
        world.submit(name, prompt_tokens=34, max_tokens=34)
    world.run_until_idle()
    assert world.num_preemptions("one") == 0
    assert world.num_preemptions("two") >= 1
    assert len(world.events_of("two", Admitted)) == 1 + world.num_preemptions("two")


def test_the_prefix_index_is_asked_for_generated_tokens_too() -> None:
    world = World(device_blocks=8, block_size=16, prefix_caching=True)
    world.make_resident("r", prompt_tokens=34, max_tokens=34)
    while world.request("r").num_known_tokens < 50:
        world.step()
    world.give_way("r", RECOMPUTE)
    world.steps(2)
    assert world.events_of("r", Admitted)[-1].num_hit_tokens == 48


def test_a_name_taken_again_during_the_copy_of_its_first_owner_is_not_mixed_up() -> None:
    # Goal: the first "r" is aborted while its copy runs; the second "r" swaps too, and waits for its own copy.
    world = World(device_blocks=12, host_blocks=12, copies=only(OUT, CopyFate(5)))
    world.make_resident("r", prompt_tokens=6, max_tokens=4)
    world.give_way("r", SWAP)
    world.step()
    world.abort("r")
    world.step()
    world.submit("r", prompt=prompt_of("another", 9), max_tokens=4)
    world.step()
    world.give_way("r", SWAP)
    world.run_until_idle()
    assert len(world.tokens[world.specs[next(iter(world.specs))].request_id]) == 4
    assert world.num_host_blocks_owned == 0


def test_no_token_is_set_aside_for_a_resident_whose_copy_back_is_still_under_way() -> None:
    # Goal: what a prefill leaves for the decodes of its class cannot go to one that is not there yet, and so to a
    # prefill of a less urgent class.
    world = World(device_blocks=20, host_blocks=8, budget=9, copies=only(IN, CopyFate(6)))
    world.make_resident("long", priority=5, prompt_tokens=44, max_tokens=2, computed=9)
    world.make_resident("returning", priority=5, prompt_tokens=3, max_tokens=8)
    world.give_way("returning", SWAP)
    world.step()
    while world.state_of("returning") is not RequestState.SWAPPING_IN:
        world.step()
    world.submit("urgent", priority=0, prompt_tokens=8, max_tokens=1)
    world.submit("below", priority=9, prompt_tokens=4, max_tokens=1)
    plan = world.step()
    assert [(chunk.request_id, chunk.num_tokens) for chunk in plan.chunks] == [("urgent", 8), ("long", 1)]
    assert why_not(plan, "below") is DeferralReason.NO_TOKENS
    world.run_until_idle()
