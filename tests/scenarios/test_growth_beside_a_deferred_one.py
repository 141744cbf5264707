"""A resident grows into others' room while a better-ranked newcomer waits: nobody behind is held up for that."""

from __future__ import annotations

import pytest

from tests.world import World, served


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("tails", [True, False], ids=["tails", "whole"])
def test_growth_that_takes_exactly_what_it_needs_holds_up_nobody_behind_it(tails: bool, prefix_caching: bool) -> None:
    # Goal: "grows" takes a block in every step; with tails exactly one, so that nothing is left over for "giant", which
    # cannot be placed anyway. "mid" is more urgent than "low" and needs two blocks, which "low" has.
    world = World(device_blocks=20, block_size=1, host_blocks=40, seats=4, tails=tails, prefix_caching=prefix_caching)
    world.make_resident("first", priority=0, prompt_tokens=4, max_tokens=7, blocks=10)
    world.make_resident("grows", priority=5, prompt_tokens=1, max_tokens=7, blocks=1)
    world.make_resident("low", priority=9, prompt_tokens=8, max_tokens=6)
    world.submit("giant", priority=0, prompt_tokens=18, max_tokens=2)
    world.submit("mid", priority=6, prompt_tokens=1, max_tokens=2)
    world.steps(2)
    assert "mid" in served(world.plans[0]) | served(world.plans[1])
    world.run_until_idle()
