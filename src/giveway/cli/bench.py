"""`giveway bench`: one subcommand per published figure."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from giveway.cli import bench_serve
from giveway.cli.flags import flag, takes_engine_options
from giveway.cli.output_file import takes_json_file
from giveway.core.errors import MissingDependencyError, OutputFileError
from giveway.options import EngineOptions

if TYPE_CHECKING:
    from giveway.bench.measure import Report


@click.group("bench", invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def command(ctx: click.Context) -> None:
    """Measure: each prints machine, settings and a table."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _takes_report_options(function: Callable[..., Any]) -> Callable[..., Any]:
    function = flag("quick", is_flag=True, help="Fewer rounds and smaller sizes: under 30 seconds.")(function)
    return takes_json_file("machine, settings and rows")(function)


@command.command("exact")
@_takes_report_options
@takes_engine_options(only=("model", "device", "dtype", "num_threads"))
def exact(options: EngineOptions, quick: bool, json_file: str | None) -> None:
    """What exactness costs: decode and prefill with and without it, alternating."""
    from giveway.bench.exact import FULL, QUICK, bench_exact

    _show(bench_exact(options, sizes=QUICK if quick else FULL), json_file)


@command.command("start")
@_takes_report_options
@takes_engine_options(only=("model", "backend", "dtype"))
def start(options: EngineOptions, quick: bool, json_file: str | None) -> None:
    """Process start to first token, and what loading the weights takes of memory."""
    from giveway.bench.start import bench_start

    _show(bench_start(options, num_rounds=2 if quick else 5), json_file)


@command.command("loop")
@_takes_report_options
@takes_engine_options(only=("model", "device", "backend", "dtype", "num_threads"))
def loop(options: EngineOptions, quick: bool, json_file: str | None) -> None:
    """How late the event loop of a server is while the engine computes beside it."""
    from giveway.bench.loop import bench_loop

    _show(bench_loop(options, num_timers=300 if quick else 1500), json_file)


@command.command("scheduler")
@_takes_report_options
@takes_engine_options(only=())
def scheduler(options: EngineOptions, quick: bool, json_file: str | None) -> None:  # noqa: ARG001
    """What scheduling itself costs: state changes, whole preemptions, plan + commit of a step."""
    from giveway.bench.scheduler import bench_scheduler

    _show(bench_scheduler(num_rounds=40 if quick else 200), json_file)


@command.command("swap")
@_takes_report_options
@takes_engine_options(only=("device",))
def swap(options: EngineOptions, quick: bool, json_file: str | None) -> None:
    """Bandwidth of swapping a 7B model's KV against the peak of the same link, and against the naive method."""
    from giveway.bench.swap import bench_swap

    device = "cpu" if options.device == "auto" else options.device
    _show(bench_swap(device, num_rounds=4 if quick else 20), json_file)


@command.command("kernels")
@flag(
    "isa",
    variable="kernels_isa",
    metavar="NAME",
    help="Instruction set of the kernels, such as avx2. Default: the fastest that runs here.",
)
@_takes_report_options
@takes_engine_options(only=("dtype", "num_threads"))
def kernels(options: EngineOptions, isa: str | None, quick: bool, json_file: str | None) -> None:
    """Every operation of the native kernels against its floor: reading from memory, and arithmetic."""
    from giveway.runtime import native
    from giveway.runtime.threads import default_num_threads, limit_spinning

    if not native.is_installed():
        raise MissingDependencyError(f"the package 'giveway-kernels' is not installed. {native.INSTALL_KERNELS}")
    limit_spinning()
    from giveway.bench.kernels import FULL, QUICK, bench_kernels, choose_setting

    num_threads = default_num_threads() if options.num_threads is None else options.num_threads
    setting = choose_setting(isa=isa, dtype=options.dtype, num_threads=num_threads)
    _show(bench_kernels(setting, sizes=QUICK if quick else FULL, num_rounds=2 if quick else 7), json_file)


@command.command("overhead")
@_takes_report_options
@takes_engine_options(only=("model", "device", "backend", "dtype", "num_threads"))
def overhead(options: EngineOptions, quick: bool, json_file: str | None) -> None:
    """What priorities cost while nothing is lacking: the same work with them and in plain arrival order."""
    from giveway.bench.overhead import bench_overhead

    _show(bench_overhead(options, num_rounds=2 if quick else 11), json_file)


@command.command("memory")
@_takes_report_options
@takes_engine_options(only=())
def memory(options: EngineOptions, quick: bool, json_file: str | None) -> None:  # noqa: ARG001
    """How much of the KV pool holds KV: blocks against one contiguous reservation per request."""
    from giveway.bench.memory import bench_memory

    report = bench_memory(num_workloads=2 if quick else 5, num_requests=300 if quick else 1000)
    _show(report, json_file)


@command.command("tax")
@_takes_report_options
@takes_engine_options(only=("model", "device", "backend", "dtype", "num_threads", "cost_profile"))
def storm_tax(options: EngineOptions, quick: bool, json_file: str | None) -> None:
    """Work done again when requests need ten times the KV pool: recomputing and swapping, dry and real."""
    from giveway.bench import tax

    if quick:
        report = tax.bench_tax(
            options,
            storm=tax.QUARTER,
            scaled=tax.SCALED_QUICK,
            shares=tax.QUICK_SHARES,
            policies=tax.QUICK_POLICIES,
        )
    else:
        report = tax.bench_tax(options)
    _show(report, json_file)


@command.command("crossover")
@_takes_report_options
@takes_engine_options(only=("model", "device", "backend", "dtype", "num_threads", "swap_dir"))
def crossover(options: EngineOptions, quick: bool, json_file: str | None) -> None:
    """Recompute or swap, by context length: what each costs here and on other hardware, and what auto does."""
    from giveway.bench.crossover import QUICK_TOKENS, REAL_TOKENS, bench_crossover

    tokens = QUICK_TOKENS if quick else REAL_TOKENS
    _show(bench_crossover(options, real_tokens=tokens, num_rounds=2 if quick else 5), json_file)


@command.command("pace")
@_takes_report_options
@takes_engine_options(only=("model", "device", "backend", "dtype", "num_threads"))
def pace(options: EngineOptions, quick: bool, json_file: str | None) -> None:
    """Wait of urgent arrivals during a long background prefill, with the step-time target and without."""
    from giveway.bench.pace import BACKGROUND_TOKENS, QUICK_BACKGROUND_TOKENS, bench_pace

    num_tokens = QUICK_BACKGROUND_TOKENS if quick else BACKGROUND_TOKENS
    _show(bench_pace(options, num_arrivals=2 if quick else 4, background_tokens=num_tokens), json_file)


command.add_command(bench_serve.command)


def _show(report: Report, json_file: str | None) -> None:
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
    if json_file is not None:
        try:
            Path(json_file).write_text(json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise OutputFileError(
                f"{json_file}: cannot be written: {error.strerror}. Name another file with --json."
            ) from error


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
