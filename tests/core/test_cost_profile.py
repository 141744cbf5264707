"""Seconds by kind of work: estimated, learned from real steps, read from a file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from giveway.core.cost_profile import SHIPPED, CostProfile, ForwardWork
from giveway.core.errors import ConfigError
from giveway.core.kv_cache import CopyDirection, Tier

PLAIN = CostProfile(
    step_s=1.0,
    token_s=0.1,
    context_s=0.01,
    copy_s=0.5,
    slot_out_s=0.02,
    slot_in_s=0.03,
    slot_to_disk_s=0.2,
    slot_from_disk_s=0.4,
)

ROUTES = {
    (CopyDirection.OUT, Tier.HOST): "slot_out_s",
    (CopyDirection.IN, Tier.HOST): "slot_in_s",
    (CopyDirection.OUT, Tier.DISK): "slot_to_disk_s",
    (CopyDirection.IN, Tier.DISK): "slot_from_disk_s",
}


def test_a_recompute_is_priced_at_the_margin_of_steps_that_run_anyway() -> None:
    # Positions 2 and 3 attend to 3 and 4 positions.
    assert PLAIN.recompute_s(2, 4) == pytest.approx(0.1 * 2 + 0.01 * 7)
    assert PLAIN.recompute_s(4, 4) == 0


def test_work_adds_the_same_to_a_step_however_it_is_asked_for() -> None:
    work = ForwardWork.of([(2, 4)])
    assert PLAIN.added_s(work) == pytest.approx(PLAIN.recompute_s(2, 4))
    assert PLAIN.forward_s(work) == pytest.approx(1.0 + PLAIN.added_s(work))


def test_a_swap_pays_for_both_ways_of_its_tier() -> None:
    assert PLAIN.swap_s(Tier.HOST, 10) == pytest.approx(2 * 0.5 + 10 * 0.05)
    assert PLAIN.swap_s(Tier.DISK, 10) == pytest.approx(2 * 0.5 + 10 * 0.6)


@pytest.mark.parametrize(("direction", "tier"), ROUTES)
def test_one_way_costs_the_copy_and_its_slots(direction: CopyDirection, tier: Tier) -> None:
    slot_s: float = getattr(PLAIN, ROUTES[direction, tier])
    assert PLAIN.copy_one_way_s(direction, tier, 10) == pytest.approx(0.5 + 10 * slot_s)
    assert PLAIN.copy_one_way_s(direction, tier, 0) == pytest.approx(0.5)


def test_the_work_of_a_step_counts_every_position_a_token_attends_to() -> None:
    # Oracle: count pairs one by one.
    spans = [(0, 5), (7, 8), (3, 9)]
    pairs = sum(position + 1 for start, stop in spans for position in range(start, stop))
    assert ForwardWork.of(spans) == ForwardWork(12, pairs)


@pytest.mark.parametrize(("direction", "tier"), ROUTES)
def test_a_copy_teaches_its_own_way_only(direction: CopyDirection, tier: Tier) -> None:
    name = ROUTES[direction, tier]
    slower = SHIPPED.with_copy(direction, tier, 100, 1.0)
    assert getattr(slower, name) > getattr(SHIPPED, name)
    assert replace(slower, **{name: getattr(SHIPPED, name)}) == SHIPPED
    faster = SHIPPED.with_copy(direction, tier, 100, 1e-9)
    assert getattr(faster, name) < getattr(SHIPPED, name)


def test_copies_pull_the_profile_to_the_link_they_run_on_and_one_stall_does_not_turn_it_over() -> None:
    truth = replace(PLAIN, slot_in_s=0.15)
    learned = PLAIN
    for _ in range(200):
        actual_s = truth.copy_one_way_s(CopyDirection.IN, Tier.HOST, 100)
        learned = learned.with_copy(CopyDirection.IN, Tier.HOST, 100, actual_s)
    assert learned.slot_in_s == pytest.approx(truth.slot_in_s, rel=0.1)
    assert PLAIN.with_copy(CopyDirection.IN, Tier.HOST, 100, 1e5).slot_in_s < 1.5 * PLAIN.slot_in_s


@pytest.mark.parametrize(("num_slots", "actual_s"), [(0, 1.0), (10, 0.0), (10, -1.0)])
def test_a_copy_of_nothing_or_without_a_time_teaches_nothing(num_slots: int, actual_s: float) -> None:
    assert PLAIN.with_copy(CopyDirection.OUT, Tier.DISK, num_slots, actual_s) == PLAIN


def test_a_profile_survives_its_file() -> None:
    assert CostProfile.from_dict(SHIPPED.as_dict()) == SHIPPED


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step_s": -1.0}, "step_s is -1.0"),
        ({"step_s": float("nan")}, "step_s is nan"),
        ({"step_s": "fast"}, "step_s is 'fast'"),
        ({"step_s": True}, "step_s is True"),
        ({"slot_to_disk_s": 1e7}, "slot_to_disk_s is 10000000.0"),
        ({"warp": 1.0}, "warp"),
    ],
)
def test_a_profile_file_that_is_none_is_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CostProfile.from_dict({**SHIPPED.as_dict(), **change})


def test_a_profile_file_from_before_the_disk_tier_says_what_it_lacks() -> None:
    old = {name: value for name, value in SHIPPED.as_dict().items() if "disk" not in name}
    with pytest.raises(ConfigError, match=r"cost profile: missing: slot_from_disk_s, slot_to_disk_s\. It holds"):
        CostProfile.from_dict(old)
