"""`giveway run`."""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from giveway.cli.flags import Size, flag, takes_engine_options, takes_sampling
from giveway.core.errors import ConfigError
from giveway.options import EngineOptions

if TYPE_CHECKING:
    from giveway.cli.run_input import InputLine
    from giveway.cli.run_requests import Progress, RunSettings
    from giveway.cli.run_source import LineSource

_LINE_EVERY_S = 10.0  # off a terminal


@click.command("run")
@click.argument("input_name", metavar="INPUT", type=click.Path(dir_okay=False, allow_dash=True))
@flag(
    "output",
    "-o",
    required=True,
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of answers, one JSON object a line; - for standard output, which cannot be resumed.",
)
@flag("priority_field", default="priority", metavar="NAME", help="Field of a line that holds its class.")
@flag("max_line_bytes", default="16MiB", type=Size(), help="A longer line gets an error record.")
@takes_sampling(max_tokens=None)
@takes_engine_options()
def command(
    options: EngineOptions,
    sampling: dict[str, Any],
    input_name: str,
    output: Path,
    priority_field: str,
    max_line_bytes: int,
) -> int:
    """Answer a file of requests, one JSON object a line; INPUT - is standard input.

    A line holds "prompt" (continued as it stands) or "messages" (sent through the chat template), and optionally
    "id", "priority" and sampling fields such as "max_tokens"; flags are for lines that say nothing. Answers are
    written in order of completion. A line with a mistake gets an error record and harms no other. With "n" above 1 a
    line's answers are a list, "choices"; "cache_salt" keeps its KV from lines with another one.

    \b
    A line of INPUT:
      {"id": "q1", "prompt": "The capital of France is", "max_tokens": 8}
    Its line of the output, here in three:
      {"line": 1, "input_hash": "9f86d081884c7d65", "id": "q1", "text": " Paris.",
       "finish_reason": "stop", "usage": {"prompt_tokens": 5, "completion_tokens": 3},
       "stats": {"queue_s": 0.001, "ttft_s": 0.05, "e2e_s": 0.1, ...}}

    Started again, the run goes on where it stopped, even after a crash: each answer carries the number and a hash of
    its line. A pipe is read to its end first, into a temporary file; the same lines piped again resume the run too.
    Ctrl-C: exit code 130. Lines with an error record do not change the exit code 0.
    """
    from giveway.cli.run_requests import RunSettings
    from giveway.cli.run_source import STDIN, open_source

    if max_line_bytes < 1:
        raise click.UsageError("--max-line-bytes must be at least 1.")
    if input_name != STDIN:
        _check_paths(Path(input_name), output)
    _check_trace(options.trace, output)
    settings = RunSettings(sampling, priority_field, max_line_bytes, options.seed)
    with open_source(input_name) as source:
        return _answer(source, output, options, settings)


def _answer(source: LineSource, output: Path, options: EngineOptions, settings: RunSettings) -> int:
    from giveway.build import build_engine
    from giveway.cli.run_output import OutputFile
    from giveway.cli.run_requests import RequestRun
    from giveway.engine.interrupts import Interrupt

    digests, numbers = _survey(source, settings.max_line_bytes)
    with OutputFile(output) as file:
        done = file.resume(digests, numbers)
        if not done:
            print(f"{source.name} holds no lines; nothing to answer", file=sys.stderr)
        num_done = sum(done)
        if num_done:
            print(f"{num_done} of {len(done)} lines are answered already", file=sys.stderr)
        if num_done == len(done):
            return 0
        built = build_engine(options)
        lines = _open_lines(source, settings.max_line_bytes, digests, done)
        run = RequestRun(built, settings, lines, file)
        try:
            with Interrupt() as interrupt, _progress(len(done), num_done) as tell:
                is_complete = run.run(is_stopped=lambda: interrupt.is_wanted, tell=tell)
        finally:
            built.engine.close()
    print(_summary(run.progress, is_complete), file=sys.stderr)
    return 0 if is_complete else 130


def _check_paths(input_path: Path, output: Path) -> None:
    if output.exists() and input_path.exists() and output.samefile(input_path):
        raise ConfigError(f"{output}: input and output are the same file. Name another with -o.")


def _check_trace(trace: str | None, output: Path) -> None:
    """The two may not exist yet, so their places are compared."""
    if trace is not None and os.path.realpath(trace) == os.path.realpath(output):
        raise ConfigError(f"{output}: answers and trace are to go into the same file. Name another with --trace.")


def _survey(source: LineSource, max_line_bytes: int) -> tuple[array[int], array[int]]:
    """Hashes and numbers of all lines: 16 bytes a line, so that a file of millions can be checked before the start."""
    digests, numbers = array("Q"), array("Q")
    for line in source.lines(max_line_bytes):
        digests.append(line.digest)
        numbers.append(line.number)
    return digests, numbers


def _open_lines(source: LineSource, max_line_bytes: int, digests: array[int], done: bytearray) -> Iterator[InputLine]:
    """Yield the lines without an answer. Raises ConfigError if the file has changed since it was surveyed."""
    for place, line in enumerate(source.lines(max_line_bytes)):
        if place >= len(digests):
            return  # added meanwhile: for the next start
        if line.digest != digests[place]:
            raise ConfigError(f"{source.name}: line {line.number} was changed while it was being read")
        if not done[place]:
            yield line


def _summary(progress: Progress, is_complete: bool) -> str:
    text = f"{progress.num_answered} answered, {progress.num_errors} errors, {progress.num_output_tokens} output tokens"
    return text if is_complete else f"stopped: {text}. Start the same command again to go on."


@contextmanager
def _progress(total: int, num_done: int) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal; a plain line from time to time anywhere else. Both on standard error."""
    if not sys.stderr.isatty():
        yield _plain_progress(total, num_done)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("run", total=total, completed=num_done, note="")

        def tell(progress: Any) -> None:
            bar.update(task, completed=num_done + progress.num_done, note=f"{progress.num_output_tokens} tokens")

        yield tell


def _plain_progress(total: int, num_done: int) -> Callable[[Progress], None]:
    told_s = time.monotonic()

    def tell(progress: Progress) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= _LINE_EVERY_S:
            told_s = time.monotonic()
            done = num_done + progress.num_done
            print(f"{done} of {total} lines; {progress.num_output_tokens} output tokens", file=sys.stderr, flush=True)

    return tell
