"""Logs of the server process: one line for each record, for people or as JSON, that no client's text can forge.

Never an answer or a key, and a prompt only where that was asked for: a record has a message of ours, and `fields` of
names and numbers.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO
from urllib.parse import urlsplit

from giveway.core.errors import ConfigError
from giveway.server.finished import FinishedRequest
from giveway.server.http_errors import CLIENT_CLOSED

MAX_MESSAGE_CHARACTERS = 8192
MAX_VALUE_CHARACTERS = 1024
MAX_TRACEBACK_LINES = 200
MAX_BITS = 64  # of an integer: readers of JSON know no larger ones
MAX_ITEMS = 64  # of a list or an object among the fields

_FINISHED = logging.getLogger("giveway.server.request")
_PROMPT = logging.getLogger("giveway.server.prompt")
_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


def log_finished(ending: FinishedRequest, *, model: str, class_name: str, tier: str | None = None) -> None:
    """Write the one line of an API request that has ended. tier: the `service_tier` it was served under."""
    fields: dict[str, Any] = {
        "id": ending.api_id,
        "alias": ending.alias,
        "class": class_name,
        "priority": ending.priority,
        "tier": tier,
        "key": ending.key_name,
        "model": model,
        "endpoint": ending.endpoint,
        "stream": ending.is_stream,
        "batch": ending.is_batch,
        "status": ending.status,
        "client_gone": ending.status == CLIENT_CLOSED,
        "choices": ending.num_choices,
        "prompt_tokens": ending.num_prompt_tokens,
        "output_tokens": ending.num_output_tokens,
        "cached_tokens": ending.num_cached_tokens,
        "recomputed_tokens": ending.num_recomputed_tokens,
        "swapped_bytes": ending.swapped_bytes,
        "preemptions": dict(ending.preemptions),
        "finish_reasons": dict(ending.finish_reasons),
        "queue_s": ending.queue_s,
        "ttft_s": ending.ttft_s,
        "e2e_s": ending.duration_s,
    }
    _FINISHED.info("request finished", extra={"fields": fields})


def log_prompt(api_id: str, prompt: str) -> None:
    """Write down a prompt, as far as a line goes; only where the operator asked for it."""
    _PROMPT.info("prompt", extra={"fields": {"id": api_id, "prompt": prompt}})


def configure_logging(
    log_format: str = "text", level: int | str = logging.INFO, stream: TextIO | None = None
) -> logging.Handler:
    """Let every logger of this process, uvicorn's too, write to one stream; called again, it replaces the handler.

    log_format: "text" or "json". level: a number, or a name in upper or lower case. stream: None: standard error. Run
    uvicorn with `log_config=None`, or it sets up its own. Returns the handler. Raises ConfigError for an unknown format
    or level.
    """
    if log_format not in _FORMATS:
        raise ConfigError(f"log format {log_format!r} is none of {', '.join(_FORMATS)}")
    root = logging.getLogger()
    try:
        root.setLevel(level.upper() if isinstance(level, str) else level)
    except ValueError as error:
        raise ConfigError(f"log level {level!r} is none of debug, info, warning, error, critical") from error
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_FORMATS[log_format]())
    handler.addFilter(_without_query)
    for old in list(root.handlers):
        if isinstance(old.formatter, TextLines | JsonLines):
            root.removeHandler(old)
    root.addHandler(handler)
    for name in _UVICORN:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
    return handler


def _without_query(record: logging.LogRecord) -> bool:
    """Take the query out of uvicorn's access lines: clients put keys there."""
    arguments = record.args
    if record.name == "uvicorn.access" and isinstance(arguments, tuple) and len(arguments) == 5:
        client, method, path, version, status = arguments
        record.args = (client, method, _path_of(str(path)), version, status)
    return True


def _path_of(target: str) -> str:
    try:
        return urlsplit(target).path
    except ValueError:
        return target.partition("?")[0]


# Lines


class JsonLines(logging.Formatter):
    """One JSON object a line: ts, level, logger, message, then the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        line: dict[str, Any] = {
            "ts": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _short(record.getMessage(), MAX_MESSAGE_CHARACTERS),
        }
        for name, value in _fields_of(record).items():
            line.setdefault(_short(str(name), MAX_VALUE_CHARACTERS), _plain(value))
        traceback = _traceback(self, record)
        if traceback:
            line["traceback"] = [_short(each, MAX_MESSAGE_CHARACTERS) for each in traceback]
        return json.dumps(line, ensure_ascii=True, allow_nan=False)


class TextLines(logging.Formatter):
    """A line for people: time, level, logger, message, then name=value. Lines of a traceback begin with `    | `."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        message = printable(_cut(record.getMessage(), MAX_MESSAGE_CHARACTERS))
        parts = [_timestamp(record.created), f"{record.levelname:<7}", f"{record.name}:", message]
        parts += [f"{_field_name(name)}={_in_text(value)}" for name, value in _fields_of(record).items()]
        lines = [" ".join(parts)]
        lines += [f"    | {printable(_cut(each, MAX_MESSAGE_CHARACTERS))}" for each in _traceback(self, record)]
        return "\n".join(lines)


_FORMATS: dict[str, type[logging.Formatter]] = {"text": TextLines, "json": JsonLines}


def printable(text: str) -> str:
    """Return text with everything escaped that could end a line, move a cursor, or turn the direction of writing."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def _fields_of(record: logging.LogRecord) -> Mapping[Any, Any]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}


def _timestamp(seconds: float) -> str:
    """Return a moment in ISO 8601, UTC, with milliseconds."""
    whole = math.floor(seconds)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{int((seconds - whole) * 1000):03d}Z"


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    """Return the lines of a record's traceback and stack; of very many the last ones, which name the error."""
    parts = []
    if record.exc_info and record.exc_info[0] is not None:
        parts.append(formatter.formatException(record.exc_info))
    elif record.exc_text:
        parts.append(record.exc_text)
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return [line for part in parts for line in part.splitlines()][-MAX_TRACEBACK_LINES:]


def _field_name(name: object) -> str:
    return printable(_cut(str(name), MAX_VALUE_CHARACTERS)).replace("=", "_").replace(" ", "_")


def _in_text(value: object) -> str:
    """Return a value of a field so that it cannot be taken for another field."""
    if isinstance(value, str) and value.isprintable() and value and not set(value) & set(" =\"'\\{}[],"):
        return _cut(value, MAX_VALUE_CHARACTERS)
    plain = _plain(value)
    return "-" if plain is None else printable(json.dumps(plain, ensure_ascii=False, separators=(",", ":")))


def _plain(value: object, depth: int = 3) -> Any:
    """Return a value as JSON has it. Whatever it is, something comes of it: a log must not raise."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= MAX_BITS else _short(hex(value), MAX_VALUE_CHARACTERS)
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping) and depth:
        items = list(value.items())[:MAX_ITEMS]
        return {_short(str(key), MAX_VALUE_CHARACTERS): _plain(each, depth - 1) for key, each in items}
    if isinstance(value, list | tuple | set | frozenset) and depth:
        return [_plain(each, depth - 1) for each in list(value)[:MAX_ITEMS]]
    return _short(str(value), MAX_VALUE_CHARACTERS)


def _short(text: str, limit: int) -> str:
    """Return the beginning of a text, lone surrogates shown as escapes: many readers of JSON refuse them."""
    return _cut(text, limit).encode("utf-8", "backslashreplace").decode()


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
