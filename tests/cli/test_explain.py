"""`--trace`, `giveway explain` and `giveway trace export`, end to end on the dry device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.run_files import DRY, write_lines


@pytest.fixture
def trace(cli: Cli, tmp_path: Path) -> Path:
    """Two background lines and an urgent one, in a pool that is too small."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"prompt": "background " * 4, "max_tokens": 30, "priority": 20},
        {"prompt": "more of it " * 4, "max_tokens": 30, "priority": 20},
        {"prompt": "urgent! " * 5, "max_tokens": 20, "priority": 0},
    ]
    source = write_lines(tmp_path / "in.jsonl", lines)
    pool = ("--num-kv-blocks", 18, "--block-size", 8, "--max-model-len", 100)
    assert cli("run", source, "-o", tmp_path / "out.jsonl", *DRY, *pool, "--trace", path).code == 0
    return path


def test_a_run_is_explained(cli: Cli, trace: Path) -> None:
    table = cli("explain", trace)
    assert (table.code, table.err) == (0, "")
    assert [line.split()[0] for line in table.out.splitlines()] == ["request", "line-1", "line-2", "line-3"]
    story = cli("explain", trace, "--request", "line-2")
    assert story.code == 0
    assert story.out.startswith("line-2: class 20, 44 prompt tokens, at most 30 new ones; arrived at ")
    assert "no_device_blocks" in story.out
    assert "held by line-3, line-1" in story.out


def test_json_is_for_programs(cli: Cli, trace: Path) -> None:
    totals = json.loads(cli("explain", trace, "--json").out)
    assert [each["request"] for each in totals] == ["line-1", "line-2", "line-3"]
    assert all(each["finish_reason"] == "length" for each in totals)
    for each in totals:
        spans = json.loads(cli("explain", trace, "--request", each["request"], "--json").out)
        assert sum(span["num_steps"] for span in spans) == sum(each["unserved_steps"].values())
        for span in spans:
            if span["reason"] == "preempted":
                assert sum(way["is_chosen"] for way in span["gave_way"]["alternatives"]) == 1


def test_generate_is_traced_too(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    assert cli("generate", "hello", "-n", 4, "--device", "dry", "--trace", path).code == 0
    assert cli("explain", path).out.splitlines()[1].split() == ["request-0", "10", "4", "0", "0.000", "-", "-"]


def test_export_writes_what_perfetto_reads(cli: Cli, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "chrome.json"
    result = cli("trace", "export", trace, "--out", out)
    assert (result.code, result.out, result.err) == (0, "", "")
    assert {event["ph"] for event in json.loads(out.read_text())["traceEvents"]} >= {"M", "X", "C", "i"}
    assert cli("trace", "export", trace, "--out", trace).err.endswith(
        "is the trace itself. Name another file with --out.\n"
    )
    nowhere = cli("trace", "export", trace, "--out", tmp_path / "no" / "where")
    assert (nowhere.code, "cannot be written: No such file" in nowhere.err) == (1, True)


def test_a_trace_that_is_cut_off_is_read_with_a_note(cli: Cli, trace: Path) -> None:
    trace.write_bytes(trace.read_bytes()[:-9])
    result = cli("explain", trace)
    assert result.code == 0
    assert result.err == f"{trace}: the last line is not whole and is left out\n"


def test_errors_are_one_line(cli: Cli, trace: Path, tmp_path: Path) -> None:
    wrong = cli("explain", trace, "--request", "line-4")
    assert (wrong.code, wrong.err) == (
        1,
        f"error: {trace}: there is no request 'line-4'. Did you mean 'line-3'?\n",
    )
    missing = cli("explain", tmp_path / "none")
    assert (missing.code, missing.err) == (
        1,
        f"error: {tmp_path / 'none'}: cannot be read: No such file or directory\n",
    )
    with trace.open("a") as file:
        file.write("{}\n")
    number = len(trace.read_text().splitlines())
    assert cli("explain", trace).err == (
        f"error: {trace}: line {number}: start_s is None; it must be a number of seconds\n"
    )
    precious = tmp_path / "in.jsonl"
    refused = cli("generate", "x", "--device", "dry", "--trace", precious)
    assert (refused.code, "holds something that is not a trace" in refused.err) == (1, True)


def test_the_configuration_file_and_the_environment_name_a_trace(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Goal: a command of the same name as a setting does not get in its way.
    config = tmp_path / "giveway.toml"
    config.write_text(f'trace = "{tmp_path / "by_file.jsonl"}"\n')
    assert cli("generate", "x", "-n", 1, "--device", "dry", "--config", config).code == 0
    assert cli("explain", tmp_path / "by_file.jsonl", "--config", config).code == 0
    monkeypatch.setenv("GIVEWAY_TRACE", str(tmp_path / "by_variable.jsonl"))
    assert cli("generate", "x", "-n", 1, "--device", "dry").code == 0
    assert cli("explain", tmp_path / "by_variable.jsonl").code == 0
    exported = cli("trace", "export", tmp_path / "by_variable.jsonl", "-o", tmp_path / "o.json", "--config", config)
    assert exported.code == 0


def test_a_trace_is_read_without_what_a_model_needs(trace: Path) -> None:
    # Goal: explanations on a machine without numpy, torch or a tokenizer.
    code = (
        "import sys; from giveway.cli.__main__ import main; code = main(['explain', sys.argv[1]]);"
        "loaded = [name for name in ('numpy', 'torch', 'tokenizers', 'giveway.build') if name in sys.modules];"
        "sys.exit(f'{loaded}' if loaded or code else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code, str(trace)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
