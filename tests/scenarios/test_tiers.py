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
from tests.world import World

SWAP, AUTO = PreemptionChoice.SWAP, PreemptionChoice.AUTO

with_tails = pytest.mark.parametrize("tails", [True, False], ids=["tails", "whole"])
with_cache = pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
overlapped_or_not = pytest.mark.parametrize("overlapped", [True, False], ids=["overlapped", "synchronous"])

PREFIX_CACHE = (False,)  # blocks on each tier are counted one by one here


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


def park_low_then_push_mid_out(world: World, *, mid: int = 5, low: int = 9) -> StepPlan:
    """`low` is parked whole (three blocks); then `mid`, as large, has to go too. Returns the plan of that step."""
    world.make_resident("low", priority=low, prompt_tokens=11, max_tokens=4)
    world.give_way("low", SWAP)
    world.submit("top", priority=0, prompt_tokens=31, max_tokens=1)
    world.step()
    assert parked_of(world, "low") is not None
    world.make_resident("mid", priority=mid, prompt_tokens=11, max_tokens=4)
    world.submit("urgent", priority=0, prompt_tokens=31, max_tokens=1)
    return world.step()


@with_tails
def test_a_full_host_is_cleared_of_lower_ranked_kv_which_comes_back_from_the_disk(tmp_path: Path, tails: bool) -> None:
    # Goal: "low" moves on to the file so that "mid" finds room on the host; both come back without computing anything
    # again, each from its tier.
    world = World(device_blocks=8, host_blocks=3, disk_blocks=3, disk_dir=tmp_path, tails=tails)
    plan = park_low_then_push_mid_out(world)
    assert [(move.request_id, len(move.host_blocks)) for move in plan.moves] == [("low", 3)]
    assert (parked_of(world, "mid"), parked_of(world, "low")) == ((Tier.HOST, 3), (Tier.DISK, 3))
    world.run_until_idle()
    assert (recomputed(world, "mid"), recomputed(world, "low")) == (0, 0)
    back = {event.request_id: event.tier for event in world.events if isinstance(event, CopyEnded) and is_in(event)}
    assert back == {"mid": Tier.HOST, "low": Tier.DISK}


def is_in(event: CopyEnded) -> bool:
    return event.direction is CopyDirection.IN and not event.failed


@with_tails
@pytest.mark.parametrize(
    ("mid", "low", "dropped", "mid_tier"),
    [(5, 9, ("low",), Tier.HOST), (9, 9, (), None), (9, 5, (), None)],
    ids=["less urgent", "equal", "more urgent"],
)
def test_with_a_full_disk_only_strictly_less_urgent_kv_is_dropped_and_otherwise_the_victim_computes_again(
    tmp_path: Path, mid: int, low: int, dropped: tuple[str, ...], mid_tier: Tier | None, tails: bool
) -> None:
    # Goal: "last" fills the disk and "low" the host when "mid" has to go.
    world = World(device_blocks=8, host_blocks=3, disk_blocks=5, disk_dir=tmp_path, tails=tails)
    world.make_resident("last", priority=20, prompt_tokens=19, max_tokens=4)
    world.give_way("last", SWAP)
    world.submit("whole", priority=0, prompt_tokens=31, max_tokens=1)
    world.step()
    assert parked_of(world, "last") == (Tier.DISK, 5)
    plan = park_low_then_push_mid_out(world, mid=mid, low=low)
    assert (plan.dropped, plan.moves) == (dropped, ())
    assert tier_of(plan, "mid") is mid_tier
    assert parked_of(world, "low") == (None if dropped else (Tier.HOST, 3))
    world.run_until_idle()
    assert recomputed(world, "last") == 0
    assert (recomputed(world, "low"), recomputed(world, "mid")) == ((11, 0) if dropped else (0, 11))


