"""Input files that are wrong, or meant to do harm: every fault is named with its line, and memory stays bounded."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from giveway.server.batch_jobs.input_check import CheckedInput, StoppedError, check_input
from giveway.server.batch_jobs.limits import BatchLimits
from giveway.server.batch_jobs.records import BatchLine, LineAnswer
from tests.server.batch_jobs.sample_lines import CHAT, answer_of, jsonl, request_line
from tests.server.batch_jobs.serving import content_of, create_batch, serving, until, until_ended

SMALL = BatchLimits(max_lines=5, max_line_bytes=2000)


def check(tmp_path: Path, content: bytes, limits: BatchLimits = SMALL) -> CheckedInput:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    return check_input(path, CHAT, limits, lambda: False)


def problems(tmp_path: Path, content: bytes) -> list[tuple[str, int | None, str | None]]:
    return [(each.code, each.line, each.param) for each in check(tmp_path, content).problems]


def test_lines_are_found_where_they_stand_whatever_ends_them(tmp_path: Path) -> None:
    # Goal: blank lines, CRLF, a byte order mark and a last line without an end are all fine; offsets are exact.
    texts = [json.dumps(request_line(str(n), "ü")).encode() for n in range(4)]
    content = b"\xef\xbb\xbf" + texts[0] + b"\r\n\n  \n" + texts[1] + b"\n" + texts[2] + b"\n" + texts[3]
    found = check(tmp_path, content)
    assert not found.problems
    assert [line.number for line in found.lines] == [1, 4, 5, 6]
    for line, text in zip(found.lines, texts, strict=True):
        assert content[line.offset : line.offset + line.num_bytes].removeprefix(b"\xef\xbb\xbf") == text
    assert found.model == "tiny"


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"custom_id": None}, "missing_required_parameter", "custom_id"),
        ({"custom_id": ""}, "invalid_custom_id", "custom_id"),
        ({"custom_id": 7}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "x" * 513}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "\ud800"}, "invalid_custom_id", "custom_id"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"method": None}, "missing_required_parameter", "method"),
        ({"url": "/v1/completions"}, "url_mismatch", "url"),
        ({"url": ["/v1/completions"]}, "url_mismatch", "url"),
        ({"body": None}, "missing_required_parameter", "body"),
        ({"body": "text"}, "invalid_body", "body"),
        ({"body": []}, "invalid_body", "body"),
        ({"body": {"stream": True}}, "invalid_body", "body.stream"),
    ],
)
def test_a_field_that_is_wrong_is_named_with_its_line(
    tmp_path: Path, changes: dict[str, Any], code: str, param: str
) -> None:
    content = jsonl(request_line("first"), {**request_line("second"), **changes})
    assert problems(tmp_path, content) == [(code, 2, param)]


def test_custom_ids_may_hold_anything_that_unicode_has(tmp_path: Path) -> None:
    names = ["../../etc/passwd", "a\0b", "x" * 512, "\N{PILE OF POO}", "'; DROP TABLE lines; --"]
    found = check(tmp_path, jsonl(*map(request_line, names)))
    assert not found.problems
    assert [line.custom_id for line in found.lines] == names


@pytest.mark.parametrize(
    "text",
    [
        b"not json",
        b'{"custom_id": NaN}',
        b"[1, 2]",
        b"7",
        b'"text"',
        b"null",
        b"{" * 100,
        b"[" * 1999,
        b'{"a":[' * 300,
        b'{"custom_id": "\xff\xfe"}',
        b"\x00\x00\x00",
        b"1" * 1999,
    ],
)
def test_a_line_that_is_no_object_in_json_is_named(tmp_path: Path, text: bytes) -> None:
    content = jsonl(request_line("first")) + text + b"\n" + jsonl(request_line("third"))
    assert problems(tmp_path, content) == [("invalid_json_line", 2, None)]


def test_nesting_that_would_overflow_the_stack_is_an_error_of_its_line(tmp_path: Path) -> None:
    deep = b'{"custom_id":"a","body":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    found = check(tmp_path, deep + jsonl(request_line("b")), BatchLimits())
    assert [(each.code, each.line) for each in found.problems] == [("invalid_json_line", 1)]
    assert "nested too deeply" in found.problems[0].message


def test_the_same_custom_id_twice_is_an_error_of_the_second(tmp_path: Path) -> None:
    content = jsonl(request_line("a"), request_line("b"), request_line("a"), request_line("b"))
    assert problems(tmp_path, content) == [
        ("duplicate_custom_id", 3, "custom_id"),
        ("duplicate_custom_id", 4, "custom_id"),
    ]


def test_an_input_without_requests_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, b"") == [("empty_file", None, None)]
    assert problems(tmp_path, b"\n \r\n\n") == [("empty_file", None, None)]


def test_more_requests_than_allowed_are_refused_at_the_first_too_many(tmp_path: Path) -> None:
    assert not problems(tmp_path, jsonl(*(request_line(str(n)) for n in range(5))))
    assert problems(tmp_path, jsonl(*(request_line(str(n)) for n in range(6)))) == [("too_many_tasks", 6, None)]


def test_a_line_up_to_the_limit_is_taken_and_one_byte_more_is_not(tmp_path: Path) -> None:
    room = SMALL.max_line_bytes - len(jsonl(request_line("a", ""))) + 1
    for end in (b"\n", b"\r\n", b""):
        assert not problems(tmp_path, jsonl(request_line("a", "x" * room)).strip() + end)
        assert problems(tmp_path, jsonl(request_line("a", "x" * (room + 1))).strip() + end) == [
            ("line_too_long", 1, None)
        ]


def test_a_line_of_a_hundred_megabytes_is_refused_without_being_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        for _ in range(100):
            file.write(b"x" * 2**20)
        file.write(b"\n" + jsonl(request_line("a")))
    tracemalloc.start()
    found = check_input(path, CHAT, SMALL, lambda: False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [(each.code, each.line) for each in found.problems] == [("line_too_long", 1)]
    assert [line.number for line in found.lines] == [2]
    assert peak < 8 * 2**20


def test_a_file_of_nonsense_is_not_reported_whole(tmp_path: Path) -> None:
    assert len(problems(tmp_path, b"x\n" * 100_000)) == 50


def test_a_check_ends_when_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl(*(request_line(str(n)) for n in range(600))))
    with pytest.raises(StoppedError):
        check_input(path, CHAT, BatchLimits(), lambda: True)


def test_a_bad_input_makes_the_batch_fail_with_its_errors(tmp_path: Path) -> None:
    content = jsonl(request_line("a"), {**request_line("b"), "url": "/v1/embeddings"}, request_line("a"))
    with serving(tmp_path) as served, served.client() as client:
        ended = until_ended(client, create_batch(client, content).id)
        assert ended.status == "failed"
        assert ended.failed_at is not None
        assert ended.errors.object == "list"
        assert [(each.code, each.line, each.param) for each in ended.errors.data] == [
            ("url_mismatch", 2, "url"),
            ("duplicate_custom_id", 3, "custom_id"),
        ]
        assert (ended.output_file_id, ended.error_file_id, ended.request_counts.total) == (None, None, 0)


def test_a_line_that_is_changed_on_the_server_after_the_check_fails_and_is_not_run(tmp_path: Path) -> None:
    # Goal: what was not checked is never run, whether it is another request or no JSON any more.
    runs: list[str] = []
    go = threading.Event()

    async def wait(line: BatchLine) -> LineAnswer:
        runs.append(line.custom_id)
        while not go.is_set():
            await asyncio.sleep(0.005)
        return answer_of(line)

    content = jsonl(*(request_line(name) for name in "abcd"))
    with serving(tmp_path, wait, max_outstanding=1) as served, served.client() as client:
        batch = create_batch(client, content)
        until(lambda: runs == ["a"])
        changed = content.replace(b'"b"', b'"x"').replace(b'"custom_id": "c"', b'"custom_id"= "c"')
        (tmp_path / "files" / batch.input_file_id).write_bytes(changed)
        go.set()
        ended = until_ended(client, batch.id)
        assert (ended.status, runs) == ("completed", ["a", "d"])
        errors = content_of(client, ended.error_file_id)
        assert [(line["custom_id"], line["error"]["code"]) for line in errors] == [
            ("b", "input_changed"),
            ("c", "input_changed"),
        ]


def test_an_input_file_that_is_lost_on_the_server_makes_the_batch_fail(tmp_path: Path) -> None:
    with serving(tmp_path) as served, served.client() as client:
        batch = create_batch(client, jsonl(request_line("a")))
        until_ended(client, batch.id)
        (tmp_path / "files" / batch.input_file_id).unlink()
        again = client.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        ended = until_ended(client, again.id)
        assert ended.status == "failed"
        assert [each.code for each in ended.errors.data] == ["input_file_missing"]
