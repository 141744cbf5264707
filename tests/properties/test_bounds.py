"""What giving way costs at most: bounds over random runs, counted in tokens and steps."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from giveway.core.config import PreemptionChoice, SchedulingPolicy, VictimOrder
from giveway.core.events import Finished, Preempted, TokenEmitted
from giveway.core.ids import RequestId
from giveway.core.kv_cache import BlockCopy
from giveway.core.request import FinishReason, RequestState
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.faulty_disk import FaultyDisk
from tests.world import World

PRIORITY, FCFS = SchedulingPolicy.PRIORITY, SchedulingPolicy.FCFS
SWAP, RECOMPUTE = PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE

NUM_QUICK_RUNS = 25  # for each setting
NUM_LONG_RUNS = 1500

with_policy = pytest.mark.parametrize("policy", [PRIORITY, FCFS], ids=["priority", "fcfs"])
with_tails = pytest.mark.parametrize("tails", [True, False], ids=["tails", "whole"])
with_cache = pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
with_order = pytest.mark.parametrize("order", list(VictimOrder), ids=lambda order: order.value)
with_num_runs = pytest.mark.parametrize(
    "num_runs", [NUM_QUICK_RUNS, pytest.param(NUM_LONG_RUNS, marks=pytest.mark.long)], ids=["quick", "long"]
)


@dataclass
class Crowd:
    """Random requests of some classes that together want more than the pool has, and what became of them."""

    seed: int
    policy: SchedulingPolicy
    classes: tuple[int, ...] = (5,)
    shares_prompts: bool = True
    max_unfinished: int = 14
    options: dict[str, object] = field(default_factory=dict)

    def run(self) -> World:
        """Send, step and drain."""
        rng = random.Random(self.seed)
        size, num_blocks = rng.choice([1, 2, 4]), rng.randint(3, 24)
        options = dict(self.options)
        if "disk_blocks" in options:
            options["disk"] = FaultyDisk(int(str(options["disk_blocks"])), size)
        world = World(
            device_blocks=num_blocks,
            block_size=size,
            seats=rng.randint(2, 8),
            budget=rng.choice([8, 16, 64]),
            policy=self.policy,
            vocab_size=50,
            **options,  # type: ignore[arg-type]
        )
        number = 0
        for _ in range(rng.randint(20, 120)):
            while rng.random() < 0.6 and len(world.scheduler.requests) + len(world._commands) < self.max_unfinished:
                total = rng.randint(2, num_blocks * size)
                num_prompt = rng.randint(1, total)
                first = 1 if self.shares_prompts and rng.random() < 0.5 else 1000 + number
                world.submit(
                    f"r{number}",
                    priority=rng.choice(self.classes),
                    prompt=[first] * num_prompt,
                    max_tokens=max(1, total - num_prompt),
                )
                number += 1
            world.step()
        world.run_until_idle(max_steps=20_000)
        return world


def ends_of(world: World) -> Iterator[tuple[Finished, int]]:
    """Yield how each request ended, and its length (tokens)."""
    for event in world.events:
        if isinstance(event, Finished):
            assert event.reason is FinishReason.LENGTH
            yield event, len(world.specs[event.request_id].prompt_token_ids) + event.num_output_tokens