@with_tails
@with_cache
@pytest.mark.parametrize("host_blocks", [0, 1])
def test_kv_that_only_the_disk_has_room_for_comes_back_whole(
    tmp_path: Path, host_blocks: int, prefix_caching: bool, tails: bool
) -> None:
    world = World(
        device_blocks=6,
        host_blocks=host_blocks,
        disk_blocks=4,
        disk_dir=tmp_path,
        tails=tails,
        prefix_caching=prefix_caching,
    )
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=6)
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=1)
    plan = world.step()
    assert tier_of(plan, "low") is Tier.DISK
    assert parked_of(world, "low") == (Tier.DISK, 2 if tails else 4)
    world.run_until_idle()
    assert recomputed(world, "low") == 0
    (back,) = [event for event in world.events_of("low", CopyEnded) if is_in(event)]
    assert (back.tier, back.num_blocks) == (Tier.DISK, 2 if tails else 4)


# Faults of the file


def file_of(world: World) -> str:
    """The file behind the disk tier; it has no name of its own."""
    assert world.disk is not None
    return f"/proc/self/fd/{world.disk._descriptor}"


def flip_a_byte(world: World) -> None:
    """Change one byte of every block."""
    disk = world.disk
    assert disk is not None
    with open(file_of(world), "r+b", buffering=0) as file:
        for block in range(disk.num_blocks):
            place = block * disk._slot_bytes + disk.block_bytes - 1
            old = os.pread(file.fileno(), 1, place)
            os.pwrite(file.fileno(), bytes([old[0] ^ 0x40]), place)


def cut_off(world: World) -> None:
    """Leave nothing of the file."""
    os.truncate(file_of(world), 0)


@overlapped_or_not
@with_tails
@with_cache
@pytest.mark.parametrize("harm", [flip_a_byte, cut_off])
def test_harm_to_the_file_makes_its_request_compute_again_and_is_no_error(
    tmp_path: Path, harm: Callable[[World], None], prefix_caching: bool, tails: bool, overlapped: bool
) -> None:
    # Goal: what cannot be read back right is not read back at all. The tokens are those of an undisturbed run (which is
    # checked for every token), nobody sees an error, and the disk is used again afterwards.
    world = World(
        device_blocks=6,
        disk_blocks=4,
        disk_dir=tmp_path,
        tails=tails,
        prefix_caching=prefix_caching,
        copies=delayed(1) if overlapped else None,
    )
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=6)
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=4)
    while parked_of_or_none(world, "low") is None or world.state_of("low") is not RequestState.SWAPPED:
        world.step()
    harm(world)
    world.run_until_idle()
    (back,) = [event for event in world.events_of("low", CopyEnded) if event.direction is CopyDirection.IN]
    assert (back.tier, back.failed) == (Tier.DISK, True)
    assert 0 < recomputed(world, "low") <= 16
    assert world.finished("urgent").reason is FinishReason.LENGTH
    os.truncate(file_of(world), world.disk.num_bytes if world.disk else 0)
    world.submit("next", priority=9, prompt_tokens=15, max_tokens=6)
    world.step()
    world.submit("urgent2", priority=0, prompt_tokens=15, max_tokens=4)
    world.run_until_idle()
    assert recomputed(world, "next") == 0


