"""Files: their rows in the database and their content beside it, kept in step."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Self

from giveway.core.errors import OutputFileError
from giveway.server.batch_jobs.data_directory import DataDirectory, PartFile
from giveway.server.batch_jobs.database import Database
from giveway.server.batch_jobs.ids import FileId, IdMaker, parse_file_id
from giveway.server.batch_jobs.limits import BatchLimits
from giveway.server.batch_jobs.records import UNFINISHED, FilePurpose, FileRecord, ListOrder, Page, PageRequest
from giveway.server.batch_jobs.steps import DurableStep
from giveway.server.http_errors import ApiError

logger = logging.getLogger("giveway")

_IS_NEEDED = f"""EXISTS (SELECT 1 FROM batches WHERE batches.input_file_id = files.id
    AND batches.status IN ({", ".join(f"'{status}'" for status in UNFINISHED)}))"""  # noqa: S608 - words of our own


class FileTable:
    """The files of all owners. Methods may be called from any thread and wait for the disk."""

    def __init__(
        self,
        database: Database,
        directory: DataDirectory,
        ids: IdMaker,
        limits: BatchLimits,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._directory = directory
        self._ids = ids
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._num_uploading: Counter[str] = Counter()  # bytes by owner, of uploads that have no row yet

    def begin_upload(self, owner: str) -> Upload:
        """Start a file. Raises ApiError (429) if the owner has too many; OutputFileError."""
        with self._database.read() as connection:
            num_files, num_bytes = _totals(connection, owner)
        self._check_number(num_files)
        return Upload(self, owner, num_bytes, self._directory.new_part())

    def get(self, owner: str, text: str) -> FileRecord:
        """Return a file of this owner. Raises ApiError (404) for everything else, whatever the reason."""
        with self._database.read() as connection:
            return find_file(connection, owner, text)

    def page(self, owner: str, wanted: PageRequest, purpose: str | None = None) -> Page[FileRecord]:
        """Return a part of the owner's list. purpose: only such files; None: all."""
        is_upwards = wanted.order is ListOrder.ASCENDING
        with self._database.read() as connection:
            rows = connection.execute(  # only words of our own are put in
                "SELECT * FROM files WHERE owner = :owner AND (:purpose IS NULL OR purpose = :purpose)"  # noqa: S608
                f" AND (:after IS NULL OR id {'>' if is_upwards else '<'} :after)"
                f" ORDER BY id {'ASC' if is_upwards else 'DESC'} LIMIT :limit + 1",
                {"owner": owner, "purpose": purpose, "after": wanted.after, "limit": wanted.limit},
            ).fetchall()
        return Page(tuple(_record(row) for row in rows[: wanted.limit]), len(rows) > wanted.limit)

    def content_path(self, record: FileRecord) -> Path:
        """Return where the content lies. Raises ApiError (500) if it is not there any more."""
        path = self._directory.path_of(record.id)
        if not path.is_file():
            raise ApiError(500, f"the content of {record.id} is gone from the server's data directory")
        return path

    def input_path(self, file_id: FileId) -> Path:
        """Return where the input of a batch lies, whether or not it is there."""
        return self._directory.path_of(file_id)

    def delete(self, owner: str, text: str) -> FileId:
        """Delete a file. Raises ApiError: 404, or 409 if an unfinished batch reads it."""
        with self._database.write(DurableStep.DELETION_RECORDED) as connection:
            record = find_file(connection, owner, text)
            if connection.execute(f"SELECT {_IS_NEEDED} FROM files WHERE id = ?", (record.id,)).fetchone()[0]:  # noqa: S608
                raise ApiError(
                    409, f"{record.id} is the input of a batch that is not finished. Cancel the batch or wait for it"
                )
            connection.execute("DELETE FROM files WHERE id = ?", (record.id,))
        self._directory.remove(record.id)
        return record.id

    def delete_old(self) -> int:
        """Delete files that have expired or have been kept long enough; input of unfinished batches stays.

        Returns how many.
        """
        now = int(self._clock())
        keep_days = self._limits.keep_days
        bound = None if keep_days is None else now - keep_days * 86400
        condition = f"(expires_at <= :now OR created_at <= :bound) AND NOT {_IS_NEEDED}"
        values = {"now": now, "bound": bound}
        with self._database.read() as connection:
            if connection.execute(f"SELECT 1 FROM files WHERE {condition} LIMIT 1", values).fetchone() is None:  # noqa: S608
                return 0
        with self._database.write(DurableStep.DELETION_RECORDED) as connection:
            query = f"DELETE FROM files WHERE {condition} RETURNING id"  # noqa: S608
            gone = [FileId(row[0]) for row in connection.execute(query, values).fetchall()]
        for file_id in gone:
            self._directory.remove(file_id)
        return len(gone)

    def remove_orphans(self) -> None:
        """Remove content without a row: the process died between the two, so nobody was told its id."""
        with self._database.read() as connection:
            known = {row[0] for row in connection.execute("SELECT id FROM files")}
        for file_id in self._directory.stored_ids():
            if file_id not in known:
                logger.debug("%s has no row in the database and is removed", file_id)
                self._directory.remove(file_id)

    def store_output(self, part: PartFile) -> FileId:
        """Put a finished output into its place; its row comes with `insert_file`, and without one it is an orphan."""
        file_id = self._ids.new_file_id()
        part.store(file_id)
        return file_id

    def remove_content(self, file_id: FileId) -> None:
        """Remove an output whose row could not be written."""
        self._directory.remove(file_id)

    def new_part(self) -> PartFile:
        """Make an empty file for an output. Raises OutputFileError."""
        return self._directory.new_part()

    def _check_number(self, num_files: int) -> None:
        if num_files >= self._limits.max_owner_files:
            raise ApiError(
                429,
                f"there are {num_files} files already, as many as one key may have. Delete some",
                code="too_many_files",
            )

    def count_upload(self, owner: str, num_bytes: int, *, stored: int, upload_bytes: int) -> None:
        """Make room for another piece of an upload. Raises ApiError (413) beyond a limit. For `Upload` only.

        stored: bytes of the owner's files when the upload began. upload_bytes: of this upload, with the piece.
        """
        if upload_bytes > self._limits.max_file_bytes:
            raise ApiError(413, f"the file is larger than {self._limits.max_file_bytes} bytes, the limit", param="file")
        with self._lock:
            self._check_total(stored + self._num_uploading[owner] + num_bytes)
            self._num_uploading[owner] += num_bytes

    def _check_total(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_owner_bytes:
            raise ApiError(
                413,
                f"with this file there would be {num_bytes} bytes; one key may have {self._limits.max_owner_bytes}. "
                "Delete files that are not needed any more",
                param="file",
            )

    def end_upload(self, owner: str, num_bytes: int) -> None:
        """Take an upload off the account. For `Upload` only."""
        with self._lock:
            self._num_uploading[owner] -= num_bytes
            if not self._num_uploading[owner]:
                del self._num_uploading[owner]

    def keep_upload(
        self, owner: str, part: PartFile, purpose: FilePurpose, filename: str, expires_after_s: int | None
    ) -> FileRecord:
        """Make an upload a file. For `Upload` only."""
        now = int(self._clock())
        file_id = self._ids.new_file_id()
        expires_at = None if expires_after_s is None else now + expires_after_s
        record = FileRecord(file_id, owner, purpose, filename, part.num_bytes, now, expires_at)
        part.store(file_id)
        try:
            with self._database.write(DurableStep.UPLOAD_RECORDED) as connection:
                num_files, num_bytes = _totals(connection, owner)
                self._check_number(num_files)
                self._check_total(num_bytes + part.num_bytes)
                insert_file(connection, record)
        except (ApiError, OutputFileError):
            self._directory.remove(file_id)
            raise
        return record


class Upload:
    """A file on its way in. Close it in any case; only `keep` makes a file of it."""

    def __init__(self, files: FileTable, owner: str, num_stored: int, part: PartFile) -> None:
        self._files = files
        self._owner = owner
        self._num_stored = num_stored
        self._part = part
        self._num_counted = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append. Raises ApiError (413) beyond a limit; OutputFileError if the disk is full."""
        size = len(data)
        self._files.count_upload(self._owner, size, stored=self._num_stored, upload_bytes=self._part.num_bytes + size)
        self._num_counted += size
        self._part.write(data)

    def keep(self, purpose: FilePurpose, filename: str, expires_after_s: int | None) -> FileRecord:
        """Return the file, now durable. Raises ApiError or OutputFileError; then there is none."""
        return self._files.keep_upload(self._owner, self._part, purpose, filename, expires_after_s)

    def close(self) -> None:
        """Close it; what was not kept is gone."""
        self._files.end_upload(self._owner, self._num_counted)
        self._num_counted = 0
        self._part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find_file(connection: sqlite3.Connection, owner: str, text: str) -> FileRecord:
    """Return a file of this owner. Raises ApiError (404)."""
    file_id = parse_file_id(text)
    row = None
    if file_id is not None:
        row = connection.execute("SELECT * FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone()
    if row is None:
        raise ApiError(404, f"No such File object: {text}", param="id")
    return _record(row)


def insert_file(connection: sqlite3.Connection, record: FileRecord) -> None:
    """Add the row of a file whose content is stored."""
    connection.execute(
        "INSERT INTO files (id, owner, purpose, filename, num_bytes, created_at, expires_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            record.id,
            record.owner,
            record.purpose,
            record.filename,
            record.num_bytes,
            record.created_at,
            record.expires_at,
        ),
    )


def _totals(connection: sqlite3.Connection, owner: str) -> tuple[int, int]:
    """Return how many files the owner has, and their bytes."""
    query = "SELECT count(*), coalesce(sum(num_bytes), 0) FROM files WHERE owner = ?"
    num_files, num_bytes = connection.execute(query, (owner,)).fetchone()
    return num_files, num_bytes


def _record(row: tuple[str, str, str, str, int, int, int | None]) -> FileRecord:
    file_id, owner, purpose, filename, num_bytes, created_at, expires_at = row
    return FileRecord(FileId(file_id), owner, FilePurpose(purpose), filename, num_bytes, created_at, expires_at)
