"""Ids of files and batches: made here, in order of creation, and of a shape that is safe in a path."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable
from typing import NewType

FileId = NewType("FileId", str)
BatchId = NewType("BatchId", str)

_TIME_DIGITS = 14  # microseconds in hexadecimal: enough for two thousand years
_RANDOM_BYTES = 9
_TAIL = rf"[0-9a-f]{{{_TIME_DIGITS + 2 * _RANDOM_BYTES}}}"
_FILE_ID = re.compile(rf"file-{_TAIL}", re.ASCII)
_BATCH_ID = re.compile(rf"batch_{_TAIL}", re.ASCII)


def parse_file_id(text: str) -> FileId | None:
    """Return the text as an id of a file; None: it has another shape, so no file can have it."""
    return FileId(text) if _FILE_ID.fullmatch(text) else None


def parse_batch_id(text: str) -> BatchId | None:
    """Return the text as an id of a batch; None: it has another shape, so no batch can have it."""
    return BatchId(text) if _BATCH_ID.fullmatch(text) else None


class IdMaker:
    """Makes ids that sort in the order in which they were made, also when the clock is set back. Safe from any thread.

    A list can then go on behind an id that is deleted by now, and "first come, first served" needs no second number.
    """

    def __init__(self, clock: Callable[[], float], newest: str | None) -> None:
        """clock: seconds since 1970. newest: the last id made before the start; None: there is none yet."""
        self._clock = clock
        self._lock = threading.Lock()
        self._last_us = 0 if newest is None else int(newest[-(_TIME_DIGITS + 2 * _RANDOM_BYTES) :][:_TIME_DIGITS], 16)

    def new_file_id(self) -> FileId:
        """Return an id that no file has."""
        return FileId(f"file-{self._tail()}")

    def new_batch_id(self) -> BatchId:
        """Return an id that no batch has."""
        return BatchId(f"batch_{self._tail()}")

    def _tail(self) -> str:
        with self._lock:
            self._last_us = max(int(self._clock() * 1e6), self._last_us + 1)
            return f"{self._last_us:0{_TIME_DIGITS}x}{secrets.token_hex(_RANDOM_BYTES)}"