def parked_of_or_none(world: World, name: str) -> tuple[Tier, int] | None:
    return None if world.is_finished(name) else parked_of(world, name)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for a few pages."""
    directory = tmp_path / "small"
    directory.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "giveway-test", str(directory)], capture_output=True, text=True
        )
    except OSError as error:
        pytest.skip(f"mount cannot be run: {error}")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


@overlapped_or_not
@with_tails
def test_a_file_system_that_is_full_makes_the_victim_compute_again_and_is_no_error(
    small_tmpfs: Path, tails: bool, overlapped: bool
) -> None:
    # Goal: the file was not preallocated, somebody else has filled the file system, and the write fails half-way.
    size_of_block = DryBackend().block_bytes * 4
    disk = DiskTier(small_tmpfs, num_blocks=8, block_bytes=size_of_block, preallocate=False)
    world = World(device_blocks=6, disk_blocks=8, disk=disk, tails=tails, copies=delayed(1) if overlapped else None)
    (small_tmpfs / "other").write_bytes(b"x" * (60 << 10))
    world.make_resident("low", priority=9, prompt_tokens=15, max_tokens=6)
    world.submit("urgent", priority=0, prompt_tokens=15, max_tokens=2)
    assert tier_of(world.step(), "low") is Tier.DISK
    world.run_until_idle()
    assert recomputed(world, "low") > 0
    assert world.finished("urgent").reason is FinishReason.LENGTH
    assert world.scheduler.state.num_disk_failures == 1
    (small_tmpfs / "other").unlink()
    world.make_resident("next", priority=9, prompt_tokens=15, max_tokens=6)
    world.submit("urgent2", priority=0, prompt_tokens=15, max_tokens=2)
    world.run_until_idle()
    assert recomputed(world, "next") == 0
    assert world.scheduler.state.num_disk_failures == 0
    disk.close()


# Faults on order


def displace(world: World, number: int) -> PreemptionMode:
    """A request gives way and both end; how it gave way."""
    low = f"low{number}"
    world.make_resident(low, priority=9, prompt_tokens=15, max_tokens=4)
    world.submit(f"urgent{number}", priority=0, prompt_tokens=15, max_tokens=1)
    (preemption,) = world.step().preemptions
    world.run_until_idle()
    assert world.finished(low).reason is FinishReason.LENGTH
    return preemption.mode


@overlapped_or_not
@with_tails
@pytest.mark.parametrize("trouble", [Trouble.FULL, Trouble.HALF_WRITTEN])
def test_after_three_failed_writes_in_a_row_the_disk_is_left_alone(
    trouble: Trouble, tails: bool, overlapped: bool
) -> None:
    # Goal: two failures and a success begin the count anew; three in a row end the use of the disk for good.
    disk = FaultyDisk(8, 4)
    world = World(device_blocks=6, disk_blocks=8, disk=disk, tails=tails, copies=delayed(1) if overlapped else None)
    modes = []
    for number, now in enumerate([trouble, trouble, Trouble.NONE, trouble, trouble, trouble, trouble, Trouble.NONE]):
        disk.trouble = now
        modes.append(displace(world, number))
    assert modes == [PreemptionMode.SWAP] * 6 + [PreemptionMode.RECOMPUTE] * 2
    assert disk.num_faults == 5


@overlapped_or_not
@with_tails
def test_reads_that_fail_make_their_requests_compute_again_and_are_not_held_against_the_disk(
    tails: bool, overlapped: bool
) -> None:
    # Goal: a read that fails costs one request its KV; writes go on as before, however often that happens.
    disk = FaultyDisk(8, 4)
    disk.trouble = Trouble.UNREADABLE
    world = World(device_blocks=6, disk_blocks=8, disk=disk, tails=tails, copies=delayed(1) if overlapped else None)
    assert [displace(world, number) for number in range(5)] == [PreemptionMode.SWAP] * 5
    assert disk.num_faults == 5
    assert world.scheduler.state.num_disk_failures == 0


@with_tails
def test_a_move_to_the_disk_that_fails_costs_only_the_one_that_was_to_move(tails: bool) -> None:
    # Goal: "mid" has its place on the host all the same; "low" computes again; the write counts as failed.
    disk = FaultyDisk(8, 4)
    world = World(device_blocks=8, host_blocks=3, disk_blocks=8, disk=disk, tails=tails)
    disk.trouble = Trouble.FULL
    plan = park_low_then_push_mid_out(world)
    assert [move.request_id for move in plan.moves] == ["low"]
    assert [event.tier for event in world.events_of("low", ParkedMoved)] == [None]
    assert parked_of(world, "mid") == (Tier.HOST, 3)
    assert world.state_of("low") is RequestState.PREEMPTED
    assert world.scheduler.state.num_disk_failures == 1
    world.run_until_idle()
    assert (recomputed(world, "mid"), recomputed(world, "low")) == (0, 11)


@pytest.mark.parametrize("trouble", list(Trouble))
def test_a_crowd_on_a_disk_in_trouble_sees_no_error(trouble: Trouble) -> None:
    # Goal: whatever the disk does, every request ends with its own tokens.
    disk = FaultyDisk(20, 4)
    world = World(device_blocks=10, host_blocks=3, disk_blocks=20, disk=disk, tails=True, prefix_caching=True, seats=4)
    for number in range(30):
        world.submit(f"r{number}", priority=(0, 5, 9)[number % 3], prompt_tokens=3 + number % 9, max_tokens=12)
        world.step()
        disk.trouble = trouble if number % 3 else Trouble.NONE
    world.run_until_idle()
    assert all(world.finished(f"r{number}").reason is FinishReason.LENGTH for number in range(30))
