"""How the demo looks: live in a terminal, one plain line a run anywhere else. It computes nothing of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from giveway.core.events import StepEvent
from giveway.core.ids import RequestId
from giveway.core.plan import StepPlan
from giveway.core.scheduler import Scheduler
from giveway.demo.report import Row, plain_line, table_cells
from giveway.demo.run import Scenario, Watcher
from giveway.demo.view import PoolView, Story, look
from giveway.demo.workload import Workload

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

_FRAME_S = 0.08  # at most one picture in this time: drawing must not slow the run
_NUM_STORY_LINES = 6
_BLOCKS_IN_A_ROW = 40
_BACKGROUND_STYLES = (
    "cyan",
    "blue",
    "green",
    "magenta",
    "bright_cyan",
    "bright_blue",
    "bright_green",
    "bright_magenta",
)
_URGENT_STYLE = "bold white on red"


class Display(Protocol):
    """What the demo tells whoever watches."""

    def begin(self, workload: Workload, model_description: str) -> None:
        """Tell what will run."""

    def watch(self, scenario: Scenario) -> AbstractContextManager[Watcher | None]:
        """Return a context in which one run happens; it gives the watcher for the run."""

    def end_run(self, row: Row) -> None:
        """Tell what one run gave."""

    def end(self, rows: Sequence[Row], sentence: str) -> None:
        """Tell the whole."""


def make_display(stream: TextIO | None = None) -> PlainDisplay | LiveDisplay:
    """Return the live display when `stream` (standard output) is a terminal that can draw, else the plain one."""
    stream = stream or sys.stdout
    if stream.isatty():
        from rich.console import Console

        console = Console(file=stream)
        if not console.is_dumb_terminal:
            return LiveDisplay(console)
    return PlainDisplay(stream)


class PlainDisplay:
    """One line a run, never wrapped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin(self, workload: Workload, model_description: str) -> None:
        """Say what will run."""
        self._say(f"{workload.title} on {model_description}; {describe_pool(workload)}")

    @contextmanager
    def watch(self, scenario: Scenario) -> Iterator[Watcher | None]:
        """Nothing is shown while a run happens."""
        del scenario
        yield None

    def end_run(self, row: Row) -> None:
        """Print the row."""
        self._say(plain_line(row))

    def end(self, rows: Sequence[Row], sentence: str) -> None:
        """Print the closing sentence."""
        del rows
        self._say(sentence)

    def _say(self, line: str) -> None:
        print(" ".join(line.split()), file=self._stream, flush=True)


class LiveDisplay:
    """The pool and the queues while they change, then a table."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._styles: dict[RequestId, tuple[str, str]] = {}  # name -> letter, style

    def begin(self, workload: Workload, model_description: str) -> None:
        """Say what will run, and give each request its letter and colour."""
        background = [request for request in workload.requests if not request.is_urgent]
        for index, request in enumerate(background):
            style = _BACKGROUND_STYLES[index % len(_BACKGROUND_STYLES)]
            self._styles[RequestId(request.name)] = (chr(ord("a") + index % 26), style)
        for index, request in enumerate([request for request in workload.requests if request.is_urgent], start=1):
            self._styles[RequestId(request.name)] = (str(index % 10), _URGENT_STYLE)
        self._console.print(f"[bold]{workload.title}[/] on {model_description}", highlight=False)
        self._console.print(describe_pool(workload), style="dim", highlight=False)

    @contextmanager
    def watch(self, scenario: Scenario) -> Iterator[Watcher | None]:
        """Draw the run after its steps, at a bounded rate; the picture goes away with the run."""
        from rich.live import Live

        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            yield _Drawing(live, scenario, self._styles).watch

    def end_run(self, row: Row) -> None:
        """Print a short line, so that something stays of the picture."""
        mark = "[green]as promised[/]" if row.is_as_promised else "[bold red]not as promised[/]"
        if row.error is not None and not row.must_finish:
            mark = "[yellow]lost, as expected of this policy[/]"
        self._console.print(f"  {row.title}: {row.finished} of {row.total} finished, {mark}", highlight=False)

    def end(self, rows: Sequence[Row], sentence: str) -> None:
        """Print the table, the errors and the closing sentence."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
        for title in table_cells(rows[0]):
            is_text = title in ("policy", "preempted")
            table.add_column(title, justify="left" if is_text else "right", no_wrap=True)
        for row in rows:
            table.add_row(*table_cells(row).values(), style=None if row.is_as_promised else "bold red")
        self._console.print(table)
        for row in rows:
            if row.error is not None:
                self._console.print(f"[yellow]{row.title}[/]: {row.error}", highlight=False)
        self._console.print(sentence, style="bold", highlight=False)


class _Drawing:
    """The picture of one run."""

    def __init__(self, live: Live, scenario: Scenario, styles: dict[RequestId, tuple[str, str]]) -> None:
        self._live = live
        self._scenario = scenario
        self._styles = styles
        self._story = Story(_NUM_STORY_LINES)
        self._drawn_s = -1.0

    def watch(self, scheduler: Scheduler, plan: StepPlan | None, events: Sequence[StepEvent]) -> None:
        """Take in one step; draw when the last picture is old enough."""
        self._story.add(plan.step_id if plan is not None else scheduler.state.next_step_id, events)
        now_s = time.monotonic()
        if now_s - self._drawn_s >= _FRAME_S:
            self._drawn_s = now_s
            self._live.update(self._picture(look(scheduler)), refresh=True)

    def _picture(self, view: PoolView) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        used = sum(owner is not None for owner in view.owners)
        lines = [
            Text(f"KV pool, {used} of {len(view.owners)} blocks in use", style="dim"),
            *self._pool(view),
            Text(),
            self._queue("running", view.running),
            self._queue("waiting", view.waiting),
            self._queue("swapped", view.swapped),
            Text(f"host pool: {view.num_host_blocks_used} of {view.num_host_blocks} blocks", style="dim"),
            Text(),
            *(Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in self._story.lines),
            *(Text() for _ in range(_NUM_STORY_LINES - len(self._story.lines))),
        ]
        return Panel(Group(*lines), title=self._scenario.title, subtitle=f"step {view.step_id}", width=72)

    def _pool(self, view: PoolView) -> list[Text]:
        from rich.text import Text

        rows = []
        for start in range(0, len(view.owners), _BLOCKS_IN_A_ROW):
            row = Text()
            for owner in view.owners[start : start + _BLOCKS_IN_A_ROW]:
                letter, style = (".", "dim") if owner is None else self._styles.get(owner, ("?", ""))
                row.append(letter, style=style)
            rows.append(row)
        return rows

    def _queue(self, title: str, names: Sequence[RequestId]) -> Text:
        from rich.text import Text

        line = Text(f"{title:9}", no_wrap=True, overflow="ellipsis")
        for name in names:
            letter, style = self._styles.get(name, ("?", ""))
            line.append(f"{letter} {name}" if name.startswith("urgent") else letter, style=style)
            line.append(" ")
        return line


def describe_pool(workload: Workload) -> str:
    """Return the sizes of the fight in words."""
    size = "1 token" if workload.block_size == 1 else f"{workload.block_size} tokens"
    return (
        f"pool of {workload.num_blocks} blocks of {size} where {workload.num_blocks_wanted} would suffice for all, "
        f"{workload.num_seats} seats"
    )
