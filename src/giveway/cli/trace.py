"""`giveway trace`: what else can be made of a trace."""

from __future__ import annotations

import json
from pathlib import Path

import click

from giveway.cli.explain import tell_if_cut_off
from giveway.cli.flags import flag, takes_engine_options
from giveway.core.errors import ConfigError, OutputFileError
from giveway.options import EngineOptions


@click.group("trace", invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def command(ctx: click.Context) -> None:
    """Convert a file that --trace wrote."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@command.command("export")
@click.argument("trace_file", metavar="TRACE", type=click.Path(dir_okay=False, path_type=Path))
@flag(
    "out",
    "-o",
    required=True,
    variable="trace_export_out",
    metavar="FILE.json",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to be written.",
)
@takes_engine_options(only=())
def export(options: EngineOptions, trace_file: Path, out: Path) -> None:  # noqa: ARG001
    """Draw TRACE for ui.perfetto.dev or chrome://tracing.

    A track for each request (waiting, prefill, decode, swapped out, ...), a mark with prices wherever it gives way, and
    a counter track for each pool.
    """
    from giveway.engine.trace import read_trace

    trace = read_trace(trace_file)
    tell_if_cut_off(trace)
    if out.exists() and out.samefile(trace_file):
        raise ConfigError(f"{out}: is the trace itself. Name another file with --out.")
    content = json.dumps(trace.as_chrome_trace(), separators=(",", ":"))
    try:
        out.write_text(content + "\n")
    except OSError as error:
        raise OutputFileError(f"{out}: cannot be written: {error.strerror}. Name another file with --out.") from error
