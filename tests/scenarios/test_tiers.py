"""Host and disk: where parked KV goes, what makes room for it, and what becomes of a request when a tier fails it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.events import CopyEnded, ParkedMoved
from giveway.core.kv_cache import BlockCopy, CopyDirection
from giveway.core.plan import PreemptionMode, StepPlan, Tier
from giveway.core.request import FinishReason, RequestState
from giveway.runtime.disk_tier import DiskTier
from giveway.runtime.dry.dry_backend import DryBackend
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.faulty_disk import FaultyDisk, Trouble
from tests.world import World, served, victims

SWAP, AUTO = PreemptionChoice.SWAP, PreemptionChoice.AUTO

with_tails = pytest.mark.parametrize("tails", [True, False], ids=["tails", "whole"])
with_cache = pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
overlapped_or_not = pytest.mark.parametrize("overlapped", [True, False], ids=["overlapped", "synchronous"])


def parked_of(world: World, name: str) -> tuple[Tier, int] | None:
    """Where the KV of a request is parked, and how many blocks of it; None: nowhere."""
    parked = world.scheduler.state.kv.parked.get(world.specs[world.request(name).request_id].request_id)
    return None if parked is None else (parked.tier, len(parked.blocks))


def tier_of(plan: StepPlan, victim: str) -> Tier | None:
    """Where a plan parks a victim; None: it recomputes."""
    (cost,) = [preemption.cost for preemption in plan.preemptions if preemption.victim == victim]
    return cost.tier


def recomputed(world: World, name: str) -> int:
    """Tokens that a request which ended well computed again."""
    ended = world.finished(name)
    assert ended.reason is FinishReason.LENGTH
    return ended.num_recomputed_tokens


def delayed(num_steps: int) -> Callable[[BlockCopy], CopyFate]:
    return lambda _: CopyFate(num_steps)


# Room


@with_tails
def test_a_second_tail_of_one_whose_first_fills_the_host_goes_to_the_disk_with_it(tails: bool) -> None:
    # Goal: nothing is computed again while a tier has room. The host has two blocks, which the first tail takes; the
    # disk would hold all of it.
    world = World(device_blocks=6, host_blocks=2, disk_blocks=8, disk=FaultyDisk(8, 4), tails=tails)
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=4)
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=9)
    world.step()
    assert parked_of(world, "low") == ((Tier.HOST, 2) if tails else (Tier.DISK, 4))
    world.run_until_idle()
    assert recomputed(world, "low") == 0
