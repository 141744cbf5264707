"""Files and batches in OpenAI's words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from giveway.server.batch_jobs.ids import FileId
from giveway.server.batch_jobs.input_check import ENDPOINTS
from giveway.server.batch_jobs.records import (
    BatchRecord,
    BatchStatus,
    FileRecord,
    InputProblem,
    ListOrder,
    NewBatch,
    Page,
    PageRequest,
)
from giveway.server.batch_jobs.upload import checked_expiry_s
from giveway.server.http_errors import ApiError

_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])", re.ASCII)
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}
_MAX_WINDOW_S = 366 * 86400
_MAX_METADATA = 16
_MAX_METADATA_KEY, _MAX_METADATA_VALUE = 64, 512  # characters
_Item = TypeVar("_Item", FileRecord, BatchRecord)


class OutputExpiresAfter(BaseModel):
    """When the files of a batch expire."""

    model_config = ConfigDict(strict=True)

    anchor: str = Field(description="Always `created_at`: of the file.")
    seconds: int = Field(description="From 3600 to 2592000.")


class CreateBatch(BaseModel):
    """The body of `POST /v1/batches`."""

    model_config = ConfigDict(strict=True)

    input_file_id: str
    endpoint: str = Field(description="Every line names it as well.", json_schema_extra={"enum": list(ENDPOINTS)})
    completion_window: str = Field(description="`24h`, or another number with `m`, `h` or `d`.")
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiresAfter | None = None


def parse_new_batch(content: bytes) -> NewBatch:
    """Return what a body asks for. Raises ApiError (400) that names the field."""
    try:
        values = CreateBatch.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(step) for step in first["loc"]) or None
        raise ApiError(400, f"{param or 'the body'}: {first['msg']}", param=param) from error
    if values.endpoint not in ENDPOINTS:
        raise ApiError(
            400,
            f"the endpoint {values.endpoint[:60]!r} is not supported; {' and '.join(ENDPOINTS)} are",
            param="endpoint",
        )
    expiry = values.output_expires_after
    if expiry is not None and expiry.anchor != "created_at":
        raise ApiError(400, "output_expires_after.anchor must be 'created_at'", param="output_expires_after.anchor")
    return NewBatch(
        values.endpoint,
        FileId(values.input_file_id),  # looked up before anything is done with it
        values.completion_window,
        _window_s(values.completion_window),
        _checked_metadata(values.metadata),
        None if expiry is None else checked_expiry_s(expiry.seconds, "output_expires_after.seconds"),
    )


def _window_s(text: str) -> int:
    match = _WINDOW.fullmatch(text)
    window_s = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < window_s <= _MAX_WINDOW_S:
        raise ApiError(
            400,
            f"completion_window is {text[:60]!r}; it must be '24h', or another number with m, h or d, up to 366 days",
            param="completion_window",
        )
    return window_s


def _checked_metadata(metadata: dict[str, str] | None) -> dict[str, str] | None:
    if metadata is None:
        return None
    if len(metadata) > _MAX_METADATA:
        raise ApiError(400, f"metadata has {len(metadata)} pairs; {_MAX_METADATA} is the limit", param="metadata")
    for key, value in metadata.items():
        if len(key) > _MAX_METADATA_KEY or len(value) > _MAX_METADATA_VALUE:
            text = f"metadata: keys have up to {_MAX_METADATA_KEY} characters and values up to {_MAX_METADATA_VALUE}"
            raise ApiError(400, text, param="metadata")
    return metadata


def parse_page(
    limit: str | None,
    order: str | None,
    after: str | None,
    *,
    default_limit: int,
    max_limit: int,
    parse_id: Callable[[str], str | None],
) -> PageRequest:
    """Return which part of a list is wanted, from the query. Raises ApiError (400) that names the field."""
    number = default_limit
    if limit is not None:
        number = int(limit) if limit.isascii() and limit.isdecimal() and len(limit) < 10 else 0
        if not 1 <= number <= max_limit:
            raise ApiError(400, f"limit is {limit[:60]!r}; it must be from 1 to {max_limit}", param="limit")
    if order is not None and order not in tuple(ListOrder):
        raise ApiError(400, f"order is {order[:60]!r}; it must be asc or desc", param="order")
    cursor = None if not after else parse_id(after)
    if after and cursor is None:
        raise ApiError(400, f"after is {after[:60]!r}, which is no id of this list", param="after")
    return PageRequest(number, ListOrder(order or ListOrder.DESCENDING), cursor)


def file_object(record: FileRecord) -> dict[str, Any]:
    """Return a file as OpenAI shows it."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose.value,
        "status": "processed",
        "status_details": None,
    }


def batch_object(record: BatchRecord) -> dict[str, Any]:
    """Return a batch as OpenAI shows it."""
    problems = [_problem(problem) for problem in record.problems]
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": record.model,
        "errors": {"object": "list", "data": problems} if record.status is BatchStatus.FAILED else None,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": record.status.value,
        "output_file_id": record.output_file_id,
        "error_file_id": record.error_file_id,
        "created_at": record.created_at,
        "in_progress_at": record.in_progress_at,
        "expires_at": record.expires_at,
        "finalizing_at": record.finalizing_at,
        "completed_at": record.completed_at,
        "failed_at": record.failed_at,
        "expired_at": record.expired_at,
        "cancelling_at": record.cancelling_at,
        "cancelled_at": record.cancelled_at,
        "request_counts": {
            "total": record.num_lines,
            "completed": record.num_completed,
            "failed": record.num_failed,
        },
        "usage": {
            "input_tokens": record.usage.input_tokens,
            "input_tokens_details": {"cached_tokens": record.usage.cached_tokens},
            "output_tokens": record.usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": record.usage.reasoning_tokens},
            "total_tokens": record.usage.input_tokens + record.usage.output_tokens,
        },
        "metadata": None if record.metadata is None else dict(record.metadata),
    }


def list_object(page: Page[_Item], show: Callable[[_Item], dict[str, Any]]) -> dict[str, Any]:
    """Return a part of a list as OpenAI shows it."""
    items: Sequence[_Item] = page.items
    return {
        "object": "list",
        "data": [show(item) for item in items],
        "first_id": items[0].id if items else None,
        "last_id": items[-1].id if items else None,
        "has_more": page.has_more,
    }


def _problem(problem: InputProblem) -> dict[str, Any]:
    return {"code": problem.code, "line": problem.line, "message": problem.message, "param": problem.param}
