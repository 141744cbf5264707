"""What giving way costs at most: bounds over random runs, counted in tokens and steps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import pytest

from giveway.core.config import PreemptionChoice, SchedulingPolicy, VictimOrder
from giveway.core.events import Finished, Preempted
from giveway.core.ids import RequestId
from giveway.core.kv_cache import BlockCopy
from giveway.core.request import FinishReason, RequestState
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.faulty_disk import FaultyDisk
from tests.world import World

PRIORITY, FCFS = SchedulingPolicy.PRIORITY, SchedulingPolicy.FCFS
SWAP, RECOMPUTE = PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE

NUM_QUICK_RUNS = 6  # for each setting: every order of victims twice
NUM_LONG_RUNS = 80

with_policy = pytest.mark.parametrize("policy", [PRIORITY, FCFS], ids=["priority", "fcfs"])
with_tails = pytest.mark.parametrize("tails", [True, False], ids=["tails", "whole"])
with_cache = pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
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


# What is computed again


@with_num_runs
@with_cache
@with_tails
@with_policy
def test_its_own_class_makes_nobody_compute_more_than_twice_its_length_again(
    policy: SchedulingPolicy, tails: bool, prefix_caching: bool, num_runs: int
) -> None:
    # Goal: once it has lost its own length to equals, a request gives way to them no more; the loss before that one and
    # the loss that reaches it are at most its length each. (The most that was seen is 1.85 times.)
    for seed in range(num_runs):
        order = list(VictimOrder)[seed % len(VictimOrder)]
        options = {"mode": RECOMPUTE, "tails": tails, "prefix_caching": prefix_caching, "victim_order": order}
        world = Crowd(seed, policy, options=options).run()
        for ended, length in ends_of(world):
            assert ended.num_recomputed_tokens <= 2 * length, f"seed {seed}: {ended}"


@with_num_runs
@with_cache
@with_tails
def test_a_displacement_by_somebody_more_urgent_costs_at_most_the_length_of_the_victim(
    tails: bool, prefix_caching: bool, num_runs: int
) -> None:
    # Goal: beside the twice that its own class may cost, one length for each time that it left its seat for somebody
    # strictly more urgent; what is taken from it later, while it waits, is part of the same displacement.
    for seed in range(num_runs):
        order = list(VictimOrder)[seed % len(VictimOrder)]
        options = {"mode": RECOMPUTE, "tails": tails, "prefix_caching": prefix_caching, "victim_order": order}
        world = Crowd(seed, PRIORITY, classes=(0, 5, 9), options=options).run()
        num_displaced = count_urgent_displacements(world)
        for ended, length in ends_of(world):
            limit = (2 + num_displaced[ended.request_id]) * length
            assert ended.num_recomputed_tokens <= limit, f"seed {seed}: {ended}"


def count_urgent_displacements(world: World) -> Counter[RequestId]:
    """How often each request left its seat for somebody of a strictly more urgent class."""
    specs = world.specs
    return Counter(
        event.request_id
        for event in world.events
        if isinstance(event, Preempted)
        and not event.is_again
        and event.beneficiary is not None
        and specs[event.beneficiary].priority < specs[event.request_id].priority
    )


@with_num_runs
@with_cache
@with_tails
def test_the_most_urgent_class_alone_loses_nothing_to_the_others(
    tails: bool, prefix_caching: bool, num_runs: int
) -> None:
    # Goal: one urgent request at a time among much less urgent work: it is never displaced, and computes nothing twice.
    for seed in range(num_runs):
        rng = random.Random(seed)
        world = World(
            device_blocks=12,
            seats=rng.randint(2, 8),
            mode=RECOMPUTE,
            tails=tails,
            prefix_caching=prefix_caching,
            victim_order=rng.choice(list(VictimOrder)),
        )
        for step in range(40):
            if step % 3 == 0:
                world.submit(f"low{step}", priority=9, prompt_tokens=rng.randint(1, 16), max_tokens=rng.randint(1, 20))
            urgent = f"urgent{step // 10}"
            if step % 10 == 5:
                world.submit(urgent, priority=0, prompt_tokens=rng.randint(1, 40), max_tokens=5)
            world.step()
        world.run_until_idle()
        for number in range(4):
            ended = world.finished(f"urgent{number}")
            assert (ended.num_preemptions, ended.num_recomputed_tokens) == (0, 0)


@with_num_runs
@with_cache
@with_tails
@with_policy
@pytest.mark.parametrize(("host_blocks", "disk_blocks"), [(600, 0), (0, 600)], ids=["host", "disk"])
def test_nothing_is_computed_again_while_the_only_tier_has_room(
    host_blocks: int,
    disk_blocks: int,
    policy: SchedulingPolicy,
    tails: bool,
    prefix_caching: bool,
    num_runs: int,
) -> None:
    check_that_nothing_is_recomputed(host_blocks, disk_blocks, policy, tails, prefix_caching, num_runs)


@with_num_runs
@with_cache
@with_tails
def test_nothing_is_computed_again_while_the_disk_has_room_for_what_the_host_has_none(
    tails: bool, prefix_caching: bool, num_runs: int
) -> None:
    check_that_nothing_is_recomputed(3, 600, PRIORITY, tails, prefix_caching, num_runs)


def check_that_nothing_is_recomputed(
    host_blocks: int, disk_blocks: int, policy: SchedulingPolicy, tails: bool, prefix_caching: bool, num_runs: int
) -> None:
    num_preemptions = 0
    for seed in range(num_runs):
        options: dict[str, object] = {
            "mode": SWAP,
            "tails": tails,
            "prefix_caching": prefix_caching,
            "victim_order": list(VictimOrder)[seed % len(VictimOrder)],
            "host_blocks": host_blocks,
        }
        if disk_blocks:
            options["disk_blocks"] = disk_blocks
        world = Crowd(seed, policy, classes=(0, 5, 9), options=options).run()
        for ended, _ in ends_of(world):
            assert ended.num_recomputed_tokens == 0, f"seed {seed}: {ended}"
            num_preemptions += ended.num_preemptions
    assert num_preemptions > num_runs  # the runs are about something


# How fast seats are filled again


@with_num_runs
@with_cache
@with_tails
@pytest.mark.parametrize("mode", list(PreemptionChoice))
@pytest.mark.parametrize("delay", [None, 0, 3], ids=["synchronous", "overlapped", "late"])
def test_once_the_pressure_is_gone_every_seat_is_filled_in_the_next_step(
    delay: int | None, mode: PreemptionChoice, tails: bool, prefix_caching: bool, num_runs: int
) -> None:
    # Goal: the step after the last urgent request has ended seats everybody, whatever way they gave way, unless their
    # own copy out is still under way; and all of them compute as soon as their copy in has ended.
    for seed in range(num_runs):
        rng = random.Random(seed)
        num_seats = rng.randint(1, 6)
        copies = None if delay is None else delayed(delay)
        world = World(
            device_blocks=num_seats * 8,
            host_blocks=rng.choice([0, 5, 60]),
            seats=num_seats,
            budget=512,
            mode=mode,
            tails=tails,
            prefix_caching=prefix_caching,
            copies=copies,
        )
        names = [f"low{number}" for number in range(num_seats)]
        for name in names:
            world.submit(name, priority=9, prompt_tokens=rng.randint(1, 10), max_tokens=32 - 10)
        world.steps(rng.randint(1, 3))
        for number in range(rng.randint(1, 3)):
            world.submit(
                f"urgent{number}",
                priority=0,
                prompt_tokens=rng.randint(1, 8 * num_seats * 4 - 4),
                max_tokens=rng.randint(1, 4),
            )
        world.step()
        while any(world.specs[name].priority == 0 for name in world.scheduler.requests):
            world.step()
        late = 0 if delay is None else delay
        seated_after = steps_until_all(world, names, SEATED)
        computing_after = seated_after + steps_until_all(world, names, (RequestState.RUNNING,))
        assert seated_after <= 1 + late, f"seed {seed}"
        assert computing_after <= 2 + 2 * late, f"seed {seed}"
        world.run_until_idle()


SEATED = (RequestState.RUNNING, RequestState.SWAPPING_IN)


def delayed(num_steps: int) -> Callable[[BlockCopy], CopyFate]:
    return lambda _: CopyFate(num_steps)


def steps_until_all(world: World, names: list[str], states: Collection[RequestState]) -> int:
    """Go on until all who are unfinished are in one of some states; return the number of steps that it took."""
    count = 0
    while not all(world.is_finished(name) or world.state_of(name) in states for name in names):
        world.step()
        count += 1
    return count
