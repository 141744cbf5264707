"""What the JSON of an answer says, read without trusting its shape: one event of a stream, or a whole answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MAX_DETAIL_CHARACTERS = 200  # of a server's message in the report

_MAX_COUNT = 1 << 40
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning")  # of a chat delta or message; names differ by server


class UnreadableAnswerError(ValueError):
    """Not JSON, or not the shape that the protocol has."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the server counted; None: it does not say."""

    prompt_tokens: int | None
    output_tokens: int | None


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """One event of a stream, or a whole answer."""

    num_tokens: int = 0  # that came with it, as far as it shows: an event with text counts as one
    usage: Usage | None = None  # None: it has none
    is_end: bool = False  # a finish reason came
    error: str | None = None  # the server's message; None: no error


def read_part(text: str | bytes, *, is_error: bool = False) -> AnswerPart:
    """Read one event's data or a whole answer. is_error: the event is named so. Raises UnreadableAnswerError."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        if is_error:
            return AnswerPart(error=as_detail(text))
        raise UnreadableAnswerError(f"not JSON: {as_detail(text)}") from None
    if not isinstance(content, dict):
        raise UnreadableAnswerError(f"no JSON object: {as_detail(text)}")
    error = content.get("error")
    if error is not None or is_error or content.get("object") == "error":
        return AnswerPart(error=_error_text(content if error is None else error))
    choices = content.get("choices")
    if choices is not None and not isinstance(choices, list):
        raise UnreadableAnswerError(f"choices is no list: {as_detail(text)}")
    parts = [choice for choice in choices or () if isinstance(choice, dict)]
    return AnswerPart(
        num_tokens=sum(_num_tokens(choice) for choice in parts),
        usage=_usage(content.get("usage")),
        is_end=any(choice.get("finish_reason") for choice in parts),
    )


def as_detail(text: str | bytes) -> str:
    """Return the beginning of what a server sent, as one line that is safe to print."""
    shown = text[: 4 * MAX_DETAIL_CHARACTERS]
    shown = shown.decode(errors="replace") if isinstance(shown, bytes) else shown
    line = " ".join("".join(character if character.isprintable() else " " for character in shown).split())
    return line[:MAX_DETAIL_CHARACTERS]


def _error_text(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return as_detail(message if isinstance(message, str) else json.dumps(error))


def _num_tokens(choice: dict[str, Any]) -> int:
    token_ids = choice.get("token_ids")
    if isinstance(token_ids, list) and token_ids:
        return len(token_ids)
    message = choice.get("delta", choice.get("message"))
    if not isinstance(message, dict):  # completions
        text = choice.get("text")
        return int(isinstance(text, str) and bool(text or not choice.get("finish_reason")))
    if any(isinstance(message.get(name), str) and message[name] for name in _TEXT_FIELDS) or message.get("tool_calls"):
        return 1
    # An empty text in the middle is a token that has no text yet, such as a part of a character; beside a role it is
    # the opening of the message, beside a finish reason its end.
    return int(message.get("content") == "" and "role" not in message and not choice.get("finish_reason"))


def _usage(usage: Any) -> Usage | None:
    if not isinstance(usage, dict):
        return None
    return Usage(_count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")))


def _count(value: Any) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and 0 <= value < _MAX_COUNT else None
