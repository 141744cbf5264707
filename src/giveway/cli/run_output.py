"""The output of `giveway run`: whole lines only, whatever happens, and a memory of what is already answered.

A record begins {"line": 3, "input_hash": "9f86d081884c7d65", ...}: the number of the input line that it answers, and
64 bits of BLAKE2b of that line. By them a second start knows what is done, and that the file belongs to this input.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from giveway.cli.run_input import Digest
from giveway.core.errors import ConfigError, OutputFileError

_RECORD_START = b'{"line": '
_SYNC_EVERY_S = 1.0
_MAX_RECORD_BYTES = 256 << 20
_STDOUT = Path("-")


class OutputFile:
    """Append-only. A record is one write of one whole line; synced at most once a second, and at the end."""

    def __init__(self, path: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._now = now
        self._descriptor = self._open()
        self._is_regular = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        self._synced_s = now()
        self._end = 0  # bytes that are whole lines

    def _open(self) -> int:
        if self._path == _STDOUT:
            return os.dup(1)
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be written: {error.strerror}. Name another with -o.") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(descriptor)
                raise ConfigError(f"{self._path}: another run is writing to it") from error
            # A file system without locks: then nobody is kept out.
        return descriptor

    def resume(self, digests: array[int], numbers: array[int]) -> bytearray:
        """Read what is already there; return a flag for each input line: 1, it is answered.

        digests, numbers: of every input line, in order. A last line that was torn off is cut away. Raises ConfigError
        if the file holds anything that does not answer this input; then it is left as it is.
        """
        done = bytearray(len(digests))
        if not self._is_regular:
            return done
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            for count, line in enumerate(iter(lambda: file.readline(_MAX_RECORD_BYTES), b""), start=1):
                if not line.endswith(b"\n"):
                    self._check_torn(line)
                    break
                number, digest = self._read_record(line, count)
                place = bisect_left(numbers, number)
                if place == len(numbers) or numbers[place] != number or digests[place] != digest:
                    raise ConfigError(
                        f"{self._path}: its line {count} answers line {number} of another input file. Name another "
                        "output file with -o, or remove this one."
                    )
                done[place] = 1
                self._end += len(line)
        os.ftruncate(self._descriptor, self._end)
        os.lseek(self._descriptor, self._end, os.SEEK_SET)
        return done

    def _read_record(self, line: bytes, count: int) -> tuple[int, Digest]:
        try:
            record = json.loads(line)
            number, digest = record["line"], record["input_hash"]
            if type(number) is int and isinstance(digest, str):
                return number, int(digest, 16)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._foreign(f"its line {count} is no answer of `giveway run`") from error
        raise self._foreign(f"its line {count} is no answer of `giveway run`")

    def _check_torn(self, tail: bytes) -> None:
        start = tail[: len(_RECORD_START)]
        if start != _RECORD_START[: len(start)]:
            raise self._foreign("its last line is no answer of `giveway run`")

    def _foreign(self, what: str) -> ConfigError:
        return ConfigError(f"{self._path}: {what}, so nothing is added to it. Name another output file with -o.")

    def write(self, line_number: int, digest: Digest, values: Mapping[str, Any]) -> None:
        """Append one record. Raises OutputFileError when that fails; the file then ends with the record before it."""
        record = {"line": line_number, "input_hash": f"{digest:016x}", **values}
        data = json.dumps(record, ensure_ascii=False).encode("utf-8", errors="replace") + b"\n"
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
            self._end += len(data)
            if self._now() - self._synced_s >= _SYNC_EVERY_S:
                self._sync()
        except OSError as error:
            self._cut_back()
            raise self._failure(error) from error

    def _sync(self) -> None:
        if self._is_regular:
            os.fsync(self._descriptor)
        self._synced_s = self._now()

    def _cut_back(self) -> None:
        if self._is_regular:
            os.ftruncate(self._descriptor, self._end)

    def _failure(self, error: OSError) -> Exception:
        if error.errno == errno.EPIPE:
            return BrokenPipeError(error.errno, error.strerror)  # nobody reads any more: not an error of the file
        remedy = "Make room" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "Mend that"
        return OutputFileError(
            f"{self._path}: cannot be written: {error.strerror}. What is in it is whole. {remedy} and start the same "
            "command again: it goes on where it stopped."
        )

    def close(self) -> None:
        """Sync and close. Raises OutputFileError if the system only now finds out that there is no room."""
        try:
            self._sync()
        except OSError as error:
            raise self._failure(error) from error
        finally:
            os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
