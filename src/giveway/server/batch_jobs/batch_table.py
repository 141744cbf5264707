"""Batches, their lines and the answers: rows in the database, and the only places where a batch changes its status."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from giveway.core.errors import InvariantError
from giveway.server.batch_jobs.database import Database
from giveway.server.batch_jobs.file_table import find_file, insert_file
from giveway.server.batch_jobs.ids import BatchId, FileId, IdMaker, parse_batch_id
from giveway.server.batch_jobs.limits import BatchLimits
from giveway.server.batch_jobs.records import (
    UNFINISHED,
    BatchRecord,
    BatchStatus,
    FilePurpose,
    FileRecord,
    FinishedLine,
    InputProblem,
    LinePosition,
    LineResult,
    ListOrder,
    NewBatch,
    Outcome,
    Page,
    PageRequest,
    TokenUsage,
)
from giveway.server.batch_jobs.steps import DurableStep
from giveway.server.http_errors import ApiError

_UNFINISHED = ", ".join(f"'{status}'" for status in UNFINISHED)
_USAGE = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
_COLUMNS = (
    "id", "owner", "endpoint", "input_file_id", "completion_window", "metadata", "output_expires_after_s", "status",
    "created_at", "expires_at", "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
    "cancelling_at", "cancelled_at", "output_file_id", "error_file_id", "problems", "num_lines", "num_completed",
    "num_failed", "model", *_USAGE,
)  # fmt: skip
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM batches"  # noqa: S608 - words of our own, here and below
_RESULTS_AT_A_TIME = 200


class BatchTable:
    """The batches of all owners. Methods may be called from any thread and wait for the disk."""

    def __init__(self, database: Database, ids: IdMaker, limits: BatchLimits, clock: Callable[[], float]) -> None:
        self._database = database
        self._ids = ids
        self._limits = limits
        self._clock = clock

    def create(self, owner: str, wanted: NewBatch) -> BatchRecord:
        """Add a batch, status validating.

        Raises ApiError: 404 or 400 for its input, 429 for too many batches; OutputFileError.
        """
        batch_id, now = self._ids.new_batch_id(), int(self._clock())
        with self._database.write(DurableStep.BATCH_RECORDED) as connection:
            source = find_file(connection, owner, wanted.input_file_id)
            if source.purpose is not FilePurpose.BATCH:
                raise ApiError(
                    400, f"{source.id} has the purpose {source.purpose.value}, not batch", param="input_file_id"
                )
            query = f"SELECT count(*) FROM batches WHERE owner = ? AND status IN ({_UNFINISHED})"  # noqa: S608
            (num_unfinished,) = connection.execute(query, (owner,)).fetchone()
            if num_unfinished >= self._limits.max_unfinished_batches:
                raise ApiError(
                    429,
                    f"{num_unfinished} batches are not finished, as many as one key may have. Wait, or cancel one",
                    code="too_many_batches",
                )
            metadata = None if wanted.metadata is None else json.dumps(dict(wanted.metadata))
            connection.execute(
                "INSERT INTO batches (id, owner, endpoint, input_file_id, completion_window, metadata,"
                " output_expires_after_s, status, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    batch_id, owner, wanted.endpoint, source.id, wanted.completion_window, metadata,
                    wanted.output_expires_after_s, BatchStatus.VALIDATING, now, now + wanted.window_s,
                ),
            )  # fmt: skip
            return _known(connection, batch_id)

    def get(self, owner: str, text: str) -> BatchRecord:
        """Return a batch of this owner. Raises ApiError (404) for everything else, whatever the reason."""
        with self._database.read() as connection:
            return _find(connection, owner, text)

    def page(self, owner: str, wanted: PageRequest) -> Page[BatchRecord]:
        """Return a part of the owner's list."""
        is_upwards = wanted.order is ListOrder.ASCENDING
        with self._database.read() as connection:
            rows = connection.execute(
                f"{_SELECT} WHERE owner = :owner AND (:after IS NULL OR id {'>' if is_upwards else '<'} :after)"
                f" ORDER BY id {'ASC' if is_upwards else 'DESC'} LIMIT :limit + 1",
                {"owner": owner, "after": wanted.after, "limit": wanted.limit},
            ).fetchall()
        return Page(tuple(_record(row) for row in rows[: wanted.limit]), len(rows) > wanted.limit)

    def cancel(self, owner: str, text: str) -> BatchRecord:
        """Set a batch to cancelling; once more is no error. Raises ApiError: 404, or 409 if it is over or ending."""
        with self._database.write(DurableStep.CANCEL_RECORDED) as connection:
            record = _find(connection, owner, text)
            if record.status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
                return record
            if record.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
                raise ApiError(409, f"Cannot cancel a batch with status '{record.status.value}'.")
            self._set_status(connection, record.id, BatchStatus.CANCELLING)
            return _known(connection, record.id)

    def current(self, batch_id: BatchId) -> BatchRecord | None:
        """Return a batch, whoever owns it; None: it is deleted."""
        with self._database.read() as connection:
            row = connection.execute(f"{_SELECT} WHERE id = ?", (batch_id,)).fetchone()
        return None if row is None else _record(row)

    def unfinished(self) -> list[BatchRecord]:
        """Return what there is to do, in order of creation."""
        with self._database.read() as connection:
            query = f"{_SELECT} WHERE status IN ({_UNFINISHED}) ORDER BY id"
            return [_record(row) for row in connection.execute(query)]

    def accept(self, batch_id: BatchId, lines: Sequence[LinePosition], model: str | None) -> BatchRecord:
        """Write down the lines of a batch whose input is good. Nothing happens if it is not validating any more."""
        with self._database.write(DurableStep.LINES_RECORDED) as connection:
            if _known(connection, batch_id).status is BatchStatus.VALIDATING:
                connection.executemany(
                    "INSERT INTO lines (batch_id, number, offset, num_bytes, custom_id) VALUES (?, ?, ?, ?, ?)",
                    ((batch_id, line.number, line.offset, line.num_bytes, line.custom_id) for line in lines),
                )
                query = "UPDATE batches SET num_lines = ?, model = ? WHERE id = ?"
                connection.execute(query, (len(lines), model, batch_id))
                self._set_status(connection, batch_id, BatchStatus.IN_PROGRESS)
            return _known(connection, batch_id)

    def reject(self, batch_id: BatchId, problems: Sequence[InputProblem]) -> BatchRecord:
        """End a batch whose input is not good. Nothing happens if it is not validating any more."""
        with self._database.write(DurableStep.REJECTION_RECORDED) as connection:
            if _known(connection, batch_id).status is BatchStatus.VALIDATING:
                text = json.dumps([asdict(problem) for problem in problems])
                connection.execute("UPDATE batches SET problems = ? WHERE id = ?", (text, batch_id))
                self._set_status(connection, batch_id, BatchStatus.FAILED)
            return _known(connection, batch_id)

    def unanswered(self, batch_id: BatchId, *, after: int, limit: int) -> list[LinePosition]:
        """Return lines without an answer, in order. after: only those behind this line."""
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT number, offset, num_bytes, custom_id FROM lines WHERE batch_id = :batch AND number > :after AND"
                " NOT EXISTS (SELECT 1 FROM answers WHERE batch_id = :batch AND number = lines.number)"
                " ORDER BY number LIMIT :limit",
                {"batch": batch_id, "after": after, "limit": limit},
            ).fetchall()
        return [LinePosition(*row) for row in rows]

    def record_answers(self, finished: Sequence[FinishedLine]) -> None:
        """Write down answers in one transaction. Raises OutputFileError; then none of them is written."""
        by_batch: dict[BatchId, list[FinishedLine]] = defaultdict(list)
        for line in finished:
            by_batch[line.batch_id].append(line)
        with self._database.write(DurableStep.ANSWERS_RECORDED) as connection:
            for batch_id, lines in by_batch.items():
                _record_answers(connection, batch_id, lines)

    def begin_finalizing(self, batch_id: BatchId) -> BatchRecord:
        """No further answer comes. Nothing happens to a batch that is being cancelled."""
        with self._database.write(DurableStep.FINALIZING_RECORDED) as connection:
            if _known(connection, batch_id).status is BatchStatus.IN_PROGRESS:
                self._set_status(connection, batch_id, BatchStatus.FINALIZING)
            return _known(connection, batch_id)

    def results(self, batch_id: BatchId) -> Iterator[LineResult]:
        """Yield what became of each line, in order of the input."""
        after = 0
        while True:
            with self._database.read() as connection:
                rows = connection.execute(
                    "SELECT lines.number, custom_id, outcome, text"
                    " FROM lines LEFT JOIN answers USING (batch_id, number)"
                    " WHERE lines.batch_id = ? AND lines.number > ? ORDER BY lines.number LIMIT ?",
                    (batch_id, after, _RESULTS_AT_A_TIME),
                ).fetchall()
            if not rows:
                return
            for number, custom_id, outcome, text in rows:
                yield LineResult(number, custom_id, None if outcome is None else Outcome(outcome), text)
                after = number

    def finish(
        self, batch_id: BatchId, status: BatchStatus, output: FileRecord | None, errors: FileRecord | None
    ) -> BatchRecord:
        """End a batch: its files get their rows and its lines go, all in one transaction.

        Lines without an answer count as failed from now on: each has a line in the file of errors.
        """
        with self._database.write(DurableStep.END_RECORDED) as connection:
            if _known(connection, batch_id).status not in (BatchStatus.FINALIZING, BatchStatus.CANCELLING):
                raise InvariantError(f"{batch_id} is finished although nobody began to")
            for record in (output, errors):
                if record is not None:
                    insert_file(connection, record)
            connection.execute(
                "UPDATE batches SET output_file_id = ?, error_file_id = ?, num_failed = num_lines - num_completed"
                " WHERE id = ?",
                (output and output.id, errors and errors.id, batch_id),
            )
            self._set_status(connection, batch_id, status)
            connection.execute("DELETE FROM answers WHERE batch_id = ?", (batch_id,))
            connection.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))
            return _known(connection, batch_id)

    def delete_old(self) -> int:
        """Delete batches that ended long enough ago. Returns how many."""
        if self._limits.keep_days is None:
            return 0
        bound = int(self._clock()) - self._limits.keep_days * 86400
        condition = (
            f"status NOT IN ({_UNFINISHED}) AND coalesce(completed_at, failed_at, expired_at, cancelled_at) <= ?"
        )
        with self._database.read() as connection:
            if connection.execute(f"SELECT 1 FROM batches WHERE {condition} LIMIT 1", (bound,)).fetchone() is None:  # noqa: S608
                return 0
        with self._database.write(DurableStep.DELETION_RECORDED) as connection:
            return connection.execute(f"DELETE FROM batches WHERE {condition}", (bound,)).rowcount  # noqa: S608

    def _set_status(self, connection: sqlite3.Connection, batch_id: BatchId, status: BatchStatus) -> None:
        query = f"UPDATE batches SET status = ?, {status.value}_at = ? WHERE id = ?"  # noqa: S608
        connection.execute(query, (status, int(self._clock()), batch_id))


