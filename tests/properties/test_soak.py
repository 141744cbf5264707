"""Fifty thousand steps of random work and random faults, and everything is back where it was at the end."""

from __future__ import annotations

import random

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.events import Finished
from giveway.core.kv_cache import BlockCopy
from giveway.core.request import FinishReason
from giveway.core.sampling import SamplingParams
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.world import World

NUM_STEPS = 50_000


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_long_run_with_faults_leaks_nothing() -> None:
    # Goal: blocks, host blocks, hash chains and requests are all gone; late, failed and aborted copies included.
    rng = random.Random(7)

    def fate_of(copy: BlockCopy) -> CopyFate:
        return CopyFate(delay_steps=rng.choice([0, 0, 1, 4]), fails=rng.random() < 0.05)

    world = World(
        device_blocks=24, host_blocks=20, seats=6, budget=24, prefix_caching=True, copies=fate_of, vocab_size=50
    )
    for step in range(NUM_STEPS):
        unfinished = list(world.scheduler.requests)
        if rng.random() < 0.4 and len(unfinished) < 10:
            name = f"r{step}"
            world.submit(
                name,
                priority=rng.choice([0, 5, 10]),
                prompt=[1] * rng.randint(1, 30) + [rng.randint(1, 3)],
                max_tokens=rng.randint(1, 20),
                sampling=SamplingParams(temperature=rng.choice([0.0, 0.8])),
                seed=step,
            )
            if rng.random() < 0.01:
                world.backend.poison[name] = rng.randint(0, 40)
            if rng.random() < 0.01:
                world.backend.faults[name] = rng.randint(0, 40)
        if unfinished and rng.random() < 0.1:
            world.give_way(rng.choice(unfinished), rng.choice(list(PreemptionChoice)))
        if unfinished and rng.random() < 0.02:
            world.abort(rng.choice(unfinished))
        if rng.random() < 0.005:
            world.backend.fails_next = True
        world.step()
        world.plans.clear()
        world.backend.samples.clear()
    world.run_until_idle()
    reasons = [event.reason for event in world.events if isinstance(event, Finished)]
    assert len(reasons) == len(world.specs) > 10_000
    assert reasons.count(FinishReason.LENGTH) > 0.9 * len(reasons)
    state = world.scheduler.state
    assert not state.kv.copies
    assert not state.copy_started_s
    assert not state.awaited_copies
    assert not state.suspects
    assert not state.forced
