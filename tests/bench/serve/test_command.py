"""`giveway bench serve` as it is typed, against a server of another make."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from giveway.cli.__main__ import main
from tests.bench.serve.fake_server import MODEL, FakeServer, Script

Serve = Callable[..., int]

ROW_KEYS = {
    "class",
    "ttft_p50",
    "ttft_p99",
    "tpot_p50",
    "tpot_p99",
    "errors",
    "errors_by_kind",
    "requests",
    "completed",
    "cut_off",
    "short",
    "without_usage",
    "window_s",
    "prompt_tokens",
    "output_tokens",
    "requests_per_s",
    "output_tok_s",
    "total_tok_s",
    "good",
    "goodput",
    "ttft_s",
    "tpot_s",
    "itl_s",
    "e2e_s",
    "client_lag_s",
}
SPREAD_KEYS = {"mean", "std", "min", "max", "count", "p50", "p90", "p99"}


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIVEWAY_") or name == "OPENAI_API_KEY"]:
        monkeypatch.delenv(name)


def serve(server: FakeServer | str, *arguments: object) -> int:
    url = server if isinstance(server, str) else server.url
    return main(["bench", "serve", "--base-url", url, *map(str, arguments)])


def test_an_open_and_a_closed_class_are_measured_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Goal: the whole way, with every promise of the JSON file.
    target = tmp_path / "serve.json"
    with FakeServer(lambda number, body: Script(first_s=0.02, gap_s=0.002)) as server:
        code = serve(
            server,
            *("--class", "interactive:rate=100,num=20,prompt=64,output=8,priority=0"),
            *("--class", "batch:concurrency=3,prompt=16-32,output=12,priority=20"),
            *("--goodput", "ttft:60000", "tpot:60000", "--metric-percentiles", "95", "--num-warmups", 2),
            *("--json", target, "--metadata", "commit=abc", "note=two words", "--save-detailed"),
        )
        bodies = server.bodies
    assert code == 0
    content = json.loads(target.read_text())
    assert content["schema"] == "giveway-bench-serve-1"
    assert {"date", "machine", "settings", "metadata", "is_interrupted", "rows", "total", "requests"} < set(content)
    assert content["settings"]["model"] == MODEL
    assert content["settings"]["classes"]["batch"] == {
        "prompt": "16-32",
        "output": "12",
        "concurrency": 3,
        "priority": 20,
    }
    assert content["settings"]["goodput_ms"] == {"ttft": 60000, "tpot": 60000}
    assert content["metadata"] == {"commit": "abc", "note": "two words"}
    interactive, batch = content["rows"]
    for row in (interactive, batch, content["total"]):
        assert set(row) == ROW_KEYS
        assert set(row["e2e_s"]) == SPREAD_KEYS | {"p95"}
    assert (interactive["class"], interactive["completed"], interactive["errors"]) == ("interactive", 20, 0)
    assert (interactive["prompt_tokens"], interactive["output_tokens"]) == (20 * 64, 20 * 8)
    assert interactive["ttft_p50"] >= 0.019
    assert interactive["ttft_p50"] == interactive["ttft_s"]["p50"] <= interactive["ttft_p99"]
    assert interactive["good"] == 20
    assert interactive["e2e_s"]["min"] >= 0.019 + 7 * 0.0015
    assert batch["completed"] + batch["cut_off"] == batch["requests"]
    assert batch["cut_off"] == 3
    assert batch["errors"] == 0
    assert content["total"]["requests"] == len(content["requests"]) == len(bodies) - 2
    assert {request["outcome"] for request in content["requests"]} == {"completed", "cut off"}
    priorities = {len(body["prompt"]) == 64: body["priority"] for body in bodies}
    assert priorities == {True: 0, False: 20}
    out = capsys.readouterr().out
    for word in ("interactive", "batch", "total", "TTFT", "TPOT", "ITL", "E2E", "p95", "goodput", "cut off"):
        assert word in out


def test_without_classes_the_flags_of_vllm_do_what_they_do_there(tmp_path: Path) -> None:
    with FakeServer() as server:
        code = serve(
            server,
            *("--model", "org/model", "--dataset-name", "random", "--num-prompts", 12, "--max-concurrency", 3),
            *(
                "--random-input-len",
                10,
                "--random-output-len",
                4,
                "--random-range-ratio",
                0.5,
                "--random-prefix-len",
                6,
            ),
            *("--seed", 5, "--temperature", 0, "--header", "X-One=1", "X-Two=a=b", "--disable-tqdm"),
            *("--extra-body", '{"top_p": 0.5}', "--percentile-metrics", "ttft,tpot", "--save-result"),
            *("--result-dir", tmp_path / "results", "--result-filename", "r.json"),
        )
        seen = server.seen
    assert code == 0
    assert len(seen) == 12
    for each in seen:
        assert each.headers["x-one"] == "1"
        assert each.headers["x-two"] == "a=b"
        assert (each.body["model"], each.body["temperature"], each.body["top_p"]) == ("org/model", 0, 0.5)
        assert 11 <= len(each.body["prompt"]) <= 21
        assert 2 <= each.body["max_tokens"] <= 6
        assert each.body["prompt"][:6] == seen[0].body["prompt"][:6]
    content = json.loads((tmp_path / "results" / "r.json").read_text())
    assert content["rows"][0]["class"] == "all"
    assert content["settings"]["headers"] == ["X-One", "X-Two"]


def test_chat_sends_words_and_reports_the_servers_count(tmp_path: Path) -> None:
    with FakeServer() as server:
        code = serve(
            server,
            *("--endpoint", "/v1/chat/completions", "--no-ignore-eos", "--json", tmp_path / "out.json"),
            *("--class", "a:burst=3,prompt=20,output=5,stream=0", "--class", "b:burst=2,prompt=7,output=5"),
        )
        bodies = server.bodies
    assert code == 0
    assert all("ignore_eos" not in body and "min_tokens" not in body for body in bodies)
    assert sorted(len(body["messages"][0]["content"].split()) for body in bodies) == [7, 7, 20, 20, 20]
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["prompt_tokens"], row["output_tokens"], row["tpot_s"] is None) for row in rows] == [
        (60, 15, True),
        (14, 10, False),
    ]


def test_a_trace_is_replayed_by_class_of_priority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2], "priority": 0},
        {"timestamp": 100, "input_length": 700, "output_length": 2, "hash_ids": [1, 3], "priority": 20},
        {"timestamp": 110, "input_length": 0, "output_length": 2, "hash_ids": []},
        {"timestamp": 120, "input_length": 5, "output_length": 2, "hash_ids": [8], "priority": 20},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with FakeServer() as server:
        code = serve(server, "--trace", trace, "--time-scale", 0.5, "--json", tmp_path / "out.json")
        bodies = server.bodies
    assert code == 0
    assert [body["priority"] for body in bodies] == [0, 20, 20]
    assert bodies[0]["prompt"][:512] == bodies[1]["prompt"][:512]
    content = json.loads((tmp_path / "out.json").read_text())
    assert [row["class"] for row in content["rows"]] == ["trace-p0", "trace-p20"]
    assert content["settings"]["trace"] == {
        "file": "trace.jsonl",
        "format": "mooncake",
        "time_scale": 0.5,
        "requests": 3,
        "left_out": 1,
        "seconds": 0.06,
    }
    # The other spelling, and a limit.
    with FakeServer() as server:
        code = serve(server, "--dataset-path", trace, "--dataset-name", "mooncake", "--trace-limit", 1)
        assert len(server.seen) == 1
    assert code == 0


@pytest.mark.parametrize(
    ("header", "line", "name"),
    [
        (
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            "{}.0,GPT-4,9,2,11,API log",
            "burstgpt",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:0{}.0000000,9,2", "azure"),
    ],
)
def test_csv_traces_are_replayed_too(tmp_path: Path, header: str, line: str, name: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join([header, line.format(1), line.format(1), line.format(2)]) + "\n")
    with FakeServer() as server:
        code = serve(server, "--trace", trace, "--time-scale", 0.01, "--json", tmp_path / "out.json")
        assert [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies] == [(9, 2)] * 3
    assert code == 0
    assert json.loads((tmp_path / "out.json").read_text())["settings"]["trace"]["format"] == name


def test_errors_are_counted_by_kind_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scripts = [Script(status=503), Script(status=503), Script(breaks_after=1), Script(error_after=1), Script()]
    with FakeServer(lambda number, body: scripts[number]) as server:
        code = serve(server, "--class", "a:burst=5,prompt=4,output=3", "--json", tmp_path / "out.json")
    assert code == 0
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["errors"] == 4
    assert row["errors_by_kind"] == {"http 503": 2, "broken stream": 1, "error in the stream": 1}
    out = capsys.readouterr().out
    assert "a: 4 of 5 failed: " in out
    assert "http 503: {" in out


def test_a_run_in_which_nothing_is_completed_has_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda number, body: Script(status=429)) as server:
        assert serve(server, "--class", "a:burst=2,prompt=4,output=3") == 1
        assert "a: 2 of 2 failed: http 429 2" in capsys.readouterr().out


def test_answers_shorter_than_wished_and_uncounted_tokens_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda number, body: Script(num_tokens=2, has_usage=number == 0)) as server:
        assert serve(server, "--class", "a:burst=3,prompt=4,output=5") == 0
    out = capsys.readouterr().out
    assert "a: 3 answers have fewer tokens than wished" in out
    assert "a: for 2 answers the server did not count tokens" in out


def test_a_server_that_refuses_every_warm_up_is_told_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda number, body: Script(status=400)) as server:
        assert serve(server, "--class", "a:burst=3,prompt=4,output=5", "--num-warmups", 2) == 1
        assert len(server.seen) == 2
    err = capsys.readouterr().err
    assert 'error: every warm-up request failed, the first with http 400: {"error"' in err
    assert "--no-ignore-eos" in err


def test_the_key_of_the_environment_is_sent_and_never_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    target = tmp_path / "out.json"
    with FakeServer() as server:
        assert serve(server, "--class", "a:burst=1,prompt=4,output=2", "--json", target) == 0
        assert server.seen[0].headers["authorization"] == "Bearer sk-very-secret"
        assert serve(server, "--class", "a:burst=1,prompt=4,output=2", "--header", "Authorization=Bearer mine") == 0
        assert server.seen[1].headers["authorization"] == "Bearer mine"
    captured = capsys.readouterr()
    for text in (target.read_text(), captured.out, captured.err):
        assert "secret" not in text
        assert "mine" not in text


A = ("--class", "a:burst=1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--class", "a:rate=1"], "class 'a' has no end: give it num=, or the run --num-prompts or --duration"),
        (["--class", "a:rate=inf", "--duration", 5], "class 'a': rate=inf needs num="),
        (["--class", "a:concurrency=2"], "only closed loops without an end"),
        ([*A, *A], "two classes are called 'a'"),
        ([*A, "--request-rate", 5], "--request-rate is for a run without --class"),
        ([*A, "--goodput", "ttft:fast"], "--goodput 'ttft:fast': write NAME:MILLISECONDS"),
        ([*A, "--metric-percentiles", "50,101"], "--metric-percentiles '101'"),
        ([*A, "--percentile-metrics", "ttft,e2e"], "--percentile-metrics 'e2e': known are ttft, tpot, itl, e2el"),
        ([*A, "--extra-body", "{"], "--extra-body is not valid JSON"),
        ([*A, "--extra-body", "[1]"], "--extra-body must be a JSON object"),
        ([*A, "--header", "novalue"], "--header: value 1 is no NAME=VALUE"),
        ([*A, "--header", "a=b\nc"], "--header: header a: its value holds a character that cannot be sent"),
        ([*A, "--endpoint", "v1"], "--endpoint 'v1': write a path"),
        ([*A, "--base-url", "localhost:8000"], "--base-url 'localhost:8000': write it like http://"),
        ([*A, "--base-url", "http://u:p@x"], "--base-url holds a user name or password"),
        ([*A, "--random-vocab", "5"], "--random-vocab '5': write FIRST-LAST"),
        ([*A, "--random-vocab", "9-3"], "--random-vocab 9-3"),
        (
            [*A, "--endpoint", "/v1/chat/completions", "--prompt-format", "ids"],
            "--endpoint /v1/chat/completions takes text, not token ids",
        ),
        ([*A, "--trace", "/absent/file"], "/absent/file: cannot be read: No such file"),
        ([*A, "--trace-format", "azure"], "--trace-format azure needs the file"),
        ([*A, "--duration", 0], "--duration 0.0: must be above 0"),
        ([*A, "--time-scale", "nan"], "--time-scale nan: must be above 0"),
        ([*A, "--max-concurrency", 0], "--max-concurrency 0: must be from 1 on"),
        ([*A, "--random-range-ratio", 1], "--random-range-ratio 1.0"),
        ([*A, "--save-detailed"], "--save-detailed needs a file: --json FILE or --save-result"),
        ([*A, "--metadata", "a=b"], "--metadata needs a file"),
        ([*A, "--result-filename", "x"], "--result-filename is for --save-result, which is not given"),
        ([*A, "--json", "/absent/dir/x.json"], "/absent/dir/x.json: cannot be written"),
    ],
)
def test_what_is_asked_wrongly_is_refused_before_anything_is_sent(
    arguments: list[Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer() as server:
        assert serve(server, *arguments) == 1
        assert server.seen == []
        assert server.num_probes == 0
    assert f"error: {message}" in capsys.readouterr().err


def test_a_broken_line_of_a_trace_is_refused_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 1, "input_length": 2, "output_length": 3}\n{"timestamp": 2}\n')
    with FakeServer() as server:
        assert serve(server, "--trace", trace) == 1
        assert server.seen == []
    assert "t.jsonl, line 2: input_length is None" in capsys.readouterr().err


def test_a_value_without_its_flag_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    # Goal: several values belong to the flags that take them, and to no other.
    assert serve("http://x", *A, "--seed", 5, "ttft:200") == 2
    assert "unexpected extra argument" in capsys.readouterr().err


def test_without_aiohttp_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert serve("http://x", *A) == 1
    assert "pip install 'giveway[bench]'" in capsys.readouterr().err


def test_what_a_file_sets_for_the_engine_is_not_meant_for_the_load(tmp_path: Path) -> None:
    # Goal: the engine's model is a file and its seed one of sampling; the server's name for its model is another thing.
    config = tmp_path / "settings.toml"
    config.write_text('model = "weights.gguf"\nseed = 77\n')
    with FakeServer() as server:
        assert (
            serve(server, "--class", "a:burst=1,prompt=4,output=2", "--config", config, "--json", tmp_path / "o") == 0
        )
        assert server.bodies[0]["model"] == MODEL
    assert json.loads((tmp_path / "o").read_text())["settings"]["seed"] == 0


def test_ctrl_c_prints_what_was_measured_until_then(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    with FakeServer(lambda number, body: Script(hangs=number >= 6)) as server:
        arguments = ["--class", "a:concurrency=2,num=100,prompt=4,output=3", "--json", str(target)]
        process = subprocess.Popen(
            [sys.executable, "-m", "giveway", "bench", "serve", "--base-url", server.url, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while len(server.seen) < 8 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, err) == (130, "")
    assert "ended by Ctrl-C" in out
    content = json.loads(target.read_text())
    assert content["is_interrupted"]
    assert (content["rows"][0]["completed"], content["rows"][0]["cut_off"], content["rows"][0]["errors"]) == (6, 2, 0)


def test_whoever_is_cut_off_is_let_go_of_at_the_server_too() -> None:
    # Goal: a closed loop leaves no work behind that nobody reads.
    with FakeServer(lambda number, body: Script(hangs="priority" in body, waits_for_seen=5)) as server:
        assert serve(server, "--class", "a:burst=1,output=2", "--class", "b:concurrency=4,priority=9") == 0
        ends = time.monotonic() + 60
        while sum(each.is_cut for each in server.seen) < 4 and time.monotonic() < ends:
            time.sleep(0.01)
        assert sum(each.is_cut for each in server.seen) == 4
