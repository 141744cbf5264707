"""Recompute or swap by length: the table has a row for each, lines cross where the numbers say so, auto follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from giveway.bench.crossover import DRY_TOKENS, PROFILES, bench_crossover
from giveway.cli.__main__ import main
from giveway.options import EngineOptions


def test_auto_follows_the_cheaper_way_on_hardware_that_is_described_by_a_profile() -> None:
    # Goal: behind 25 GB/s swapping always wins; behind 1 GB/s recomputing does up to some hundred tokens; and what
    # auto costs is within a tenth of the cheaper one. Nothing here depends on this machine's speed.
    report = bench_crossover(
        EngineOptions(model="tiny", device="cpu"), real_tokens=(32, 96), dry_tokens=DRY_TOKENS[:5], num_rounds=1
    )
    priced = [row for row in report.rows if row["profile"] in PROFILES]
    assert [row["tokens"] for row in priced] == [*DRY_TOKENS[:5]] * 4
    for row in priced:
        assert row["auto_s"] <= 1.1 * min(row["recompute_s"], row["swap_s"])
        assert row["auto_mode"] == ("swap" if row["swap_s"] < row["recompute_s"] else "recompute")
    modes: dict[tuple[str, str], list[str]] = {(name, tier): [] for name in PROFILES for tier in ("host", "disk")}
    for row in priced:
        modes[row["profile"], row["tier"]].append(row["auto_mode"])
    assert set(modes["7B, PCIe 4", "host"]) == set(modes["7B, PCIe 4", "disk"]) == {"swap"}
    assert modes["7B, 1 GB/s", "host"] == ["recompute"] * 3 + ["swap"] * 2
    assert set(modes["7B, 1 GB/s", "disk"]) == {"recompute"}
    assert "7B, 1 GB/s, host: recompute, swap from 512" in report.settings["crossings"]


def test_a_real_resident_gives_way_to_both_tiers() -> None:
    report = bench_crossover(
        EngineOptions(model="tiny", device="cpu"), real_tokens=(32, 96), dry_tokens=(64,), num_rounds=1
    )
    measured = [row for row in report.rows if row["profile"] == "tiny"]
    assert [(row["tier"], row["tokens"]) for row in measured] == [
        ("host", 32),
        ("host", 96),
        ("disk", 32),
        ("disk", 96),
    ]
    assert all(row["swap_s"] > 0 for row in measured)


def test_the_command_writes_the_rows_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "crossover.json"
    assert main(["bench", "crossover", "--model", "tiny", "--quick", "--json", str(target)]) == 0
    rows = json.loads(target.read_text())["rows"]
    assert {"profile", "tier", "tokens", "recompute_s", "swap_s", "auto_s", "auto_mode"} == set(rows[0])
    assert "auto_mode" in capsys.readouterr().out
