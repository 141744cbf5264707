"""`giveway run`: a file of requests, answered once each, whatever happens in between."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from giveway.build import build_engine
from giveway.cli.run_input import InputLine, parse_request
from giveway.cli.run_output import OutputFile
from giveway.cli.run_requests import REQUESTS_PER_SEAT, RequestRun, RunSettings
from giveway.cli.run_source import open_source
from giveway.core.errors import ConfigError
from giveway.core.executor import RequestFacts
from giveway.core.ids import RequestId
from giveway.core.plan import StepOutcome, StepPlan
from giveway.options import EngineOptions
from tests.cli.conftest import Cli
from tests.cli.run_files import DRY, records, ten_lines, texts, write_lines


def lines_of(path: Path, max_line_bytes: int) -> Iterator[InputLine]:
    with open_source(str(path)) as source:
        yield from source.lines(max_line_bytes)


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    return ten_lines(tmp_path)


def test_every_line_is_answered_with_what_the_library_says(cli: Cli, tmp_path: Path) -> None:
    from giveway.core.sampling import SamplingParams
    from giveway.llm import LLM

    with LLM(device="dry") as llm:
        plain = llm.generate("hello", SamplingParams(max_tokens=5, temperature=0))[0].text
        chat = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=6, temperature=0))[0].text
    lines = [
        {"prompt": "hello", "max_tokens": 5, "id": "first"},
        "",
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "custom_id": 7, "temperature": 0},
    ]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    result = cli("run", source, "-o", out, *DRY)
    assert result.code == 0
    assert result.err == "2 answered, 0 errors, 11 output tokens\n"
    found = records(out)
    assert {number: (record["id"], record["text"]) for number, record in found.items()} == {
        1: ("first", plain),
        3: (7, chat),
    }
    assert found[1]["finish_reason"] == "length"
    assert found[1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 5}


def test_a_line_may_ask_for_the_form_of_its_answer(cli: Cli, tmp_path: Path) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    wrong = {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}
    lines = [
        {"prompt": "a", "max_tokens": 20, "response_format": form, "n": 3, "temperature": 1},
        {"prompt": "b", "max_tokens": 20, "response_format": {"type": "text"}},
        {"prompt": "c", "response_format": wrong},
        {"prompt": "d", "response_format": "json"},
        {"prompt": "e", "structured_output": {"json_object": True}},
    ]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert cli("run", source, "-o", out, *DRY).err.startswith("2 answered, 3 errors")
    found = records(out)
    assert {choice["text"] for choice in found[1]["choices"]} <= {'"yes"', '"no"'}
    assert {choice["finish_reason"] for choice in found[1]["choices"]} == {"stop"}
    assert found[2]["finish_reason"] == "length"
    errors = [found[number]["error"]["message"] for number in (3, 4, 5)]
    assert "'not' is not supported" in errors[0]
    assert errors[1].startswith("response_format must be an object")
    assert "unknown field 'structured_output'" in errors[2]


def test_answers_and_trace_do_not_go_into_one_file(cli: Cli, ten: Path, tmp_path: Path) -> None:
    out, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(out)  # which does not exist yet
    for trace in (out, link):
        result = cli("run", ten, "-o", out, *DRY, "--trace", trace)
        assert result.code != 0
        assert "answers and trace are to go into the same file" in result.err
        assert not out.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{bad", "the line is not JSON"),
        ("[1]", "the line holds [1]; an object with prompt or messages is needed"),
        ("{}", "exactly one of prompt and messages is needed"),
        ('{"prompt": "x", "messages": []}', "exactly one of prompt and messages is needed"),
        ('{"prompt": "x", "max_tokns": 3}', "unknown field 'max_tokns'; did you mean 'max_tokens'?"),
        ('{"prompt": "x", "max_tokens": "3"}', "max_tokens must be a whole number, not '3'"),
        ('{"prompt": "x", "temperature": NaN}', "NaN is not a number in JSON"),
        ('{"prompt": "x", "temperature": [1]}', "temperature must be a number"),
        ('{"prompt": "x", "stop": {"a": 1}}', "stop is {'a': 1}; it must be a text or a list of texts"),
        ('{"prompt": "x", "logit_bias": {"a": 1}}', "a token id must be a whole number"),
        ('{"prompt": "x", "logit_bias": [1]}', "logit_bias is [1]; it must be an object"),
        ('{"prompt": "x", "bad_words": "y"}', "bad_words is 'y'; it must be a list"),
        ('{"prompt": 3}', "prompt is 3; it must be a text"),
        ('{"messages": "hello"}', "messages is 'hello'; it must be a list of objects"),
        ('{"messages": [{"role": 1}]}', "message"),
        ('{"prompt": "x", "id": [1]}', "id is [1]; it must be a text or a whole number"),
        ('{"prompt": "x", "priority": "high"}', "priority is 'high'; it must be a whole number"),
        ('{"prompt": "x", "max_tokens": 99999}', "can never fit"),
        ("[" * 100_000, "the line is"),
        ('{"prompt": "\\ud800"}', "lone surrogate"),
        ('{"prompt": "x", "id": "a\\ud800"}', "id is 'a\\ud800': a lone surrogate, which the output cannot carry"),
        ('{"prompt": "x", "custom_id": "\\udfff"}', "a lone surrogate"),
        ('{"prompt": "x", "temperature": 1' + "0" * 400 + "}", ""),
        ('{"prompt": "x", "logit_bias": {"5": 1' + "0" * 400 + "}}", ""),
        ('{"prompt": "x", "max_tokens": 1' + "0" * 4000 + "}", ""),
        ('{"prompt": "x", "temperature": 1e999}', "temperature is inf"),
    ],
)
def test_a_bad_line_gets_an_error_record_and_harms_no_other(cli: Cli, tmp_path: Path, line: str, message: str) -> None:
    good = {"prompt": "hello", "max_tokens": 3}
    source, out = write_lines(tmp_path / "in.jsonl", [good, line, good]), tmp_path / "out.jsonl"
    result = cli("run", source, "-o", out, *DRY)
    assert result.code == 0
    found = records(out)
    assert message in found[2]["error"]["message"]
    assert found[1]["text"] == found[3]["text"]
    assert result.err.startswith("2 answered, 1 errors")


@pytest.mark.parametrize("fault", [ValueError, TypeError, OverflowError, RecursionError, KeyError])
def test_a_fault_while_a_request_is_made_is_that_of_its_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[Exception]
) -> None:
    # Goal: a check that was forgotten costs one record, not the run.
    def careless(values: Any, priority_field: str) -> Any:
        if values["prompt"] == "bad":
            raise fault("x" * 1000)
        return parse_request(values, priority_field)

    monkeypatch.setattr("giveway.cli.run_requests.parse_request", careless)
    lines = [{"prompt": text, "max_tokens": 3, "id": text} for text in ("good", "bad", "fine")]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert cli("run", source, "-o", out, *DRY).code == 0
    found = records(out)
    assert (found[2]["id"], found[2]["error"]["type"]) == ("bad", "InvalidRequestError")
    assert found[2]["error"]["message"].startswith(f"no request can be made of the line ({fault.__name__}: ")
    assert len(found[2]["error"]["message"]) < 300
    assert all("text" in found[number] for number in (1, 3))


def test_a_line_that_is_not_utf8_or_too_long_gets_an_error_record(cli: Cli, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b'\xff\n{"prompt": "' + b"x" * 5000 + b'"}\n{"prompt": "hello", "max_tokens": 3}')
    assert cli("run", source, "-o", out, *DRY, "--max-line-bytes", 1000).code == 0
    found = records(out)
    assert "the line is not UTF-8 (byte 0)" in found[1]["error"]["message"]
    assert "longer than 1000 bytes" in found[2]["error"]["message"]
    assert len(found[3]["text"]) > 0


def test_reading_keeps_no_more_of_a_line_than_the_limit_and_hashes_all_of_it(tmp_path: Path) -> None:
    first, second, short = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    first.write_bytes(b"x" * 3_000_000 + b"1\nnext\n")
    second.write_bytes(b"x" * 3_000_000 + b"2\nnext\n")
    short.write_bytes(b"x" * 10 + b"\nnext")
    (long_1, next_1), (long_2, next_2) = lines_of(first, 10), lines_of(second, 10)
    assert long_1.content is long_2.content is None
    assert long_1.digest != long_2.digest
    assert next_1 == next_2 == InputLine(2, next_1.digest, b"next")
    assert [line.content for line in lines_of(short, 10)] == [b"x" * 10, b"next"]


def test_the_class_comes_from_the_field_that_was_named(cli: Cli, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x", "max_tokens": 3, "urgency": 0}])
    out = tmp_path / "out.jsonl"
    assert cli("run", source, "-o", out, *DRY, "--priority-field", "urgency").code == 0
    assert "text" in records(out)[1]
    other = tmp_path / "other.jsonl"
    assert cli("run", source, "-o", other, *DRY).code == 0
    assert "unknown field 'urgency'" in records(other)[1]["error"]["message"]


def test_answers_are_written_in_order_of_completion(cli: Cli, tmp_path: Path) -> None:
    lines = [{"prompt": "x", "max_tokens": count} for count in (9, 3, 6)]
    out = tmp_path / "out.jsonl"
    cli("run", write_lines(tmp_path / "in.jsonl", lines), "-o", out, *DRY)
    assert list(records(out)) == [2, 3, 1]


def test_no_more_than_a_few_requests_a_seat_are_under_way(tmp_path: Path) -> None:
    # Goal: a file of millions of lines does not fill the memory.
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x", "max_tokens": 3}] * 100)
    built = build_engine(EngineOptions(device="dry", max_num_seqs=2))
    num_read = 0

    def lines() -> Any:
        nonlocal num_read
        for line in lines_of(source, 1000):
            num_read += 1
            yield line

    class Records:
        num_written = 0

        def write(self, line_number: int, digest: int, values: Any) -> None:
            self.num_written += 1
            assert num_read - self.num_written <= REQUESTS_PER_SEAT * 2

    out = Records()
    run = RequestRun(built, RunSettings({}, "priority", 1000, None), lines(), out)
    assert run.run(is_stopped=lambda: False, tell=lambda _: None)
    assert out.num_written == 100


def test_seeds_of_unseeded_lines_follow_from_the_seed_and_the_line(cli: Cli, tmp_path: Path) -> None:
    # Goal: a resumed run gives what an uninterrupted one would have given, also when it samples.
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x", "max_tokens": 9}] * 6)
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    cli("run", source, "-o", whole, "--device", "dry", "--seed", 5)
    parts.write_text("".join(whole.read_text().splitlines(keepends=True)[:2]))
    cli("run", source, "-o", parts, "--device", "dry", "--seed", 5)
    assert texts(parts) == texts(whole)
    assert len(set(texts(whole).values())) == 6


# Several answers, and salts


def test_a_line_that_wants_several_answers_gets_them_as_choices(cli: Cli, tmp_path: Path) -> None:
    from giveway.core.sampling import SamplingParams
    from giveway.llm import LLM

    with LLM(device="dry") as llm:
        (wanted,) = llm.generate("hello", SamplingParams(max_tokens=5, temperature=1, seed=9, n=3))
    line = {"prompt": "hello", "max_tokens": 5, "temperature": 1, "seed": 9}
    lines = [{**line, "n": 3, "id": "many"}, {**line, "n": 1, "cache_salt": "tenant"}, {**line, "n": None}]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    result = cli("run", source, "-o", out, "--device", "dry", "--max-num-seqs", 2)
    assert result.err == "3 answered, 0 errors, 25 output tokens\n"
    found = records(out)
    assert list(found[1]) == ["line", "input_hash", "id", "choices", "usage"]
    assert [list(choice) for choice in found[1]["choices"]] == [["index", "text", "finish_reason", "stats"]] * 3
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in found[1]["choices"]] == [
        (choice.index, choice.text, "length") for choice in wanted.choices
    ]
    assert found[1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 15}
    assert found[2]["text"] == found[3]["text"] == wanted.text
    assert cli("run", source, "-o", out, "--device", "dry").err == "3 of 3 lines are answered already\n"


def test_branches_of_an_unseeded_line_follow_from_the_seed_too(cli: Cli, tmp_path: Path) -> None:
    line = {"prompt": "x", "max_tokens": 9}
    many, single = tmp_path / "many.jsonl", tmp_path / "single.jsonl"
    cli("run", write_lines(tmp_path / "1", [{**line, "n": 2}] * 3), "-o", many, "--device", "dry", "--seed", 5)
    cli("run", write_lines(tmp_path / "2", [line] * 3), "-o", single, "--device", "dry", "--seed", 5)
    first = {number: record["choices"][0]["text"] for number, record in records(many).items()}
    assert first == texts(single)
    assert len({choice["text"] for record in records(many).values() for choice in record["choices"]}) == 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n is 0; it must be between 1 and 128"),
        ({"n": 129}, "n is 129"),
        ({"n": "3"}, "n must be a whole number, not '3'"),
        ({"n": 3, "max_tokens": 99999}, "can never fit"),
        ({"cache_salt": ""}, "cache_salt is a text of 0 characters; it must be a text of 1 to 256 characters"),
        ({"cache_salt": 5}, "cache_salt is 5"),
        ({"cache_salt": ["x"]}, "cache_salt is ['x']"),
        ({"cache_salt": "\ud800"}, "cache_salt has a lone surrogate"),
    ],
)
def test_a_wrong_number_of_answers_or_salt_is_told_in_the_record(
    cli: Cli, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    out = tmp_path / "out.jsonl"
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x", **fields}, {"prompt": "x", "max_tokens": 2}])
    assert cli("run", source, "-o", out, *DRY).err.startswith("1 answered, 1 errors")
    assert message in records(out)[1]["error"]["message"]


def test_a_line_of_which_one_answer_fails_ends_with_an_error_and_its_others_are_taken_back(tmp_path: Path) -> None:
    built = build_engine(EngineOptions(device="dry"))
    inner = built.engine._executor

    class Faulty:
        num_steps = 0

        def execute(self, plan: StepPlan, requests: Mapping[RequestId, RequestFacts]) -> StepOutcome:
            self.num_steps += 1
            outcome = inner.execute(plan, requests)
            faults = {RequestId("line-1/2"): "its logits are NaN"} if "line-1/2" in outcome.sampled else {}
            return replace(outcome, faults=faults)

        def close(self) -> None:
            inner.close()

    faulty = built.engine._executor = Faulty()
    written: dict[int, Any] = {}

    class Records:
        def write(self, line_number: int, digest: int, values: Any) -> None:
            written[line_number] = values

    lines = [{"prompt": "x", "n": 4, "max_tokens": 500}, {"prompt": "x", "max_tokens": 3}]
    source = write_lines(tmp_path / "in.jsonl", lines)
    run = RequestRun(built, RunSettings({}, "priority", 1000, None), lines_of(source, 1000), Records())
    assert run.run(is_stopped=lambda: False, tell=lambda _: None)
    assert written[1]["error"] == {"type": "RequestFailedError", "message": "choice 2: its logits are NaN"}
    assert written[2]["finish_reason"] == "length"
    assert faulty.num_steps < 50
    assert built.engine.num_unfinished == 0


def test_answers_to_one_line_count_each_among_those_under_way(tmp_path: Path) -> None:
    # Goal: lines with many answers do not fill the memory either.
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x", "n": 20, "max_tokens": 3}] * 20)
    built = build_engine(EngineOptions(device="dry", max_num_seqs=2))
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, built.engine.num_unfinished)

    class Records:
        def write(self, line_number: int, digest: int, values: Any) -> None:
            assert len(values["choices"]) == 20

    built.engine.add_listener(look)
    run = RequestRun(built, RunSettings({}, "priority", 1000, None), lines_of(source, 1000), Records())
    assert run.run(is_stopped=lambda: False, tell=lambda _: None)
    assert most < REQUESTS_PER_SEAT * 2 + 20


# Resuming


def test_started_again_it_does_nothing_when_all_is_done(cli: Cli, ten: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    cli("run", ten, "-o", out, *DRY)
    before = out.read_bytes()
    result = cli("run", ten, "-o", out, *DRY)
    assert (result.code, result.err) == (0, "10 of 10 lines are answered already\n")
    assert out.read_bytes() == before


def test_it_goes_on_after_a_torn_last_line_wherever_it_was_torn(cli: Cli, ten: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    cli("run", ten, "-o", out, *DRY)
    whole, wanted = out.read_bytes(), texts(out)
    end_of_fourth = [place for place, byte in enumerate(whole) if byte == ord("\n")][3] + 1
    for size in (0, 1, 9, 40, end_of_fourth - 1, end_of_fourth, end_of_fourth + 15, len(whole) - 1):
        out.write_bytes(whole[:size])
        assert cli("run", ten, "-o", out, *DRY).code == 0
        assert texts(out) == wanted


def test_lines_added_to_the_input_are_answered_by_the_next_start(cli: Cli, ten: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    cli("run", ten, "-o", out, *DRY)
    with ten.open("a") as file:
        file.write('{"prompt": "one more", "max_tokens": 2}\n')
    result = cli("run", ten, "-o", out, *DRY)
    assert result.err.startswith("10 of 11 lines are answered already")
    assert sorted(records(out)) == list(range(1, 12))


def test_an_output_that_belongs_to_another_input_is_refused_and_left_alone(cli: Cli, ten: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    cli("run", ten, "-o", out, *DRY)
    before = out.read_bytes()
    other = write_lines(tmp_path / "other.jsonl", [{"prompt": "else", "max_tokens": 4}] * 10)
    result = cli("run", other, "-o", out, *DRY)
    assert result.code == 1
    assert "its line 1 answers line 1 of another input file" in result.err
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        "my diary\n",
        "my diary",
        '{"line": 1}\n',
        '{"line": 1, "input_hash": "zz"}\n',
        "7\n",
        "[1]\n",
        '{"line": 1e999, "input_hash": "00"}\n',
        '{"line": "1", "input_hash": "00"}\n',
        '{"line": 1, "input_hash": 0}\n',
    ],
)
def test_a_file_that_is_no_output_is_refused_and_left_alone(cli: Cli, ten: Path, tmp_path: Path, content: str) -> None:
    out = tmp_path / "notes.txt"
    out.write_text(content)
    result = cli("run", ten, "-o", out, *DRY)
    assert result.code == 1
    assert "no answer of `giveway run`, so nothing is added to it" in result.err
    assert out.read_text() == content


def test_input_and_output_must_not_be_the_same_file(cli: Cli, ten: Path) -> None:
    before = ten.read_bytes()
    assert "input and output are the same file" in cli("run", ten, "-o", ten, *DRY).err
    assert ten.read_bytes() == before


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out.jsonl"), pytest.raises(ConfigError, match="another run is writing to it"):
        OutputFile(tmp_path / "out.jsonl")


def test_a_limit_that_no_line_can_keep_is_a_usage_error(cli: Cli, ten: Path, tmp_path: Path) -> None:
    assert cli("run", ten, "-o", tmp_path / "out.jsonl", *DRY, "--max-line-bytes", 0).code == 2


def test_an_absent_input_is_named(cli: Cli, tmp_path: Path) -> None:
    result = cli("run", tmp_path / "no.jsonl", "-o", tmp_path / "out.jsonl", *DRY)
    assert (result.code, result.err) == (1, f"error: {tmp_path}/no.jsonl: cannot be read: No such file or directory\n")
    assert not (tmp_path / "out.jsonl").exists()


def test_help_shows_a_line_of_either_side(cli: Cli) -> None:
    lines = [line.strip() for line in cli("run", "--help").out.splitlines()]
    asked = json.loads(lines[lines.index("A line of INPUT:") + 1])
    assert "prompt" in asked
    start = lines.index("Its line of the output, here in three:") + 1
    answer = json.loads("".join(lines[start : start + 3]).replace(", ...", ""))
    assert list(answer) == ["line", "input_hash", "id", "text", "finish_reason", "usage", "stats"]


# Trouble while writing


def test_a_full_disk_is_an_error_that_names_file_and_remedy(cli: Cli, ten: Path) -> None:
    result = cli("run", ten, "-o", "/dev/full", *DRY)
    assert result.code == 1
    assert result.err == (
        "error: /dev/full: cannot be written: No space left on device. What is in it is whole. Make room and start the "
        "same command again: it goes on where it stopped.\n"
    )


def test_a_record_that_only_fits_in_part_is_taken_back(cli: Cli, ten: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "giveway", "run", str(ten), "-o", str(out), *map(str, DRY)]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # bytes: the third or fourth record is cut by it

    result = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "cannot be written: File too large" in result.stderr
    assert "Traceback" not in result.stderr
    num_kept = len(records(out))
    assert 0 < num_kept < 10
    assert out.read_bytes().endswith(b"}\n")
    assert cli("run", ten, "-o", out, *DRY).err.startswith(f"{num_kept} of 10 lines are answered already")
    assert sorted(records(out)) == list(range(1, 11))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_run_stopped_in_the_middle_goes_on_where_it_stopped(
    cli: Cli, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    lines = [{"prompt": f"hello {n}", "max_tokens": 24, "temperature": 0.5} for n in range(600)]
    source, out, whole = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    arguments = [*map(str, DRY), "--seed", "3", "--max-num-seqs", "4"]
    command = [sys.executable, "-m", "giveway", "run", str(source), "-o", str(out), *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while (not out.exists() or out.stat().st_size < 2000) and process.poll() is None:
        time.sleep(0.002)
    os.kill(process.pid, number)
    _, errors = process.communicate()
    assert process.returncode == code
    assert "Traceback" not in errors
    num_kept = out.read_bytes().count(b"\n")
    assert 0 < num_kept < 600
    assert cli("run", source, "-o", out, *arguments).err.startswith(f"{num_kept} of 600 lines are answered already")
    assert cli("run", source, "-o", whole, *arguments).code == 0
    assert texts(out) == texts(whole)
    assert len(texts(out)) == 600


def test_standard_output_can_be_the_output(cli: Cli, ten: Path) -> None:
    result = cli("run", ten, "-o", "-", *DRY)
    assert result.code == 0
    assert len([json.loads(line) for line in result.out.splitlines()]) == 10


def test_records_are_synced_at_most_once_a_second_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs: list[int] = []
    monkeypatch.setattr(os, "fsync", syncs.append)
    time_s = 0.0
    with OutputFile(tmp_path / "out.jsonl", now=lambda: time_s) as out:
        out.resume(array("Q", [1]), array("Q", [1]))
        for _ in range(100):
            time_s += 0.05
            out.write(1, 1, {})
        assert 4 <= len(syncs) <= 5
        before = len(syncs)
    assert len(syncs) == before + 1
