"""The bench of what priorities cost compares like with like; its figures are nobody's test."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from giveway.bench import overhead
from giveway.bench.instant_executor import InstantExecutor
from giveway.bench.overhead import CLASSES, Lab, Load, bench_overhead, is_within_spread
from giveway.cli.__main__ import main
from giveway.core.config import SchedulingPolicy
from giveway.core.errors import InvariantError
from giveway.core.plan import StepPlan
from giveway.core.planner import plan_step
from giveway.core.state import SchedulerState
from giveway.options import EngineOptions
from giveway.runtime.dry.dry_backend import DryBackend

SMALL = Load(num_requests=5, steps_between=2, prompt_tokens=9, output_tokens=6)


def test_both_planners_give_the_same_tokens_in_the_same_steps() -> None:
    lab = Lab.on_backend(DryBackend(), SMALL)
    off, on = lab.run(priorities=False), lab.run(priorities=True)
    assert off.tokens == on.tokens
    assert [len(tokens) for tokens in off.tokens.values()] == [6] * 5
    assert len(off.scheduling_s) == len(on.scheduling_s) == 4 * 2 + 6


def test_with_priorities_requests_of_several_classes_are_ranked_and_without_them_only_arrival_counts() -> None:
    assert len(set(CLASSES)) > 2
    lab = Lab(InstantExecutor(), SMALL)
    policies = [lab.make_scheduler(priorities=on).state.config.policy for on in (False, True)]
    assert policies == [SchedulingPolicy.NONE, SchedulingPolicy.PRIORITY]


def test_two_sides_that_do_not_do_the_same_work_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    # Goal: a baseline that is slower for another reason than priorities is a bug of the bench, and told.
    def idle_once(state: SchedulerState) -> StepPlan:
        return plan_step(state) if state.next_step_id != 10 else StepPlan(state.next_step_id, state.version)

    monkeypatch.setattr(overhead, "plan_in_arrival_order", idle_once)
    with pytest.raises(InvariantError, match="14 steps with priorities, 15 without"):
        bench_overhead(EngineOptions(device="dry"), num_rounds=1, scheduler_load=SMALL)


def test_every_row_has_both_speeds_and_says_whether_they_differ_more_than_they_scatter() -> None:
    options = EngineOptions(model="tiny", device="cpu")
    rows = bench_overhead(options, num_rounds=2, model_load=SMALL, scheduler_load=SMALL).rows
    assert [row["backend"] for row in rows] == ["tiny", "dry run", "no model"]
    for row in rows:
        assert min(row["off_tok_s"], row["on_tok_s"], row["off_us"], row["on_us"]) > 0
        is_known = row["backend"] == "no model"  # ten times as many rounds
        assert (row["within_spread"] in ("yes", "no")) is is_known


def test_a_difference_is_judged_by_its_spread_and_only_after_enough_rounds() -> None:
    assert is_within_spread(-1.5, 2.0, 7) == "yes"
    assert is_within_spread(-2.5, 2.0, 7) == "no"
    assert is_within_spread(22.0, 4.0, 2) == "unknown below 7 rounds"


def test_the_command_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "bench_overhead", partial(bench_overhead, scheduler_load=SMALL))
    target = tmp_path / "overhead.json"
    assert main(["bench", "overhead", "--device", "dry", "--quick", "--json", str(target)]) == 0
    content = json.loads(target.read_text())
    assert set(content) == {"machine", "settings", "rows"}
    assert [row["backend"] for row in content["rows"]] == ["dry run", "no model"]
    assert "within_spread" in capsys.readouterr().out
