"""The input of a batch: read line by line, nothing trusted, never more than one line in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from giveway.core.strict_json import parse_json
from giveway.server.batch_jobs.limits import BatchLimits
from giveway.server.batch_jobs.records import BatchLine, BatchRecord, InputProblem, LinePosition

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")

_MAX_CUSTOM_ID_CHARACTERS = 512
_MAX_PROBLEMS = 50  # reported; whoever sends a file of nonsense does not need all of it back
_MAX_MODEL_CHARACTERS = 256
_PIECE_BYTES = 1 << 20
_LINES_BETWEEN_LOOKS = 256


class StoppedError(Exception):
    """Somebody asked for a long piece of work to end; it has changed nothing."""


class LineChangedError(Exception):
    """A line of an input file is not what it was when it was checked: somebody changed the file on the disk."""


class _BadLineError(Exception):
    """A line is refused."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(slots=True)
class CheckedInput:
    """What an input file holds. It is good if there are no problems."""

    lines: list[LinePosition] = field(default_factory=list)
    problems: list[InputProblem] = field(default_factory=list)
    model: str | None = None  # as the first line names it; None: it names none


@dataclass(frozen=True, slots=True)
class _RawLine:
    number: int  # from 1
    offset: int
    content: bytes | None  # without the end of the line; None: longer than the limit


def check_input(path: Path, endpoint: str, limits: BatchLimits, is_stopped: Callable[[], bool]) -> CheckedInput:
    """Check every line of an input file. Blank lines are passed over.

    is_stopped: looked at again and again; when it says so, StoppedError is raised. Raises OSError.
    """
    found = CheckedInput()
    digests: set[bytes] = set()  # of custom ids: 16 bytes each, however long they are
    with path.open("rb") as file:
        for raw in _raw_lines(file, limits.max_line_bytes):
            if raw.number % _LINES_BETWEEN_LOOKS == 0 and is_stopped():
                raise StoppedError
            if len(found.lines) == limits.max_lines:
                text = f"the file has more than {limits.max_lines} requests, the limit of a batch"
                found.problems.append(InputProblem("too_many_tasks", text, raw.number))
                break
            try:
                _check_line(raw, endpoint, limits, found, digests)
            except _BadLineError as error:
                found.problems.append(InputProblem(error.code, error.message, raw.number, error.param))
                if len(found.problems) == _MAX_PROBLEMS:
                    break
    if not found.lines and not found.problems:
        found.problems.append(InputProblem("empty_file", "the file has no requests"))
    return found


def read_line(path: Path, position: LinePosition, batch: BatchRecord) -> BatchLine:
    """Read one line of an input file that was checked. Raises LineChangedError; OSError."""
    try:
        with path.open("rb") as file:
            file.seek(position.offset)
            content = file.read(position.num_bytes)
        values = _parse(content)
    except (FileNotFoundError, _BadLineError) as error:
        raise LineChangedError from error
    if values.get("custom_id") != position.custom_id or not isinstance(values.get("body"), dict):
        raise LineChangedError
    return BatchLine(batch.id, batch.owner, batch.endpoint, position.custom_id, values["body"])


def _raw_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[_RawLine]:
    offset = 0
    for number in count(1):
        piece = file.readline(max_line_bytes + 1)
        if not piece:
            return
        content, num_bytes = piece.rstrip(b"\r\n"), len(piece)
        is_long = len(content) > max_line_bytes
        while not piece.endswith(b"\n") and (piece := file.readline(_PIECE_BYTES)):
            num_bytes += len(piece)
            is_long = is_long or bool(piece.strip(b"\r\n"))
        if is_long or content.strip():
            yield _RawLine(number, offset, None if is_long else content)
        offset += num_bytes


def _check_line(raw: _RawLine, endpoint: str, limits: BatchLimits, found: CheckedInput, digests: set[bytes]) -> None:
    if raw.content is None:
        raise _BadLineError("line_too_long", f"the line is longer than {limits.max_line_bytes} bytes, the limit")
    values = _parse(raw.content)
    custom_id = _custom_id(values)
    digest = blake2b(custom_id.encode(), digest_size=16).digest()
    if digest in digests:
        text = f"the custom_id {_shorten(custom_id)} stands in an earlier line as well"
        raise _BadLineError("duplicate_custom_id", text, "custom_id")
    digests.add(digest)
    _check_target(values, endpoint)
    model = values["body"].get("model")
    if not found.lines and isinstance(model, str) and len(model) <= _MAX_MODEL_CHARACTERS and _is_encodable(model):
        found.model = model
    found.lines.append(LinePosition(raw.number, raw.offset, len(raw.content), custom_id))


def _parse(content: bytes) -> dict[str, Any]:
    try:
        value = parse_json(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _BadLineError("invalid_json_line", f"the line is not UTF-8 (byte {error.start} of it)") from error
    except RecursionError as error:
        raise _BadLineError("invalid_json_line", "the line is nested too deeply") from error
    except ValueError as error:
        raise _BadLineError("invalid_json_line", f"the line is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise _BadLineError("invalid_json_line", f"the line holds {_shorten(value)}; an object is needed")
    return value


def _custom_id(values: dict[str, Any]) -> str:
    value = _needed(values, "custom_id")
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_CUSTOM_ID_CHARACTERS:
        text = f"custom_id is {_shorten(value)}; it must be a text of 1 to {_MAX_CUSTOM_ID_CHARACTERS} characters"
        raise _BadLineError("invalid_custom_id", text, "custom_id")
    if not _is_encodable(value):
        text = f"custom_id is {_shorten(value)}: a lone surrogate, which the output cannot carry"
        raise _BadLineError("invalid_custom_id", text, "custom_id")
    return value


def _check_target(values: dict[str, Any], endpoint: str) -> None:
    method = _needed(values, "method")
    if method != "POST":
        raise _BadLineError("invalid_method", f"method is {_shorten(method)}; it must be 'POST'", "method")
    url = _needed(values, "url")
    if url != endpoint:
        text = f"url is {_shorten(url)}, but the batch was created for {endpoint}"
        raise _BadLineError("url_mismatch", text, "url")
    body = _needed(values, "body")
    if not isinstance(body, dict):
        raise _BadLineError("invalid_body", f"body is {_shorten(body)}; it must be an object", "body")
    if body.get("stream"):
        raise _BadLineError("invalid_body", "body.stream is set; a batch has nobody to stream to", "body.stream")


def _needed(values: dict[str, Any], name: str) -> object:
    if values.get(name) is None:
        raise _BadLineError("missing_required_parameter", f"{name} is missing", name)
    return values[name]


def _is_encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _shorten(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = ascii(value)  # whatever it holds, a message can carry it
    return text if len(text) <= 60 else text[:57] + "..."
