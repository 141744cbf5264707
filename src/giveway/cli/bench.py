"""`giveway bench`: one subcommand per published figure."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from giveway.cli.flags import flag, takes_engine_options
from giveway.core.errors import OutputFileError
from giveway.options import EngineOptions

if TYPE_CHECKING:
    from giveway.bench.measure import Report


@click.group("bench", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure: each prints machine, settings and a table."""


def _takes_report_options(function: Callable[..., Any]) -> Callable[..., Any]:
    function = flag("quick", is_flag=True, help="Fewer rounds: under 30 seconds.")(function)
    return flag(
        "json",
        into="result_file",
        metavar="FILE",
        help="Also write machine, settings and rows to this file.",
        type=click.Path(dir_okay=False),
    )(function)


@command.command("exact")
@_takes_report_options
@takes_engine_options(only=("model", "device", "dtype", "num_threads"))
def exact(options: EngineOptions, quick: bool, result_file: str | None) -> None:
    """What exactness costs: decode and prefill with and without it, alternating."""
    from giveway.bench.exact import bench_exact

    report = bench_exact(options, num_rounds=2 if quick else 7, num_steps=16 if quick else 32)
    _show(report, result_file)


@command.command("start")
@_takes_report_options
@takes_engine_options(only=("model",))
def start(options: EngineOptions, quick: bool, result_file: str | None) -> None:
    """Process start to first token, and what loading the weights takes of memory."""
    from giveway.bench.start import bench_start

    _show(bench_start(options.model, num_rounds=2 if quick else 5), result_file)


@command.command("scheduler")
@_takes_report_options
@takes_engine_options(only=())
def scheduler(options: EngineOptions, quick: bool, result_file: str | None) -> None:  # noqa: ARG001
    """What scheduling itself costs: state changes, whole preemptions, plan + commit of a step."""
    from giveway.bench.scheduler import bench_scheduler

    _show(bench_scheduler(num_rounds=40 if quick else 200), result_file)


def _show(report: Report, result_file: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    content = report.as_json()
    console = Console(width=None if sys.stdout.isatty() else 160)  # nothing is cut off in a pipe or a log
    for title in ("machine", "settings"):
        console.print(
            f"{title}: " + ", ".join(f"{name} {value}" for name, value in content[title].items()), soft_wrap=True
        )
    table = Table(title=report.title)
    columns = list(dict.fromkeys(name for row in report.rows for name in row))
    for name in columns:
        table.add_column(name)
    for row in report.rows:
        table.add_row(*(_cell(row.get(name, "")) for name in columns))
    console.print(table)
    if result_file is not None:
        try:
            Path(result_file).write_text(json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise OutputFileError(
                f"{result_file}: cannot be written: {error.strerror}. Name another file with --json."
            ) from error


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
