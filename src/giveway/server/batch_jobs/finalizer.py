"""The end of a batch: its lines become two files, in order of the input. Broken off anywhere, it can be done again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from giveway.core.errors import OutputFileError
from giveway.server.batch_jobs.data_directory import PartFile
from giveway.server.batch_jobs.ids import FileId
from giveway.server.batch_jobs.input_check import StoppedError
from giveway.server.batch_jobs.line_text import error_text
from giveway.server.batch_jobs.records import BatchRecord, BatchStatus, FilePurpose, FileRecord, Outcome
from giveway.server.batch_jobs.store import BatchStore

_LINES_BETWEEN_LOOKS = 256


def finalize(store: BatchStore, batch: BatchRecord, is_stopped: Callable[[], bool]) -> BatchRecord:
    """Write the files of a batch that is finalizing or cancelling, and end it.

    A line without an answer gets its line in the file of errors. is_stopped: looked at again and again; when it says
    so, StoppedError is raised. Raises OutputFileError. In both cases nothing has changed.
    """
    is_cancelled = batch.status is BatchStatus.CANCELLING
    with ExitStack() as stack:
        output = stack.enter_context(store.files.new_part())
        errors = stack.enter_context(store.files.new_part())
        num_unanswered = 0
        for result in store.batches.results(batch.id):
            if result.number % _LINES_BETWEEN_LOOKS == 0 and is_stopped():
                raise StoppedError
            text = result.text
            if text is None:
                num_unanswered += 1
                text = _unanswered_text(result.custom_id, is_cancelled=is_cancelled)
            (output if result.outcome is Outcome.COMPLETED else errors).write(text + b"\n")
        # Only the end of its time lets a batch finalize with lines unanswered.
        end = BatchStatus.EXPIRED if num_unanswered else BatchStatus.COMPLETED
        return _end(store, batch, BatchStatus.CANCELLED if is_cancelled else end, output, errors)


def _unanswered_text(custom_id: str, *, is_cancelled: bool) -> bytes:
    if is_cancelled:
        return error_text(custom_id, "batch_cancelled", "The batch was cancelled before this request was answered.")
    return error_text(
        custom_id, "batch_expired", "This request could not be answered before the completion window ended."
    )


def _end(store: BatchStore, batch: BatchRecord, status: BatchStatus, output: PartFile, errors: PartFile) -> BatchRecord:
    stored: list[FileId] = []
    try:
        records = [
            _store(store, batch, part, word, stored) if part.num_bytes else None
            for part, word in ((output, "output"), (errors, "error"))
        ]
        return store.batches.finish(batch.id, status, records[0], records[1])
    except OutputFileError:
        for file_id in stored:
            store.files.remove_content(file_id)
        raise


def _store(store: BatchStore, batch: BatchRecord, part: PartFile, word: str, stored: list[FileId]) -> FileRecord:
    file_id = store.files.store_output(part)
    stored.append(file_id)
    now = int(store.clock())
    expires_at = None if batch.output_expires_after_s is None else now + batch.output_expires_after_s
    name = f"{batch.id}_{word}.jsonl"
    return FileRecord(file_id, batch.owner, FilePurpose.BATCH_OUTPUT, name, part.num_bytes, now, expires_at)
