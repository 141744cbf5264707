"""Answers on their way to the disk: those that come while others are being written go together in the next commit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from giveway.core.errors import OutputFileError
from giveway.server.batch_jobs.records import FinishedLine

logger = logging.getLogger("giveway")

_MAX_LINES_A_COMMIT = 256
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0


class AnswerRecorder:
    """Writes answers in groups. An answer that cannot be written is kept and tried again: nothing is computed twice."""

    def __init__(
        self,
        write: Callable[[Sequence[FinishedLine]], Awaitable[None]],
        on_recorded: Callable[[Sequence[FinishedLine]], None],
    ) -> None:
        """write: makes answers durable, or raises OutputFileError. on_recorded: told afterwards."""
        self._write = write
        self._on_recorded = on_recorded
        self._waiting: list[FinishedLine] = []
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def put(self, line: FinishedLine) -> None:
        """Hand in an answer."""
        self._waiting.append(line)
        self._is_idle.clear()
        self._wake.set()

    async def flush(self) -> None:
        """Wait until everything that was handed in is on the disk."""
        await self._is_idle.wait()

    async def run(self) -> None:
        """Write until `close`. Not to be cancelled: a write under way could then be done twice."""
        wait_s = _FIRST_WAIT_S
        while not (self._closing.is_set() and not self._waiting):
            await self._wake.wait()
            try:
                await self._write_group()
                wait_s = _FIRST_WAIT_S
            except OutputFileError as error:
                if self._closing.is_set():
                    logger.error("the last answers of batches are lost and are computed again: %s", error)
                    return
                logger.error("answers of batches cannot be written and are kept in memory: %s", error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def close(self) -> None:
        """Let `run` end when all is written, or at the first failure."""
        self._closing.set()
        self._wake.set()

    async def _write_group(self) -> None:
        group = self._waiting[:_MAX_LINES_A_COMMIT]
        if group:
            await self._write(group)
            del self._waiting[: len(group)]
            self._on_recorded(group)
        if not self._waiting:
            if not self._closing.is_set():
                self._wake.clear()
            self._is_idle.set()
