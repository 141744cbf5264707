"""A request whose reader is too slow is held: it leaves the device, harms nobody, and loses nothing."""

from __future__ import annotations

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.ids import RequestId
from giveway.core.plan import DeferralReason
from giveway.core.request import NEWCOMER_STATES, RequestState
from tests.world import World


def reason_of(world: World, name: str) -> DeferralReason | None:
    found = [deferral.reason for deferral in world.plan().deferrals if deferral.request_id == name]
    return found[0] if found else None


@pytest.mark.parametrize("mode", list(PreemptionChoice))
@pytest.mark.parametrize("host_blocks", [0, 8])
def test_a_held_request_leaves_the_device_and_goes_on_where_it_was(mode: PreemptionChoice, host_blocks: int) -> None:
    world = World(device_blocks=8, host_blocks=host_blocks, mode=mode)
    world.submit("slow", prompt_tokens=6, max_tokens=12)
    world.steps(4)
    made = len(world.tokens[RequestId("slow")])
    world.hold("slow")
    world.step()
    assert world.state_of("slow") in NEWCOMER_STATES
    assert world.request("slow").num_preemptions == 1
    assert not world.scheduler.has_work, "an engine with nothing but held requests must not spin"
    world.let_go("slow")
    world.run_until_idle()  # the six checks compare every token with the undisturbed run
    assert len(world.tokens[RequestId("slow")]) == 12 > made


def test_others_use_the_room_of_a_held_request_and_it_does_not_stand_in_their_way() -> None:
    # Goal: the held one is of the better class, yet whoever is behind it is served at once.
    world = World(device_blocks=4, seats=1)
    world.submit("slow", priority=0, prompt_tokens=6, max_tokens=8)
    world.steps(2)
    world.submit("next", priority=5, prompt_tokens=6, max_tokens=4)
    world.hold("slow")
    world.step()
    assert reason_of(world, "slow") is DeferralReason.HELD
    world.run_until_unheld_are_done()
    assert len(world.tokens[RequestId("next")]) == 4
    world.let_go("slow")
    world.run_until_idle()


def test_a_request_that_waits_can_be_held_and_taken_back() -> None:
    world = World(device_blocks=4)
    world.submit("early", prompt_tokens=6)
    world.hold("early")
    world.step()
    assert world.state_of("early") is RequestState.WAITING
    world.abort("early")
    world.run_until_idle()
    assert not world.scheduler.state.held


def test_letting_go_what_is_not_held_and_holding_what_has_ended_is_harmless() -> None:
    world = World(device_blocks=4)
    world.hold("nobody")
    world.let_go("nobody")
    world.submit("r", prompt_tokens=3, max_tokens=2)
    world.let_go("r")
    world.run_until_idle()
    world.hold("r")
    world.step()
    assert not world.scheduler.state.held
