"""Three hundred thousand steps of random work and random faults, and everything is back where it was at the end."""

from __future__ import annotations

import logging
import os
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from giveway.core.config import PreemptionChoice, SchedulingPolicy, VictimOrder
from giveway.core.cost_profile import SHIPPED
from giveway.core.events import Finished, Preempted
from giveway.core.ids import RequestId
from giveway.core.kv_cache import BlockCopy
from giveway.core.plan import PreemptionMode, Tier
from giveway.core.request import FinishReason
from giveway.core.sampling import SamplingParams
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.world import World

MAX_UNFINISHED = 12
VOCABULARY = 50


@dataclass(frozen=True)
class Setting:
    """One soak."""

    seed: int
    num_steps: int
    device_blocks: int = 24
    block_size: int = 4
    seats: int = 6
    budget: int = 24
    policy: SchedulingPolicy = SchedulingPolicy.PRIORITY
    mode: PreemptionChoice = PreemptionChoice.SWAP
    order: VictimOrder | None = None
    tails: bool = True
    prefix_caching: bool = True
    overlapped: bool = True
    host_blocks: int = 20
    has_disk: bool = False
    disk_price: float = 1.0  # times what the shipped profile says
    aging_s: float | None = None
    share_of_groups: float = 0.0  # of arrivals that ask for several answers
    salts: tuple[bytes, ...] = (b"",)

    def make_world(self, directory: Path, rng: random.Random) -> World:
        def fate_of(copy: BlockCopy) -> CopyFate:
            return CopyFate(delay_steps=rng.choice([0, 0, 1, 4]), fails=rng.random() < 0.05)

        return World(
            device_blocks=self.device_blocks,
            block_size=self.block_size,
            host_blocks=self.host_blocks,
            seats=self.seats,
            budget=self.budget,
            policy=self.policy,
            mode=self.mode,
            victim_order=self.order,
            tails=self.tails,
            prefix_caching=self.prefix_caching,
            copies=fate_of if self.overlapped else None,
            aging_s=self.aging_s,
            disk_blocks=self.device_blocks + 6 if self.has_disk else 0,
            disk_dir=directory if self.has_disk else None,
            costs=replace(
                SHIPPED,
                slot_to_disk_s=SHIPPED.slot_to_disk_s * self.disk_price,
                slot_from_disk_s=SHIPPED.slot_from_disk_s * self.disk_price,
            ),
            vocab_size=VOCABULARY,
        )


class Soak:
    """A world under random work, and counts of what happened in it. What has ended is forgotten as it goes."""

    def __init__(self, setting: Setting, directory: Path) -> None:
        self.setting = setting
        self.rng = random.Random(setting.seed)
        self.world = setting.make_world(directory, self.rng)
        self.half_a_pool = setting.device_blocks * setting.block_size // 2  # tokens
        self.num_sent = 0
        self.reasons = dict.fromkeys(FinishReason, 0)
        self.modes = dict.fromkeys(PreemptionMode, 0)
        self.num_to_disk = 0
        self.num_harms = 0

    def run(self) -> None:
        """Go on for all steps, and drain."""
        for step in range(self.setting.num_steps):
            self._send(step)
            self._disturb()
            self.world.step()
            self._forget()
        self.world.let_go_all()
        while self.world._commands or self.world.scheduler.has_work:
            self.world.step()
            self._forget()
        self.world.run_until_idle()

    def _send(self, step: int) -> None:
        rng, world = self.rng, self.world
        if rng.random() >= 0.4 or len(world.scheduler.requests) >= MAX_UNFINISHED - 2:
            return
        count = rng.choice([2, 3]) if rng.random() < self.setting.share_of_groups else 1
        first, priority, salt = f"r{step}", rng.choice([0, 5, 10]), rng.choice(self.setting.salts)
        prompt = [1] * rng.randint(1, min(30, self.half_a_pool - 1)) + [rng.randint(1, 3)]
        for number in range(count):
            name = f"{first}/{number}" if number else first
            world.submit(
                name,
                priority=priority,
                prompt=prompt,
                max_tokens=rng.randint(1, min(20, self.half_a_pool)),
                sampling=SamplingParams(temperature=rng.choice([0.0, 0.8]), logprobs=rng.choice([None, None, 1])),
                seed=step + number,
                stop_token_ids=frozenset({3, 33}) if rng.random() < 0.1 else frozenset(),
                branch_of=first if count > 1 else None,
                salt=salt,
            )
            self.num_sent += 1
            if rng.random() < 0.01:
                world.backend.poison[name] = rng.randint(0, 40)
            if rng.random() < 0.01:
                world.backend.faults[name] = rng.randint(0, 40)

    def _disturb(self) -> None:
        rng, world = self.rng, self.world
        unfinished = list(world.scheduler.requests)
        if unfinished and rng.random() < 0.1:
            world.give_way(rng.choice(unfinished), rng.choice(list(PreemptionChoice)))
        if unfinished and rng.random() < 0.02:
            world.abort(rng.choice(unfinished))
        if unfinished and rng.random() < 0.03:
            world.hold(rng.choice(unfinished))
        for name in sorted(world.scheduler.state.held):
            if rng.random() < 0.1:
                world.let_go(name)
        if rng.random() < 0.005:
            world.backend.fails_next = True
        if world.disk is not None and rng.random() < 0.02:
            self._harm_the_file()

    def _harm_the_file(self) -> None:
        """Flip a byte somewhere, or cut the file off at some place; it has its length again at once, as zeros."""
        disk = self.world.disk
        assert disk is not None
        self.num_harms += 1
        place = self.rng.randrange(disk.num_bytes)
        path = f"/proc/self/fd/{disk._descriptor}"
        if self.rng.random() < 0.2:
            os.truncate(path, place)
            if self.rng.random() < 0.8:  # else it stays short until somebody writes behind its end
                os.truncate(path, disk.num_bytes)
            return
        with open(path, "r+b", buffering=0) as file:
            old = os.pread(file.fileno(), 1, place) or b"\0"
            os.pwrite(file.fileno(), bytes([old[0] ^ (1 << self.rng.randrange(8))]), place)

    def _forget(self) -> None:
        """Count what has happened, and let go of plans, events and whatever belongs to requests that have ended."""
        world = self.world
        for event in world.events:
            if isinstance(event, Finished):
                self.reasons[event.reason] += 1
                self._forget_request(event.request_id)
            elif isinstance(event, Preempted):
                self.modes[event.mode] += 1
                self.num_to_disk += event.tier is Tier.DISK
        world.events.clear()
        world.plans.clear()
        world.backend.samples.clear()

    def _forget_request(self, name: RequestId) -> None:
        world = self.world
        checks = world.checks
        for known in (world.tokens, world.specs, checks._calm, checks._num_tokens, checks._num_scored):
            del known[name]
        world.backend.poison.pop(name, None)
        world.backend.faults.pop(name, None)


