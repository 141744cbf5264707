"""Batches survive kill -9 and a death at every durable step: no line is lost, none is run again once it is recorded."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
from collections import Counter
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from giveway.server.batch_jobs.steps import DurableStep, Moment
from tests.server.batch_jobs.crash_child import FAULT, NUM_LINES, Fault, work_on
from tests.server.batch_jobs.serving import until

GOOD = [f"good-{n}" for n in range(NUM_LINES) if n != 7]


# Children come from a server that has imported everything already: a hundred of them start in the time of one.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.server.batch_jobs.crash_child"])


def start(tmp_path: Path, fault: Fault | None = None, max_runs: int | None = None) -> ForkServerProcess:
    process = PROCESSES.Process(target=work_on, args=(tmp_path, fault, max_runs))
    process.start()
    return process


def end_of(process: ForkServerProcess) -> int | None:
    """Wait for the end of a process; returns its exit status, negative for a signal."""
    process.join()
    status = process.exitcode
    process.close()
    return status


def runs_of(tmp_path: Path) -> Counter[str]:
    """How often each line was run, by all processes so far."""
    log = tmp_path / "log"
    return Counter(log.read_text().splitlines()) if log.exists() else Counter()


def recorded(tmp_path: Path) -> set[str]:
    """Custom ids of lines that are answered as far as the disk knows; asked of a copy, so that nothing is repaired.

    Checks as well that every file that the disk knows of has its content.
    """
    if not (tmp_path / "data").exists():
        return set()
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(tmp_path / "data", copy)
    connection = sqlite3.connect(copy / "batches.sqlite")
    try:
        rows = connection.execute("SELECT custom_id FROM lines JOIN answers USING (batch_id, number)").fetchall()
        files = connection.execute("SELECT id, num_bytes FROM files").fetchall()
    except sqlite3.OperationalError:  # it died before there were tables
        rows, files = [], []
    finally:
        connection.close()
    assert all((copy / "files" / name).stat().st_size == num_bytes for name, num_bytes in files)
    return {row[0] for row in rows}


def finish(tmp_path: Path) -> dict[str, Any]:
    """Run to the end and return the summary."""
    assert end_of(start(tmp_path)) == 0
    result: dict[str, Any] = json.loads((tmp_path / "summary").read_text())
    return result


def check_end(tmp_path: Path, summary: dict[str, Any]) -> None:
    batches = summary["batches"]
    assert batches["good"]["status"] == "completed"
    assert batches["good"]["counts"] == [NUM_LINES, NUM_LINES - 1, 1]
    assert (batches["good"]["output"], batches["good"]["errors"]) == (GOOD, ["good-7"])
    assert batches["bad"] == {"status": "failed", "counts": [0, 0, 0], "output": [], "errors": []}
    assert batches["cancelled"]["status"] == "cancelled"
    both = batches["cancelled"]["output"] + batches["cancelled"]["errors"]
    assert sorted(both) == [f"cancelled-{n}" for n in range(5)]
    # What lies on the disk is what the database knows, nothing more and nothing less.
    assert sorted(os.listdir(tmp_path / "data" / "files")) == summary["files"]
    assert not os.listdir(tmp_path / "data" / "parts")
    connection = sqlite3.connect(tmp_path / "data" / "batches.sqlite")
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("SELECT count(*) FROM lines").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM answers").fetchone() == (0,)
    finally:
        connection.close()


@pytest.mark.parametrize("seed", range(2))
def test_a_batch_that_is_killed_again_and_again_answers_every_line_exactly_once(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        before, done = runs_of(tmp_path), recorded(tmp_path)
        kill_after(tmp_path, rng.randint(1, 12))
        check_not_repeated(tmp_path, done, before)
    before, done = runs_of(tmp_path), recorded(tmp_path)
    assert done
    check_end(tmp_path, finish(tmp_path))
    check_not_repeated(tmp_path, done, before)
    assert set(GOOD) <= set(runs_of(tmp_path))


def kill_after(tmp_path: Path, num_runs: int) -> None:
    """Kill a process at some moment after it has run so many lines. Not knowing when, it has a few more to run."""
    goal = runs_of(tmp_path).total() + num_runs
    process = start(tmp_path, max_runs=num_runs + 4)
    until(lambda: runs_of(tmp_path).total() >= goal or not process.is_alive())
    process.kill()
    assert end_of(process) == -signal.SIGKILL


def check_not_repeated(tmp_path: Path, done: set[str], before: Counter[str]) -> None:
    """Lines that were recorded have not been run since."""
    after = runs_of(tmp_path)
    assert {name: after[name] for name in done} == {name: before[name] for name in done}


@pytest.mark.parametrize("moment", Moment)
@pytest.mark.parametrize("step", DurableStep)
def test_a_death_at_any_durable_step_loses_and_repeats_nothing(
    tmp_path: Path, step: DurableStep, moment: Moment
) -> None:
    # The first time, and where a step is taken often, in the middle.
    counts = (
        [1, 3] if step in (DurableStep.PART_SYNCED, DurableStep.FILE_RENAMED, DurableStep.ANSWERS_RECORDED) else [1]
    )
    for count in counts:
        status = end_of(start(tmp_path, Fault(step, moment, count)))
        assert status == FAULT, f"{step.name} was not reached"
        before, done = runs_of(tmp_path), recorded(tmp_path)
    check_end(tmp_path, finish(tmp_path))
    check_not_repeated(tmp_path, done, before)
