"""What is kept about files, batches and their lines, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from giveway.server.batch_jobs.ids import BatchId, FileId


class FilePurpose(StrEnum):
    """What a file is for, in OpenAI's words."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class BatchStatus(StrEnum):
    """Where a batch stands, in OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


_Item = TypeVar("_Item")

UNFINISHED = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)


class Outcome(StrEnum):
    """What became of a line, and so which of the two files it goes to."""

    COMPLETED = "completed"
    FAILED = "failed"


class ListOrder(StrEnum):
    """Order of a list by time of creation."""

    ASCENDING = "asc"
    DESCENDING = "desc"


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Which part of a list is wanted."""

    limit: int
    order: ListOrder = ListOrder.DESCENDING
    after: str | None = None  # an id of the listed kind, which need not exist any more; None: from the beginning


@dataclass(frozen=True, slots=True)
class Page(Generic[_Item]):
    """A part of a list."""

    items: tuple[_Item, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file below the data directory. Times are whole seconds since 1970."""

    id: FileId
    owner: str
    purpose: FilePurpose
    filename: str  # what its owner calls it; never part of a path
    num_bytes: int
    created_at: int
    expires_at: int | None  # None: it stays


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What somebody asks for who creates a batch."""

    endpoint: str
    input_file_id: FileId
    completion_window: str  # as it was written
    window_s: int
    metadata: Mapping[str, str] | None
    output_expires_after_s: int | None  # None: the output stays


@dataclass(frozen=True, slots=True)
class InputProblem:
    """Why an input file is refused."""

    code: str
    message: str
    line: int | None = None  # from 1; None: it concerns the whole file
    param: str | None = None


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of answers, in the words of `usage`."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch. Times are whole seconds since 1970; None: that has not happened."""

    id: BatchId
    owner: str
    endpoint: str
    input_file_id: FileId
    completion_window: str
    metadata: Mapping[str, str] | None
    output_expires_after_s: int | None
    status: BatchStatus
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    output_file_id: FileId | None  # None: not finished, or no line was answered
    error_file_id: FileId | None  # None: not finished, or no line failed
    problems: tuple[InputProblem, ...]
    num_lines: int  # 0 until the input has been checked
    num_completed: int
    num_failed: int
    model: str | None  # as the first line names it
    usage: TokenUsage


@dataclass(frozen=True, slots=True)
class LinePosition:
    """Where a request stands in its input file."""

    number: int  # of the line, from 1
    offset: int  # bytes
    num_bytes: int  # without the end of the line
    custom_id: str


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch, to be run."""

    batch_id: BatchId
    owner: str
    url: str  # /v1/chat/completions or /v1/completions
    custom_id: str
    body: dict[str, Any]  # an object without `stream: true`; nothing else about it is checked


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What the request would have been answered over HTTP. Status 429 and 503 mean: try again later."""

    status_code: int
    body: dict[str, Any]
    request_id: str


@dataclass(frozen=True, slots=True)
class FinishedLine:
    """The answer to a line as it will stand in a file."""

    batch_id: BatchId
    number: int
    outcome: Outcome
    text: bytes  # JSON, without the end of the line
    usage: TokenUsage


@dataclass(frozen=True, slots=True)
class LineResult:
    """What became of one line, for the files that a batch ends with."""

    number: int
    custom_id: str
    outcome: Outcome | None  # None: it was not answered, and has no text
    text: bytes | None


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What is going on, for metrics."""

    num_batches: int  # unfinished ones
    num_lines_waiting: int
    num_lines_under_way: int
