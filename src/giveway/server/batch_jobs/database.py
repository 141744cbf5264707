"""The SQLite file in the data directory: one connection, one transaction at a time, every commit synced to the disk."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from giveway.core.errors import ConfigError, OutputFileError
from giveway.server.batch_jobs.steps import DurableStep, Moment, StepListener

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL, num_bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER
) STRICT;
CREATE INDEX files_of_owner ON files (owner, id);
CREATE INDEX files_that_expire ON files (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL, metadata TEXT, output_expires_after_s INTEGER, status TEXT NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, in_progress_at INTEGER, finalizing_at INTEGER,
    completed_at INTEGER, failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
    output_file_id TEXT, error_file_id TEXT, problems TEXT NOT NULL DEFAULT '[]',
    num_lines INTEGER NOT NULL DEFAULT 0, num_completed INTEGER NOT NULL DEFAULT 0,
    num_failed INTEGER NOT NULL DEFAULT 0, model TEXT,
    input_tokens INTEGER NOT NULL DEFAULT 0, cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0, reasoning_tokens INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX batches_of_owner ON batches (owner, id);
CREATE INDEX batches_unfinished ON batches (id)
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');

-- Both are emptied when the batch is finished: then everything is in its files.
CREATE TABLE lines (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, offset INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
    custom_id TEXT NOT NULL, PRIMARY KEY (batch_id, number)
) STRICT, WITHOUT ROWID;
-- The key is what keeps a line from ever being answered twice.
CREATE TABLE answers (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, outcome TEXT NOT NULL, text BLOB NOT NULL,
    PRIMARY KEY (batch_id, number)
) STRICT;
"""


class Database:
    """The one connection. Methods may be called from any thread; they wait for each other."""

    def __init__(self, path: Path, on_step: StepListener) -> None:
        """Open or make the database. Raises ConfigError if it cannot be used, or if a newer GiveWay made it."""
        self._path = path
        self._on_step = on_step
        self._lock = threading.Lock()
        try:
            path.touch(mode=0o600)
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{path} cannot be opened: {error}") from error
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        run = self._connection.execute
        try:
            run("PRAGMA locking_mode = EXCLUSIVE")  # with it WAL needs no shared memory beside the file
            (version,) = run("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise ConfigError(
                    f"{self._path} has schema {version}; this GiveWay knows schemas up to {SCHEMA_VERSION}. Start the "
                    "newer GiveWay that made it, or name another --data-dir"
                )
            run("PRAGMA journal_mode = WAL")
            run("PRAGMA synchronous = FULL")  # a commit is on the disk: also after a power cut
            if version == 0:
                self._connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        except sqlite3.Error as error:
            raise ConfigError(
                f"{self._path} cannot be used: {error}. Restore it from a copy, or name another --data-dir"
            ) from error

    @contextmanager
    def write(self, step: DurableStep) -> Iterator[sqlite3.Connection]:
        """Give the connection for one transaction, which is on the disk when the block has ended without an exception.

        Raises OutputFileError if it cannot be written; then nothing of it has happened.
        """
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._on_step(step, Moment.BEFORE)
                self._connection.execute("COMMIT")
            except sqlite3.OperationalError as error:
                self._roll_back()
                raise self._failure(error) from error
            except BaseException:
                self._roll_back()
                raise
        self._on_step(step, Moment.AFTER)

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Give the connection for queries. Raises OutputFileError if the file cannot be read."""
        with self._lock:
            try:
                yield self._connection
            except sqlite3.OperationalError as error:
                raise self._failure(error) from error

    def _roll_back(self) -> None:
        if self._connection.in_transaction:  # after some errors SQLite has rolled back by itself
            self._connection.execute("ROLLBACK")

    def _failure(self, error: sqlite3.Error) -> OutputFileError:
        return OutputFileError(f"{self._path} cannot be read or written: {error}. What is in it is whole")

    def close(self) -> None:
        """Close the file; the log is folded into it."""
        with self._lock:
            self._connection.close()
