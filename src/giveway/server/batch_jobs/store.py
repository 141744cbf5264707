"""Everything that the Batch API keeps below the data directory, opened and closed as one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from giveway.server.batch_jobs.batch_table import BatchTable
from giveway.server.batch_jobs.data_directory import DataDirectory
from giveway.server.batch_jobs.database import Database
from giveway.server.batch_jobs.file_table import FileTable
from giveway.server.batch_jobs.ids import IdMaker
from giveway.server.batch_jobs.limits import BatchLimits
from giveway.server.batch_jobs.steps import StepListener, ignore_steps


class BatchStore:
    """Files and batches on disk. Everything may be called from any thread, and waits for the disk."""

    def __init__(
        self,
        data_dir: Path,
        limits: BatchLimits | None = None,
        *,
        clock: Callable[[], float] = time.time,
        on_step: StepListener = ignore_steps,
    ) -> None:
        """Open the data directory, or make it, and tidy up what a kill left. clock: seconds since 1970.

        Raises ConfigError if it cannot be used, another server uses it, or a newer GiveWay made it.
        """
        self.limits = limits or BatchLimits()
        self.clock = clock
        self._directory = DataDirectory(data_dir, on_step)
        try:
            self._database = Database(self._directory.database_path, on_step)
        except BaseException:
            self._directory.close()
            raise
        try:
            ids = IdMaker(clock, self._newest_id())
            self.files = FileTable(self._database, self._directory, ids, self.limits, clock)
            self.batches = BatchTable(self._database, ids, self.limits, clock)
            self.files.remove_orphans()
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        """Where everything is kept."""
        return self._directory.path

    def _newest_id(self) -> str | None:
        with self._database.read() as connection:
            newest = [
                connection.execute("SELECT max(id) FROM files").fetchone()[0],
                connection.execute("SELECT max(id) FROM batches").fetchone()[0],
            ]
        # Compared without their first word, which is not part of the time.
        return max((text for text in newest if text is not None), key=lambda text: text[-32:], default=None)

    def close(self) -> None:
        """Close the database and let another server have the directory."""
        self._database.close()
        self._directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
