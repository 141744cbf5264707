"""Urgent arrivals during a background prefill: every kind of engine sees as many as were asked for."""

from __future__ import annotations

from giveway.bench.pace import bench_pace
from giveway.options import EngineOptions


def test_both_kinds_of_engine_see_urgent_arrivals_during_a_background_prefill() -> None:
    # Goal: the benchmark ends, also where the whole background prompt is one step, and has a figure in each column.
    report = bench_pace(EngineOptions(model="tiny", device="cpu"), num_arrivals=2, background_tokens=200)
    assert [row["target"] for row in report.rows] == ["default", "none"]
    for row in report.rows:
        assert 0 < row["ttft_p50_s"] <= row["ttft_max_s"]
        assert row["background_s"] > 0
        assert row["background_prompts"] >= 1
    # What differs is the length of background chunks: counted, not timed.
    default, without = report.rows
    assert 0 < default["longest_chunk"] <= without["longest_chunk"] == 200  # how long depends on learned seconds
