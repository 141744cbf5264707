"""Copies that are late, fail or get lost as a script says: what a real link does on a bad day, repeatably."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from giveway.core.ids import CopyId
from giveway.core.plan import BlockCopy, TierMove
from giveway.runtime.backend import Backend
from giveway.runtime.copies import EndedCopies, run_copy, run_move, succeeds

if TYPE_CHECKING:
    from giveway.runtime.disk_tier import DiskTier


@dataclass(frozen=True, slots=True)
class CopyFate:
    """What happens to one copy."""

    delay_steps: int = 0  # it ends with the outcome of the step that many later; its bytes move only then
    fails: bool = False
    is_lost: bool = False  # nobody ever hears of it


class ScriptedCopies:
    """A `CopyEngine` with overlap. Bytes move when the copy ends, so a block reused too early is caught."""

    is_overlapped = True

    def __init__(self, backend: Backend, script: Callable[[BlockCopy], CopyFate], disk: DiskTier | None = None) -> None:
        self._backend = backend
        self._disk = disk
        self._script = script
        self._moved: list[tuple[CopyId, bool]] = []
        self._under_way: list[tuple[int, BlockCopy, CopyFate]] = []
        self._step = 0

    def move(self, moves: Sequence[TierMove]) -> None:
        """Run the moves to their end: they are never late."""
        for move in moves:
            self._moved.append((move.copy_id, succeeds(partial(run_move, self._backend, self._disk, move))))

    def start(self, copies: Sequence[BlockCopy]) -> None:
        """Note when each copy ends."""
        for copy in copies:
            fate = self._script(copy)
            if not fate.is_lost:
                self._under_way.append((self._step + fate.delay_steps, copy, fate))

    def abandon(self, copies: Sequence[BlockCopy]) -> None:
        """Forget copies and moves of a failed step."""
        self._moved = []
        gone = {copy.copy_id for copy in copies}
        self._under_way = [entry for entry in self._under_way if entry[1].copy_id not in gone]

    def collect(self, *, wait: bool) -> EndedCopies:
        """End the copies that are due; with `wait`, go on to the step in which the next one is."""
        if wait and self._under_way:
            self._step = max(self._step, min(due for due, _, _ in self._under_way))
        finished = [copy_id for copy_id, has_succeeded in self._moved if has_succeeded]
        failed = [copy_id for copy_id, has_succeeded in self._moved if not has_succeeded]
        self._moved = []
        still = []
        for due, copy, fate in self._under_way:
            if due > self._step:
                still.append((due, copy, fate))
            elif not fate.fails and succeeds(partial(run_copy, self._backend, self._disk, copy)):
                finished.append(copy.copy_id)
            else:
                failed.append(copy.copy_id)
        self._under_way = still
        self._step += 1
        return EndedCopies(tuple(finished), tuple(failed))

    def close(self) -> None:
        """Let go of the disk."""
        if self._disk is not None:
            self._disk.close()
