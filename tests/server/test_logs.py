"""Logs: one line a record, whatever a client puts into it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giveway.core.errors import ConfigError
from giveway.server.finished import FinishedRequest
from giveway.server.logs import (
    MAX_ITEMS,
    MAX_MESSAGE_CHARACTERS,
    MAX_TRACEBACK_LINES,
    MAX_VALUE_CHARACTERS,
    JsonLines,
    TextLines,
    configure_logging,
    log_finished,
)

HOSTILE = [
    "a\nb",
    "x\n2026-01-01T00:00:00.000Z INFO    giveway.server.request: request finished id=forged status=200",
    "\r\x1b[2J\x1b[31mred",
    "nul \x00 end",
    "lone \ud800 surrogate",
    "right \u202e to left",
    "line\u2028paragraph\u2029next\x85vt\x0bff\x0cfs\x1c",
    '"}\n{"level":"critical"',
    "back\\slash \\n",
    "a=b c=d",
    "%s %d %(name)s {0}",
    "é 日本語 🙂",
    "",
]


END = FinishedRequest(
    api_id="chatcmpl-1",
    alias=None,
    key_name="anybody",
    endpoint="/v1/chat/completions",
    priority=20,
    is_stream=True,
    is_batch=False,
    status=200,
    duration_s=1.23456789,
    num_choices=1,
    num_prompt_tokens=7,
    num_output_tokens=5,
    num_cached_tokens=4,
    num_recomputed_tokens=3,
    swapped_bytes=4096,
    preemptions={"swap": 2},
    finish_reasons={"stop": 1},
    queue_s=0.25,
    ttft_s=None,
)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Put global logging back."""
    names = (None, "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
    loggers = [logging.getLogger(name) for name in names]
    before = [(list(each.handlers), each.level, each.propagate) for each in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate


def logged(log_format: str, message: str, *arguments: object, fields: object = None, **settings: Any) -> str:
    """Return what one record gives."""
    stream = io.StringIO()
    configure_logging(log_format, "DEBUG", stream)
    logging.getLogger("giveway.test").warning(message, *arguments, extra={"fields": fields}, **settings)
    return stream.getvalue()


# Every line


def test_a_json_line_has_time_level_logger_message_and_fields() -> None:
    before = datetime.now(UTC)
    line = json.loads(logged("json", "hello %s", "you", fields={"tokens": 7, "seconds": 0.1234567}))
    assert {name: line[name] for name in ("level", "logger", "message")} == {
        "level": "warning",
        "logger": "giveway.test",
        "message": "hello you",
    }
    assert (line["tokens"], line["seconds"]) == (7, 0.123457)
    assert line["ts"].endswith("Z")
    assert abs((datetime.fromisoformat(line["ts"]) - before).total_seconds()) < 3600
    assert datetime.fromisoformat(line["ts"]).tzinfo == UTC


def test_a_text_line_is_for_people() -> None:
    line = logged("text", "hello", fields={"id": "a-1", "name": "two words", "none": None, "modes": {"swap": 1}})
    assert line[24:] == ' WARNING giveway.test: hello id=a-1 name="two words" none=- modes={"swap":1}\n'


@pytest.mark.parametrize("text", HOSTILE)
def test_a_clients_text_makes_no_second_line_and_no_second_field(text: str) -> None:
    # Goal: whoever reads the log may believe each line, and each field in it.
    for line in (logged("text", "bad %s", text), logged("text", "bad", fields={"model": text, "after": 1})):
        assert line.endswith("\n")
        assert line[:-1].isprintable()
        assert len(line.splitlines()) == 1
        line.encode()
    found = logged("text", "bad", fields={"model": text, "after": 1})
    _, _, behind = found.rstrip("\n").partition("model=")
    content, _, after = behind.rpartition(" after=")
    assert after == "1"
    if content.startswith('"'):
        json.loads(content.replace("\\x", "\\u00"))
    else:
        assert not set(content) & set(' ="')


@given(text=st.text(max_size=200) | st.text(alphabet=st.characters(categories=["Cs", "Cc", "Cf"]), max_size=50))
def test_any_text_gives_one_line_of_valid_json(text: str) -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "%s", (text,), None)
    record.fields = {"value": text, text: [text, {text: text}]}
    line = JsonLines().format(record)
    assert line.isascii()
    assert "\n" not in line
    read = json.loads(line)
    read["message"].encode()  # no lone surrogate comes out
    for plain in (read["message"], read["value"] if text != "value" else text):
        assert plain == text.encode("utf-8", "backslashreplace").decode()
    assert TextLines().format(record).isprintable()


def test_megabytes_are_cut() -> None:
    big = "x" * 10_000_000
    fields = {"a": big, big: 1, "list": [1] * 10**6, "deep": [[[[[[big]]]]]]}
    for log_format in ("json", "text"):
        line = logged(log_format, big, fields=fields)
        length = len(line)  # an assertion about the line itself would print it
        assert length < MAX_MESSAGE_CHARACTERS + 8 * MAX_VALUE_CHARACTERS + 8 * MAX_ITEMS
    read = json.loads(logged("json", big, fields=fields))
    assert len(read["message"]) == MAX_MESSAGE_CHARACTERS
    assert read["message"].endswith("x...")
    assert len(read["a"]) == MAX_VALUE_CHARACTERS
    assert len(read["list"]) == MAX_ITEMS


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (1 << 70, "0x4"),
        (2**64 - 1, 2**64 - 1),
        (b"bytes \xff", "b'bytes"),
        (object, "<class"),
        ({1: {2: {3: {4: 5}}}}, {"1": {"2": {"3": "{4: 5}"}}}),
        ((1, None, True), [1, None, True]),
    ],
)
def test_every_value_becomes_json(value: object, told: object) -> None:
    line = json.loads(logged("json", "x", fields={"value": value}))
    found = line["value"]
    assert found.startswith(told) if isinstance(told, str) else found == told
    assert logged("text", "x", fields={"value": value}).count("\n") == 1


