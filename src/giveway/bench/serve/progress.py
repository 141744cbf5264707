"""A bar a class while a run lasts, on standard error, so that standard output holds the report alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from giveway.bench.serve.driver import NoWatcher, Watcher
from giveway.bench.serve.records import Outcome, RequestRecord
from giveway.bench.serve.workload import PlannedRequest, Source

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_DRAWINGS_A_SECOND = 4  # drawing must not delay what is measured


class _Bars:
    """Counts what it is told and shows it."""

    def __init__(self, progress: Progress, sources: Sequence[Source]) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}
        self._num_running = dict.fromkeys((name for source in sources for name in source.class_names), 0)
        self._num_failed = dict.fromkeys(self._num_running, 0)
        for source in sources:
            for name in source.class_names:
                total = source.num_requests if len(source.class_names) == 1 else None
                self._bars[name] = progress.add_task(name, total=total, running=0, failed="")

    def began(self, request: PlannedRequest) -> None:
        """Count a request as under way."""
        self._num_running[request.class_name] += 1
        self._progress.update(self._bars[request.class_name], running=self._num_running[request.class_name])

    def ended(self, record: RequestRecord) -> None:
        """Count a request as over."""
        name = record.class_name
        self._num_running[name] -= 1
        self._num_failed[name] += record.outcome is Outcome.FAILED
        failed = f"{self._num_failed[name]} failed" if self._num_failed[name] else ""
        self._progress.update(self._bars[name], advance=1, running=self._num_running[name], failed=failed)


@contextmanager
def watching(sources: Sequence[Source], *, is_wanted: bool) -> Iterator[Watcher]:
    """Give whoever shall be told of requests: bars in a terminal, where they are wanted, else nobody."""
    if not (is_wanted and sys.stderr.isatty()):
        yield NoWatcher()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[running]} under way", markup=False),
        TextColumn("{task.fields[failed]}", style="bold red", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=_DRAWINGS_A_SECOND) as progress:
        yield _Bars(progress, sources)