def _record_answers(connection: sqlite3.Connection, batch_id: BatchId, lines: Sequence[FinishedLine]) -> None:
    status = _known(connection, batch_id).status
    if status not in (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING):
        raise InvariantError(f"an answer came for {batch_id}, which is {status.value}")
    connection.executemany(
        "INSERT INTO answers (batch_id, number, outcome, text) VALUES (?, ?, ?, ?)",
        ((batch_id, line.number, line.outcome, line.text) for line in lines),
    )
    num_completed = sum(line.outcome is Outcome.COMPLETED for line in lines)
    usage = sum((line.usage for line in lines), TokenUsage())
    connection.execute(
        "UPDATE batches SET num_completed = num_completed + ?, num_failed = num_failed + ?,"
        " input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ?,"
        " reasoning_tokens = reasoning_tokens + ? WHERE id = ?",
        (
            num_completed, len(lines) - num_completed, usage.input_tokens, usage.cached_tokens, usage.output_tokens,
            usage.reasoning_tokens, batch_id,
        ),
    )  # fmt: skip


def _find(connection: sqlite3.Connection, owner: str, text: str) -> BatchRecord:
    batch_id = parse_batch_id(text)
    row = None
    if batch_id is not None:
        row = connection.execute(f"{_SELECT} WHERE id = ? AND owner = ?", (batch_id, owner)).fetchone()
    if row is None:
        raise ApiError(404, f"No batch found with id '{text}'.", param="id")
    return _record(row)


def _known(connection: sqlite3.Connection, batch_id: BatchId) -> BatchRecord:
    row = connection.execute(f"{_SELECT} WHERE id = ?", (batch_id,)).fetchone()
    if row is None:
        raise InvariantError(f"{batch_id} is unfinished and yet gone")
    return _record(row)


def _record(row: tuple[Any, ...]) -> BatchRecord:
    values = dict(zip(_COLUMNS, row, strict=True))
    usage = TokenUsage(**{name: values.pop(name) for name in _USAGE})
    metadata = values.pop("metadata")
    return BatchRecord(
        **{
            **values,
            "id": BatchId(values["id"]),
            "input_file_id": FileId(values["input_file_id"]),
            "status": BatchStatus(values["status"]),
            "problems": tuple(InputProblem(**problem) for problem in json.loads(values["problems"])),
        },
        metadata=None if metadata is None else json.loads(metadata),
        usage=usage,
    )
