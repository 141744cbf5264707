"""`giveway verify`: the table, the JSON file and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli


def test_the_table_the_file_and_the_verdict(cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "verify.json"
    result = cli("verify", "--device", "dry", "--num-requests", 6, "--num-tokens", 8, "--json", target)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].strip() == "Preempted against undisturbed: dry run on dry run: no weights, every KV slot checked"
    row = next(line for line in lines if line.startswith("│ swap, tails"))
    assert "host tail" in row
    assert "6/6" in row
    assert "as promised" in row
    assert lines[-1].endswith("times somebody gave way.")
    content = json.loads(target.read_text())
    assert set(content) == {"machine", "settings", "is_as_promised", "rows"}
    assert content["is_as_promised"] is True
    assert len(content["settings"]["requests"]) == 6
    assert all(row["answers_equal"] == row["answers"] and not row["problems"] for row in content["rows"])


def test_a_mode_that_shows_nothing_makes_the_exit_code_1(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("giveway.verify.run._SHARE_OF_SCARCE_POOL_PCT", 100)
    result = cli("verify", "--device", "dry", "--num-requests", 6)
    assert result.code == 1
    assert "FAILED" in result.out
    assert "swap, tails: there was no host tail, so this mode has shown nothing" in result.out
    assert "modes failed" in result.out.splitlines()[-1]


def test_what_is_too_small_is_a_message(cli: Cli) -> None:
    result = cli("verify", "--device", "dry", "--num-tokens", 2)
    assert result.code == 1
    assert result.err.startswith("error: 16 requests of 2 output tokens: at least 6 of 4 are needed")


def test_a_result_file_that_cannot_be_written_is_refused_before_the_work(cli: Cli, tmp_path: Path) -> None:
    result = cli("verify", "--device", "dry", "--json", tmp_path / "absent" / "verify.json")
    assert (result.code, result.out) == (1, "")
    assert "Name another file with --json." in result.err
