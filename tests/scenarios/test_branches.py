"""Several answers to one prompt: they share the KV of the prompt, and each goes its own way."""

from __future__ import annotations

import pytest

from giveway.core.config import PreemptionChoice
from tests.world import World, served, victims

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
