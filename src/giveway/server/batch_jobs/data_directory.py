"""The data directory: one server at a time, and every path in it is made from an id that we made."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import Self

from giveway.core.errors import ConfigError, InvariantError, OutputFileError
from giveway.server.batch_jobs.ids import FileId, parse_file_id
from giveway.server.batch_jobs.steps import DurableStep, Moment, StepListener


class DataDirectory:
    """Names and guards what lies below the data directory: `lock`, `batches.sqlite`, `files/` and `parts/`."""

    def __init__(self, path: Path, on_step: StepListener) -> None:
        """Make what is missing, for this user alone, and take the lock.

        Raises ConfigError if it cannot be used, or another server uses it. What died halfway is removed from `parts/`.
        """
        self.path = path
        self.on_step = on_step
        self._files = path / "files"
        self._parts = path / "parts"
        try:
            path.mkdir(mode=0o700, exist_ok=True)  # not its parents: a mistyped mount point must not fill another disk
            self._lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"the data directory {path} cannot be used: {error.strerror}") from error
        try:
            self._take_lock()
            self._files.mkdir(mode=0o700, exist_ok=True)
            self._parts.mkdir(mode=0o700, exist_ok=True)
            for part in self._parts.iterdir():
                part.unlink()
            _sync_directory(path)
        except OSError as error:
            self.close()
            raise ConfigError(f"the data directory {path} cannot be used: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another server uses the data directory {self.path}. Stop it, or name another one with --data-dir"
            ) from error

    @property
    def database_path(self) -> Path:
        """Where the database lies."""
        return self.path / "batches.sqlite"

    def path_of(self, file_id: FileId) -> Path:
        """Return where the content of a file lies, or would lie."""
        checked = parse_file_id(file_id)
        if checked is None:
            raise InvariantError(f"{file_id!r} is no id of a file, and must not become part of a path")
        return self._files / checked

    def new_part(self) -> PartFile:
        """Make an empty file that has no id yet. Raises OutputFileError."""
        return PartFile(self, self._parts / secrets.token_hex(16))

    def remove(self, file_id: FileId) -> None:
        """Remove the content of a file, if it is there."""
        self.on_step(DurableStep.FILE_UNLINKED, Moment.BEFORE)
        self.path_of(file_id).unlink(missing_ok=True)
        self.on_step(DurableStep.FILE_UNLINKED, Moment.AFTER)

    def stored_ids(self) -> list[FileId]:
        """Return the ids under which content is stored; anything else in there is left alone."""
        return [found for name in os.listdir(self._files) if (found := parse_file_id(name)) is not None]

    def sync_files(self) -> None:
        """Make renames in `files/` durable."""
        _sync_directory(self._files)

    def close(self) -> None:
        """Let go of the lock."""
        os.close(self._lock)


class PartFile:
    """A file that is being written. It gets its place when it is whole; a kill before that leaves nothing to find."""

    def __init__(self, directory: DataDirectory, path: Path) -> None:
        self._directory = directory
        self._path = path
        self._is_stored = False
        self.num_bytes = 0
        try:
            self._file = open(path, "xb", opener=_open_for_this_user)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise self._failure(error) from error

    def write(self, data: bytes | memoryview) -> None:
        """Append. Raises OutputFileError when that fails; the file is then good for `close` only."""
        try:
            self._file.write(data)
        except OSError as error:
            raise self._failure(error) from error
        self.num_bytes += len(data)

    def store(self, file_id: FileId) -> None:
        """Put the content on the disk and give it its place. Raises OutputFileError."""
        try:
            self._file.flush()
            self._directory.on_step(DurableStep.PART_SYNCED, Moment.BEFORE)
            os.fsync(self._file.fileno())
            self._directory.on_step(DurableStep.PART_SYNCED, Moment.AFTER)
            os.rename(self._path, self._directory.path_of(file_id))
            self._is_stored = True
            self._directory.on_step(DurableStep.FILE_RENAMED, Moment.BEFORE)
            self._directory.sync_files()
            self._directory.on_step(DurableStep.FILE_RENAMED, Moment.AFTER)
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> OutputFileError:
        return OutputFileError(
            f"the data directory {self._directory.path} cannot be written: {error.strerror}. Make room there"
        )

    def close(self) -> None:
        """Close the file; one that was not stored is removed."""
        try:
            self._file.close()
        except OSError as error:
            if self._is_stored:
                raise self._failure(error) from error
            # Else the rest of its buffer does not fit either, and nobody wants it any more.
        finally:
            if not self._is_stored:
                self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