SETTINGS = {
    "host, overlapped": Setting(1, 40_000),
    "host and disk, overlapped": Setting(
        2, 30_000, host_blocks=6, has_disk=True, share_of_groups=0.2, salts=(b"", b"tenant")
    ),
    "host and disk, synchronous, aging": Setting(
        3, 30_000, overlapped=False, host_blocks=6, has_disk=True, aging_s=15.0, order=VictimOrder.LEAST_WORK
    ),
    "disk, cheaper than computing": Setting(
        4, 20_000, mode=PreemptionChoice.AUTO, host_blocks=0, has_disk=True, disk_price=0.01, prefix_caching=False
    ),
    "first come, first served": Setting(
        5, 20_000, policy=SchedulingPolicy.FCFS, share_of_groups=0.3, overlapped=False, salts=(b"", b"tenant")
    ),
    "several answers, no cache": Setting(6, 20_000, prefix_caching=False, share_of_groups=0.6, aging_s=20.0),
    "recompute, whole": Setting(
        7, 20_000, mode=PreemptionChoice.RECOMPUTE, tails=False, host_blocks=0, overlapped=False, share_of_groups=0.1
    ),
    "whole, host and disk": Setting(
        8, 25_000, tails=False, host_blocks=6, has_disk=True, order=VictimOrder.NEWEST, share_of_groups=0.1
    ),
    "tiny pool, blocks of one token": Setting(
        9,
        40_000,
        device_blocks=10,
        block_size=1,
        seats=3,
        budget=3,
        overlapped=False,
        prefix_caching=False,
        host_blocks=2,
        has_disk=True,
        aging_s=30.0,
        share_of_groups=0.3,
    ),
    "tiny pool, little host": Setting(
        10,
        40_000,
        device_blocks=8,
        block_size=2,
        seats=4,
        budget=8,
        host_blocks=3,
        order=VictimOrder.LEAST_WORK,
        share_of_groups=0.3,
    ),
    "tiny pool, little disk": Setting(
        11,
        40_000,
        device_blocks=9,
        block_size=3,
        seats=4,
        budget=5,
        host_blocks=1,
        has_disk=True,
        mode=PreemptionChoice.AUTO,
        disk_price=0.1,
        share_of_groups=0.2,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_long_run_with_faults_leaks_nothing(
    setting: Setting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Goal: blocks of all tiers, hash chains and requests are gone at the end; late, failed and aborted copies included.
    caplog.set_level(logging.CRITICAL, logger="giveway")  # every fault is told in the log
    check_soak(setting, tmp_path)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_short_run_with_faults_leaks_nothing(setting: Setting, tmp_path: Path) -> None:
    check_soak(replace(setting, seed=setting.seed + 100, num_steps=400), tmp_path)


def check_soak(setting: Setting, directory: Path) -> None:
    soak = Soak(setting, directory)
    soak.run()
    assert sum(soak.reasons.values()) == soak.num_sent > setting.num_steps / 10
    assert soak.reasons[FinishReason.LENGTH] + soak.reasons[FinishReason.STOP] > 0.8 * soak.num_sent
    assert (soak.num_to_disk > 0) == (soak.num_harms > 0) == setting.has_disk
    assert not soak.world.tokens
    state = soak.world.scheduler.state
    assert not state.kv.copies
    assert not state.copy_started_s
    assert not state.awaited_copies
    assert not state.suspects
    assert not state.forced
    for tier in Tier:
        assert state.kv.pool_of(tier).num_owned == 0
    assert state.kv.device.num_owned == 0
    assert not state.branches
