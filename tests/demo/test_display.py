"""How the demo looks, in a terminal and in a pipe."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from giveway.bench.measure import describe_machine
from giveway.demo.display import LiveDisplay, PlainDisplay, make_display
from giveway.demo.show import run_demo
from giveway.demo.workload import urgent_among_background, write_up
from giveway.options import EngineOptions

DRY = EngineOptions(device="dry")


def test_off_a_terminal_each_run_is_one_line() -> None:
    out = io.StringIO()
    display = make_display(out)
    assert isinstance(display, PlainDisplay)
    result = run_demo(DRY, urgent_among_background, display)
    first, *runs, last = out.getvalue().splitlines()
    assert first.startswith("8 background stories, 3 urgent questions on dry run")
    assert [line.split(";")[0] for line in runs] == [row.title for row in result.rows]
    assert "error: KV cache full: used" in runs[0]
    assert all("answers equal 11/11" in line for line in runs[1:])
    assert last.startswith("Without preemption the pool ran full and 11 of 11 requests were lost")


def test_in_a_terminal_the_pool_is_seen_and_the_table_fits_into_80_columns() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None, legacy_windows=False)
    result = run_demo(DRY, urgent_among_background, LiveDisplay(console))
    assert result.is_as_promised
    text = out.getvalue()
    assert "KV pool, " in text
    assert "running" in text
    assert "story-8 starts" in text
    table = text[text.index("urgent TTFT") :]
    for word in ("background", "preempted", "recompute ", "answers", "swap ", "11/11", "0/11"):
        assert word in table
    assert "…" not in table


def test_a_fault_is_marked_in_the_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None, legacy_windows=False)
    display = LiveDisplay(console)
    result = run_demo(DRY, write_up, display)
    out.truncate(0)
    display.end_run(replace(result.rows[1], answers_equal=7))
    assert "not as promised" in out.getvalue()


def test_the_machine_is_described_by_its_kind(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name : Some CPU @ 3 GHz\nmodel name : second\n")
    machine = describe_machine(cpuinfo)
    assert machine["cpu"] == "Some CPU @ 3 GHz"
    assert machine["cores"] >= 1
    assert set(machine) == {"cpu", "cores", "architecture", "python", "torch", "giveway"}
    assert describe_machine(tmp_path / "absent")["cpu"] == machine["architecture"]
