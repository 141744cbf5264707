"""`giveway demo`: the JSON it writes and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from giveway.demo import report
from tests.cli.conftest import Cli

ROW_NAMES = {
    "policy",
    "finished",
    "total",
    "answers_equal",
    "urgent_ttft_p50_s",
    "urgent_ttft_max_s",
    "background_tok_s",
    "preemptions",
    "recomputed_tokens",
    "swapped_bytes",
    "error",
}


def test_the_demo_on_the_real_model(tmp_path: Path) -> None:
    # Goal: with real weights, priorities preempt in both modes and every answer is the undisturbed one. In a process
    # of its own because of the number of threads; one, so that a busy machine does not make it wait for the other.
    target = tmp_path / "demo.json"
    command = [sys.executable, "-m", "giveway", "demo", "--device", "cpu", "--num-threads", "1", "--json", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    content = json.loads(target.read_text())
    assert set(content) == {"machine", "settings", "rows"}
    assert content["settings"]["num_kv_blocks"] < content["settings"]["num_kv_blocks_undisturbed"]
    rows = {row["policy"]: row for row in content["rows"]}
    assert list(rows) == ["none", "fcfs", "priority-recompute", "priority-swap"]
    assert all(set(row) == ROW_NAMES for row in rows.values())
    lost = rows.pop("none")
    assert lost["finished"] < lost["total"] == 11
    assert lost["error"].startswith("KV cache full: used ")
    assert lost["background_tok_s"] is None
    for row in rows.values():
        assert (row["finished"], row["answers_equal"], row["error"]) == (11, 11, None)
        assert 0 < row["urgent_ttft_p50_s"] <= row["urgent_ttft_max_s"]
        assert row["background_tok_s"] > 0
    assert rows["priority-recompute"]["preemptions"]["recompute"] > 0
    assert rows["priority-recompute"]["recomputed_tokens"] > 0
    assert rows["priority-swap"]["preemptions"]["swap"] > 0
    assert rows["priority-swap"]["swapped_bytes"] > 0
    assert len(result.stdout.splitlines()) == 6  # what runs, one line a run, the closing sentence


@pytest.fixture
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("one_thread")
def test_the_write_up_runs_on_the_tiny_model(cli: Cli, tmp_path: Path) -> None:
    result = cli("demo", "--write-up", "--device", "cpu", "--json", tmp_path / "demo.json")
    assert result.code == 0
    assert "on tiny on cpu" in result.out
    assert "KV cache full: used 20 of 20 slots" in result.out
    rows = json.loads((tmp_path / "demo.json").read_text())["rows"]
    assert [row["answers_equal"] for row in rows] == [0, 8, 8, 8]
    assert all(sum(row["preemptions"].values()) > 0 for row in rows[1:])


def test_a_differing_answer_makes_the_exit_code_1(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "count_equal", lambda result, reference: len(result.answers) // 2)
    result = cli("demo", "--device", "dry")
    assert result.code == 1
    assert "which is a fault" in result.out


def test_a_result_file_that_cannot_be_written_is_refused_before_the_work(cli: Cli, tmp_path: Path) -> None:
    result = cli("demo", "--device", "dry", "--json", tmp_path / "absent" / "demo.json")
    assert result.code == 1
    assert result.out == ""
    assert "cannot be written: No such file or directory. Name another file with --json." in result.err
