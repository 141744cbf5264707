"""Benchmarks run, and write what they print; their figures are nobody's test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from giveway.bench.exact import QUICK, Sizes, bench_exact
from giveway.bench.loop import bench_loop
from giveway.bench.measure import sample
from giveway.bench.scheduler import bench_scheduler
from giveway.bench.swap import bench_swap
from giveway.cli.__main__ import main
from giveway.core.errors import ConfigError
from giveway.options import EngineOptions


def test_a_sample_is_its_median_and_half_its_width() -> None:
    found = sample([4.0, 1.0, 2.0])
    assert (found.median, found.low, found.high) == (2.0, 1.0, 4.0)
    assert found.spread_pct == 75.0


def test_the_cost_of_exactness_is_measured_on_both_kinds_of_engine() -> None:
    sizes = Sizes(num_rounds=1, num_steps=4)
    report = bench_exact(EngineOptions(model="tiny", device="cpu"), sizes=sizes)
    assert [row["work"] for row in report.rows] == [
        "decode, batch 1",
        "decode, batch 8",
        "decode, batch 16",
        "prefill of 512",
    ]
    assert all(row["exact_tok_s"] > 0 and row["fast_tok_s"] > 0 for row in report.rows)
    assert "not exact" in report.settings["fast"]
    assert "not exact" not in report.settings["exact"]


def test_the_quick_measure_of_exactness_has_few_enough_tokens_for_slow_cores() -> None:
    # It took two minutes of computing: prompts of 256 tokens for sixteen requests, again in every round.
    report = bench_exact(EngineOptions(model="tiny", device="cpu"), sizes=QUICK)
    assert [row["work"] for row in report.rows] == ["decode, batch 1", "decode, batch 8", "prefill of 128"]
    num_prefilled = sum(QUICK.batches) * QUICK.context_tokens + QUICK.prefill_tokens
    assert num_prefilled * 2 * (1 + QUICK.num_rounds) < 3000


def test_start_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "start.json"
    assert main(["bench", "start", "--model", "tiny", "--quick", "--json", str(target)]) == 0
    content = json.loads(target.read_text())
    assert content["machine"]["cores"] >= 1
    assert content["rows"][0]["start_to_first_token_s"] > 0
    assert content["rows"][0]["start_to_serving_s"] > 0
    assert "start_to_first_token_s" in capsys.readouterr().out


def test_lateness_of_the_event_loop_is_measured_with_an_idle_and_with_a_busy_engine() -> None:
    idle, busy = bench_loop(EngineOptions(model="tiny", device="cpu", num_kv_blocks=256), num_timers=100).rows
    assert (idle["engine"], busy["engine"]) == ("idle", "busy")
    for row in (idle, busy):
        assert row["late_p50_ms"] <= row["late_p90_ms"] <= row["late_p99_ms"] <= row["late_max_ms"]
    assert busy["step_ms"] > 0


def test_the_cost_of_scheduling_has_a_row_for_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench_scheduler(num_rounds=2).rows
    steady = [(row["running"], row["waiting"]) for row in rows if row["operation"] == "steady decode"]
    assert steady == [(running, waiting) for running in (1, 16, 64, 256) for waiting in (0, 100, 10_000)]
    assert all(row.get("median_ns", 1) > 0 and row.get("plan_us", 1) > 0 for row in rows)
    assert {"state change, swap out", "whole path, swap in, 512 blocks"} <= {row["operation"] for row in rows}


def test_swap_bandwidth_is_measured_both_ways_beside_the_peak_and_the_naive_method() -> None:
    report = bench_swap("cpu", num_rounds=2, sizes=(32, 256), num_blocks=64)
    assert [(row["tokens"], row["bytes"]) for row in report.rows] == [(32, 32 * 57344), (256, 256 * 57344)]
    assert all(value > 0 for row in report.rows for value in row.values())
    with pytest.raises(ConfigError, match="device is 'tpu'"):
        bench_swap("tpu")
