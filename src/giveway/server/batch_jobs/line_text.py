"""How a finished line is written into the files of a batch."""

from __future__ import annotations

import json
import secrets
from typing import Any

from giveway.server.batch_jobs.ids import BatchId
from giveway.server.batch_jobs.records import FinishedLine, LineAnswer, LinePosition, Outcome, TokenUsage


def answered_line(batch_id: BatchId, position: LinePosition, answer: LineAnswer) -> FinishedLine:
    """Write down an answer; one that is no success goes to the file of errors, with its body.

    Raises ValueError, TypeError or RecursionError if the body is not JSON.
    """
    is_success = 200 <= answer.status_code < 300
    response = {"status_code": answer.status_code, "request_id": answer.request_id, "body": answer.body}
    return FinishedLine(
        batch_id,
        position.number,
        Outcome.COMPLETED if is_success else Outcome.FAILED,
        _line(position.custom_id, response, None),
        _usage(answer.body.get("usage")) if is_success else TokenUsage(),
    )


def broken_line(batch_id: BatchId, position: LinePosition, code: str, message: str) -> FinishedLine:
    """Write down that there is no answer. code: a word for programs."""
    text = error_text(position.custom_id, code, message)
    return FinishedLine(batch_id, position.number, Outcome.FAILED, text, TokenUsage())


def error_text(custom_id: str, code: str, message: str) -> bytes:
    """Return the line for a request that has no answer."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    values = {
        "id": f"batch_req_{secrets.token_hex(16)}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can carry
        return json.dumps(values, allow_nan=False, separators=(",", ":")).encode()


def _usage(value: object) -> TokenUsage:
    """Return the counts of an answer's `usage`; what is not there counts nothing."""
    return TokenUsage(
        _count(value, "prompt_tokens"),
        _count(value, "prompt_tokens_details", "cached_tokens"),
        _count(value, "completion_tokens"),
        _count(value, "completion_tokens_details", "reasoning_tokens"),
    )


def _count(value: object, *names: str) -> int:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40 else 0
