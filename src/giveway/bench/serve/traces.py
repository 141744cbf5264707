"""Public traces of arrivals, read line by line: they have up to millions of lines, and nothing in them is trusted.

| format | one request | time |
|---|---|---|
| Mooncake (JSON lines) | timestamp, input_length, output_length, hash_ids; here also priority | milliseconds |
| BurstGPT (CSV) | Timestamp, Request tokens, Response tokens, and columns that are not needed | seconds |
| Azure LLM inference (CSV) | TIMESTAMP, ContextTokens, GeneratedTokens | a date |

Source: the published files of the three projects (kvcache-ai/Mooncake, HPMLL/BurstGPT, Azure/AzurePublicDataset).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from giveway.bench.serve.load_class import MAX_TOKENS
from giveway.core.errors import ConfigError

MAX_LINE_CHARACTERS = 16 << 20  # a prompt of ten million tokens has fewer
_MAX_ABS_PRIORITY = 1 << 31
_MAX_TIME = 1e13  # in the trace's unit: some 300 years of milliseconds


class TraceFormat(Enum):
    """Whose file it is."""

    MOONCAKE = "mooncake"
    BURSTGPT = "burstgpt"
    AZURE = "azure"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    due_s: float  # after the first request of the trace, before scaling
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()  # equal ids: equal blocks of 512 tokens; empty: shares nothing
    priority: int | None = None  # None: the line has none


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a look through the whole trace has found."""

    format: TraceFormat
    num_requests: int
    num_left_out: int  # lines without prompt or output tokens: requests that failed when the trace was taken
    last_due_s: float
    priorities: tuple[int | None, ...]  # in order of appearance


class _LineError(ValueError):
    """A line is wrong; the message says how, not where."""


def find_format(path: Path) -> TraceFormat:
    """Tell the format from the first line. Raises ConfigError if it is none of the three."""
    with _open(path) as file:
        line = file.readline(4096).strip()
    if line.startswith("{"):
        return TraceFormat.MOONCAKE
    names = next(csv.reader([line]), [])
    for trace_format, columns in _COLUMNS.items():
        if {name.strip() for name in names} >= set(columns):
            return trace_format
    known = "; ".join(f"{trace_format.value}: {', '.join(columns)}" for trace_format, columns in _COLUMNS.items())
    raise ConfigError(
        f"{path}: neither JSON lines (mooncake) nor a CSV file with known columns ({known}). Name it with "
        "--trace-format if the first line is damaged."
    )


def look_through(
    path: Path, trace_format: TraceFormat, *, limit: int | None, until_s: float | None = None
) -> TraceSummary:
    """Check every line that will be replayed, before anything is sent. Raises ConfigError with the line's number.

    limit: requests at most. until_s: time of the last one at most, before scaling. None: no such limit.
    """
    num_requests, last_due_s, num_left_out = 0, 0.0, 0
    priorities: dict[int | None, None] = {}
    for request in _every(path, trace_format):
        if num_requests == limit or (until_s is not None and request.due_s > until_s):
            break
        if _is_empty(request):
            num_left_out += 1
            continue
        num_requests, last_due_s = num_requests + 1, request.due_s
        priorities[request.priority] = None
    if num_requests == 0:
        raise ConfigError(f"{path}: no request with prompt and output tokens in this trace")
    return TraceSummary(trace_format, num_requests, num_left_out, last_due_s, tuple(priorities))


def read_trace(path: Path, trace_format: TraceFormat, *, limit: int | None) -> Iterator[TraceRequest]:
    """Yield the first `limit` requests (None: all) that have prompt and output tokens.

    Raises ConfigError with path and line number: not readable, a field missing or of another kind, time going back.
    """
    yield from islice((request for request in _every(path, trace_format) if not _is_empty(request)), limit)


def _every(path: Path, trace_format: TraceFormat) -> Iterator[TraceRequest]:
    lines = _mooncake_lines(path) if trace_format is TraceFormat.MOONCAKE else _csv_lines(path, trace_format)
    return _from_zero(path, lines)


def _is_empty(request: TraceRequest) -> bool:
    return request.prompt_tokens == 0 or request.output_tokens == 0


@dataclass(frozen=True, slots=True)
class _Line:
    """One line with the trace's own time, in seconds."""

    number: int
    request: TraceRequest