def test_a_giant_number_is_no_error() -> None:
    # Goal: Python refuses to write so many digits.
    assert json.loads(logged("json", "x", fields={"value": 10**5000}))["value"].startswith("0x")


def test_fields_that_are_none_are_let_be_and_none_replaces_what_is_ours() -> None:
    assert "fields" not in json.loads(logged("json", "x", fields="not a mapping"))
    line = json.loads(logged("json", "x", fields={"level": "critical", "ts": "never", "message": "y"}))
    assert (line["level"], line["message"]) == ("warning", "x")


def raise_in_depth(depth: int) -> None:
    if depth:
        raise_in_depth_again(depth - 1)
    raise ValueError("first\n2026-01-01T00:00:00.000Z INFO forged\x1b[2J\ud800")


def raise_in_depth_again(depth: int) -> None:
    raise_in_depth(depth)


@pytest.mark.parametrize("depth", [0, 400])
def test_a_traceback_forges_no_line_and_has_an_end(depth: int) -> None:
    try:
        raise_in_depth(depth)
    except ValueError:
        text = logged("text", "failed", exc_info=True)
        line = json.loads(logged("json", "failed", exc_info=True))
    head, *rest = text.splitlines()
    assert head.endswith("giveway.test: failed")
    assert 2 <= len(rest) <= MAX_TRACEBACK_LINES
    assert all(each.startswith("    | ") and each.isprintable() for each in rest)
    assert any("ValueError: first" in each for each in rest)
    assert len(line["traceback"]) == len(rest)


# The line of a request


def test_an_ended_request_is_one_line_with_its_numbers() -> None:
    stream = io.StringIO()
    configure_logging("json", stream=stream)
    log_finished(END, model="smol", class_name="flex", tier="flex")
    line = json.loads(stream.getvalue())
    del line["ts"]
    assert line == {
        "level": "info",
        "logger": "giveway.server.request",
        "message": "request finished",
        "id": "chatcmpl-1",
        "alias": None,
        "class": "flex",
        "priority": 20,
        "tier": "flex",
        "key": "anybody",
        "model": "smol",
        "endpoint": "/v1/chat/completions",
        "stream": True,
        "batch": False,
        "status": 200,
        "client_gone": False,
        "choices": 1,
        "prompt_tokens": 7,
        "output_tokens": 5,
        "cached_tokens": 4,
        "recomputed_tokens": 3,
        "swapped_bytes": 4096,
        "preemptions": {"swap": 2},
        "finish_reasons": {"stop": 1},
        "queue_s": 0.25,
        "ttft_s": None,
        "e2e_s": 1.234568,
    }


@pytest.mark.parametrize("text", HOSTILE)
def test_a_name_that_a_client_chose_cannot_forge_the_end_of_another_request(text: str) -> None:
    for log_format in ("json", "text"):
        stream = io.StringIO()
        configure_logging(log_format, stream=stream)
        log_finished(replace(END, alias=text, status=499), model="smol", class_name="flex")
        (line,) = stream.getvalue().splitlines()
        assert "forged status" not in line or log_format == "json" or 'alias="' in line
        if log_format == "json":
            assert json.loads(line)["client_gone"] is True


# The process


def test_uvicorn_writes_through_the_same_handler_and_without_queries() -> None:
    # Goal: some clients put their key into the query, where it has no business in a log.
    logging.getLogger("uvicorn.access").addHandler(logging.StreamHandler(io.StringIO()))
    logging.getLogger("uvicorn").propagate = False
    stream = io.StringIO()
    configure_logging("json", stream=stream)
    logging.getLogger("uvicorn.error").info("Application startup complete.")
    access = logging.getLogger("uvicorn.access")
    form = '%s - "%s %s HTTP/%s" %d'
    for target in ("/v1/models?api_key=sk-secret", "//[broken?api_key=sk-secret"):
        access.info(form, "127.0.0.1:5", "GET", target, "1.1", 200)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["logger"] for line in lines] == ["uvicorn.error", "uvicorn.access", "uvicorn.access"]
    assert lines[1]["message"] == '127.0.0.1:5 - "GET /v1/models HTTP/1.1" 200'
    assert "secret" not in stream.getvalue()


def test_configuring_twice_leaves_one_handler() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("text", stream=first)
    configure_logging("json", stream=second)
    logging.getLogger("giveway").error("once")
    assert not first.getvalue()
    assert len(second.getvalue().splitlines()) == 1


def test_records_below_the_level_are_not_written() -> None:
    stream = io.StringIO()
    configure_logging("text", "warning", stream)
    log_finished(END, model="smol", class_name="flex")
    assert not stream.getvalue()


@pytest.mark.parametrize(("log_format", "level"), [("xml", "INFO"), ("text", "noisy")])
def test_an_unknown_format_or_level_is_refused(log_format: str, level: str) -> None:
    with pytest.raises(ConfigError, match=r"xml|noisy"):
        configure_logging(log_format, level)
