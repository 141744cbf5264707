"""Seconds by kind of work: estimated, learned from real steps, read from a file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from giveway.core.cost_profile import SHIPPED, CostProfile, ForwardWork
from giveway.core.errors import ConfigError

PLAIN = CostProfile(step_s=1.0, token_s=0.1, context_s=0.01, copy_s=0.5, slot_out_s=0.02, slot_in_s=0.03)


def test_a_recompute_is_priced_at_the_margin_of_steps_that_run_anyway() -> None:
    # Positions 2 and 3 attend to 3 and 4 positions.
    assert PLAIN.recompute_s(2, 4) == pytest.approx(0.1 * 2 + 0.01 * 7)
    assert PLAIN.recompute_s(4, 4) == 0


def test_a_swap_pays_for_both_ways() -> None:
    assert PLAIN.swap_s(10) == pytest.approx(2 * 0.5 + 10 * 0.05)


def test_the_work_of_a_step_counts_every_position_a_token_attends_to() -> None:
    # Oracle: count pairs one by one.
    spans = [(0, 5), (7, 8), (3, 9)]
    pairs = sum(position + 1 for start, stop in spans for position in range(start, stop))
    assert ForwardWork.of(spans) == ForwardWork(12, pairs)


def test_real_steps_pull_the_profile_to_the_machine_it_runs_on() -> None:
    # Goal: a machine three times slower than shipped is known within a few hundred steps, its prefills too.
    truth = replace(SHIPPED, step_s=SHIPPED.step_s * 3, token_s=SHIPPED.token_s * 3, context_s=SHIPPED.context_s * 3)
    learned = SHIPPED
    for number in range(400):
        spans = [(100, 101)] * 8 if number % 4 else [(0, 256)]
        learned = learned.refined(ForwardWork.of(spans), truth.forward_s(ForwardWork.of(spans)))
    for work in (ForwardWork.of([(100, 101)] * 8), ForwardWork.of([(0, 256)])):
        assert learned.forward_s(work) == pytest.approx(truth.forward_s(work), rel=0.1)


def test_one_stalled_step_does_not_turn_the_profile_over() -> None:
    work = ForwardWork.of([(0, 64)])
    stalled = SHIPPED.refined(work, 1000 * SHIPPED.forward_s(work))
    assert stalled.forward_s(work) < 1.5 * SHIPPED.forward_s(work)
    assert SHIPPED.refined(work, 0.0) == SHIPPED


def test_copies_teach_their_own_direction_only() -> None:
    slower = SHIPPED.with_copies(num_out=100, out_s=1.0, num_in=0, in_s=0.0)
    assert slower.slot_out_s > SHIPPED.slot_out_s
    assert slower.slot_in_s == SHIPPED.slot_in_s


def test_a_profile_survives_its_file() -> None:
    assert CostProfile.from_dict(SHIPPED.as_dict()) == SHIPPED


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step_s": -1.0}, "step_s is -1.0"),
        ({"step_s": float("nan")}, "step_s is nan"),
        ({"step_s": "fast"}, "step_s is 'fast'"),
        ({"step_s": True}, "step_s is True"),
        ({"warp": 1.0}, "warp"),
    ],
)
def test_a_profile_file_that_is_none_is_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CostProfile.from_dict({**SHIPPED.as_dict(), **change})