def _from_zero(path: Path, lines: Iterator[_Line]) -> Iterator[TraceRequest]:
    first_s: float | None = None
    latest_s = -math.inf
    for line in lines:
        request = line.request
        if request.due_s < latest_s:
            raise ConfigError(
                f"{path}, line {line.number}: its time is {latest_s - request.due_s:g} s before that of the line "
                "above; sort the file by time"
            )
        latest_s = request.due_s
        first_s = request.due_s if first_s is None else first_s
        yield TraceRequest(
            request.due_s - first_s, request.prompt_tokens, request.output_tokens, request.block_ids, request.priority
        )


def _open(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8-sig", errors="replace", newline="")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _physical_lines(path: Path, file: TextIO) -> Iterator[str]:
    number = 0
    while line := file.readline(MAX_LINE_CHARACTERS + 1):
        number += 1
        if len(line) > MAX_LINE_CHARACTERS:
            raise ConfigError(f"{path}, line {number}: longer than {MAX_LINE_CHARACTERS} characters; this is no trace")
        yield line


# Mooncake


def _mooncake_lines(path: Path) -> Iterator[_Line]:
    with _open(path) as file:
        for number, line in enumerate(_physical_lines(path, file), start=1):
            if line.strip():
                try:
                    yield _Line(number, _mooncake_request(line))
                except _LineError as error:
                    raise ConfigError(f"{path}, line {number}: {error}") from None


def _mooncake_request(line: str) -> TraceRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _LineError(f"not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise _LineError(f"a JSON object is needed, found {type(fields).__name__}")
    timestamp = fields.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        raise _LineError(f"timestamp is {timestamp!r}; milliseconds are needed")
    block_ids = fields.get("hash_ids", [])
    if not isinstance(block_ids, list) or not all(_is_whole(each) for each in block_ids):
        raise _LineError("hash_ids must be a list of whole numbers")
    priority = fields.get("priority")
    if priority is not None and not (_is_whole(priority) and abs(priority) < _MAX_ABS_PRIORITY):
        raise _LineError(f"priority is {priority!r}; a whole number is needed")
    return TraceRequest(
        _checked_time(timestamp, "timestamp") / 1000,
        _checked_tokens(fields.get("input_length"), "input_length"),
        _checked_tokens(fields.get("output_length"), "output_length"),
        tuple(block_ids),
        priority,
    )


# CSV


_COLUMNS = {
    TraceFormat.BURSTGPT: ("Timestamp", "Request tokens", "Response tokens"),
    TraceFormat.AZURE: ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
}


def _csv_lines(path: Path, trace_format: TraceFormat) -> Iterator[_Line]:
    with _open(path) as file:
        reader = csv.reader(_physical_lines(path, file), strict=True)
        try:
            names = [name.strip() for name in next(reader, [])]
            places = _places(path, names, _COLUMNS[trace_format])
            for cells in reader:
                if cells:
                    yield _Line(reader.line_num, _csv_request(cells, len(names), places, trace_format))
        except (csv.Error, _LineError) as error:
            raise ConfigError(f"{path}, line {reader.line_num}: {error}") from None


def _places(path: Path, names: Sequence[str], wanted: Sequence[str]) -> list[int]:
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ConfigError(f"{path}, line 1: no column {missing[0]!r}; found {', '.join(names)[:200] or 'nothing'}")
    return [names.index(name) for name in wanted]


def _csv_request(cells: list[str], width: int, places: Sequence[int], trace_format: TraceFormat) -> TraceRequest:
    if len(cells) != width:
        raise _LineError(f"{len(cells)} cells, the header has {width}")
    when, prompt, output = (cells[place].strip() for place in places)
    time_name, prompt_name, output_name = _COLUMNS[trace_format]
    return TraceRequest(
        _date_s(when) if trace_format is TraceFormat.AZURE else _checked_time(_number(when, time_name), time_name),
        _checked_tokens(_number(prompt, prompt_name), prompt_name),
        _checked_tokens(_number(output, output_name), output_name),
    )


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _LineError(f"{name} is {text[:40]!r}; a number is needed") from None


def _date_s(text: str) -> float:
    """Seconds since 1970; a date without a zone counts as UTC, which its differences do not depend on."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise _LineError(f"TIMESTAMP is {text[:40]!r}; a date such as 2023-11-16 18:15:46.68 is needed") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


# Both


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked_time(value: float, name: str) -> float:
    if not abs(value) <= _MAX_TIME:  # so that NaN fails too
        raise _LineError(f"{name} is {value!r}; this is no time")
    return float(value)


def _checked_tokens(value: Any, name: str) -> int:
    """Return the number. A whole number written as 472.0 is one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_TOKENS or value != int(value):
        raise _LineError(f"{name} is {value!r}; a whole number from 0 to {MAX_TOKENS} is needed")
    return int(value)
