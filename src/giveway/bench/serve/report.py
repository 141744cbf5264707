"""From figures to the tables and the JSON file. Tables are in milliseconds, the file in seconds."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from giveway.bench.measure import describe_machine
from giveway.bench.serve.driver import Run
from giveway.bench.serve.figures import ClassFigures, Metric, Spread
from giveway.bench.serve.records import Outcome, RequestRecord

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "giveway-bench-serve-1"  # counts up when a key changes its meaning

_WIDTH_WITHOUT_TERMINAL = 160  # characters: nothing is cut off in a pipe or a log
_NUM_DETAILS = 5  # messages of failed requests that are printed
_LATE_SHARE = 0.1  # of the median TTFT: lag above it is told
_NAMES = {Metric.TTFT: "TTFT", Metric.TPOT: "TPOT", Metric.ITL: "ITL", Metric.E2E: "E2E"}
_KEYS = {Metric.TTFT: "ttft_s", Metric.TPOT: "tpot_s", Metric.ITL: "itl_s", Metric.E2E: "e2e_s"}


@dataclass(frozen=True, slots=True)
class ServeReport:
    """A run, summed up."""

    settings: Mapping[str, Any]
    metadata: Mapping[str, str]  # the caller's own
    run: Run
    classes: Sequence[ClassFigures]
    total: ClassFigures
    metrics: Sequence[Metric]  # in the tables; the file has all


# For people


def show(report: ServeReport) -> None:
    """Print settings, tables and what a reader must know of them, on standard output."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL)

    def say(line: str, style: str | None = None) -> None:
        console.print(line, style=style, soft_wrap=True, markup=False, highlight=False)

    classes = report.settings.get("classes", {})
    others = {name: value for name, value in report.settings.items() if name != "classes"}
    say("machine of the client: " + ", ".join(f"{name} {value}" for name, value in describe_machine().items()))
    say("settings: " + ", ".join(f"{name} {value}" for name, value in others.items()))
    for name, described in classes.items():
        say(f"class {name}: " + ", ".join(f"{key} {value}" for key, value in described.items()))
    _show_throughput(report, console)
    _show_times(report, console)
    for line in remarks(report):
        say(line, "yellow")


def _show_throughput(report: ServeReport, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    groups = [*report.classes, report.total] if len(report.classes) > 1 else report.classes
    table = Table(title="Requests and throughput")
    table.add_column("")
    for figures in groups:
        table.add_column(Text(figures.name), justify="right", overflow="fold")
    columns = [_counts(figures) for figures in groups]
    for name in columns[0]:
        is_bad = name == "errors" and report.total.num_errors > 0
        table.add_row(name, *(column[name] for column in columns), style="bold red" if is_bad else None)
    console.print(table)


def _counts(figures: ClassFigures) -> dict[str, str]:
    counts = {
        "requests": str(figures.num_requests),
        "completed": str(figures.num_completed),
        "errors": str(figures.num_errors),
        "cut off": str(figures.num_cut_off),
        "window, s": _number(figures.window_s),
        "requests/s": _number(figures.per_second(figures.num_completed)),
        "output tokens/s": _number(figures.per_second(figures.output_tokens)),
        "total tokens/s": _number(figures.per_second(figures.prompt_tokens + figures.output_tokens)),
    }
    if figures.num_good is not None:
        counts |= {"within limits": str(figures.num_good), "goodput, requests/s": _number(figures.goodput)}
    return counts


def _show_times(report: ServeReport, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Times of completed requests, milliseconds")
    table.add_column("")
    percents = [percent_key(percent) for percent in report.settings["percentiles"]]
    for title in ("mean", "std", *percents, "max", "values"):
        table.add_column(title, justify="right", no_wrap=True)
    for figures in report.classes:
        table.add_row(Text(figures.name, style="bold"))
        for metric in report.metrics:
            table.add_row(f"  {_NAMES[metric]}", *_times(figures.spreads[metric], len(percents)))
        table.add_row("  client lag", *_times(figures.lag, len(percents)), end_section=True)
    console.print(table)


def _times(found: Spread | None, num_percents: int) -> list[str]:
    if found is None:
        return ["-"] * (num_percents + 4)
    values = (found.mean, found.std, *found.percentiles.values(), found.high)
    return [*(_number(1000 * value) for value in values), str(found.count)]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"


def remarks(report: ServeReport) -> list[str]:
    """Return a line for everything without which the tables would be read wrongly."""
    lines = ["ended by Ctrl-C: this is what had been measured until then"] if report.run.is_interrupted else []
    for figures in report.classes:
        name = figures.name
        if figures.num_errors:
            kinds = ", ".join(f"{kind} {count}" for kind, count in figures.errors.items())
            lines.append(f"{name}: {figures.num_errors} of {figures.num_requests} failed: {kinds}")
        if figures.num_short:
            lines.append(f"{name}: {figures.num_short} answers have fewer tokens than wished")
        if figures.num_without_usage:
            lines.append(
                f"{name}: for {figures.num_without_usage} answers the server did not count tokens; an event with text "
                "counts as one"
            )
        ttft = figures.spreads[Metric.TTFT]
        if figures.lag is not None and ttft is not None and _last(figures.lag) > _LATE_SHARE * _median(ttft):
            lines.append(
                f"{name}: this client sent requests up to {1000 * figures.lag.high:.1f} ms late, which is part of "
                "their times; run it on a machine of its own, or lower the load"
            )
    failed = [record for record in report.run.records if record.failure is not None]
    lines += [f"{record.name}: {record.failure}: {record.detail}" for record in failed[:_NUM_DETAILS]]
    return lines


def _last(found: Spread) -> float:
    return found.percentiles[max(found.percentiles)] if found.percentiles else found.high


def _median(found: Spread) -> float:
    return found.percentiles.get(50, found.mean)


# For programs


def as_json(report: ServeReport, *, has_requests: bool = False) -> dict[str, Any]:
    """Return what --json writes; docs/bench/serve.md describes it. has_requests: also every single request."""
    content = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "settings": dict(report.settings),
        "metadata": dict(report.metadata),
        "is_interrupted": report.run.is_interrupted,
        "rows": [_row(figures) for figures in report.classes],
        "total": _row(report.total),
    }
    if has_requests:
        content["requests"] = [_request(record, report.run.started_s) for record in report.run.records]
    return content


def percent_key(percent: float) -> str:
    """Return the name of a percentile: p50, p99.9."""
    return f"p{percent:g}"


def _row(figures: ClassFigures) -> dict[str, Any]:
    ttft, tpot = figures.spreads[Metric.TTFT], figures.spreads[Metric.TPOT]
    return {
        "class": figures.name,
        "ttft_p50": _percentile(ttft, 50),
        "ttft_p99": _percentile(ttft, 99),
        "tpot_p50": _percentile(tpot, 50),
        "tpot_p99": _percentile(tpot, 99),
        "errors": figures.num_errors,
        "errors_by_kind": dict(figures.errors),
        "requests": figures.num_requests,
        "completed": figures.num_completed,
        "cut_off": figures.num_cut_off,
        "short": figures.num_short,
        "without_usage": figures.num_without_usage,
        "window_s": figures.window_s,
        "prompt_tokens": figures.prompt_tokens,
        "output_tokens": figures.output_tokens,
        "requests_per_s": figures.per_second(figures.num_completed),
        "output_tok_s": figures.per_second(figures.output_tokens),
        "total_tok_s": figures.per_second(figures.prompt_tokens + figures.output_tokens),
        "good": figures.num_good,
        "goodput": figures.goodput,
        **{_KEYS[metric]: _spread(found) for metric, found in figures.spreads.items()},
        "client_lag_s": _spread(figures.lag),
    }


def _percentile(found: Spread | None, percent: float) -> float | None:
    return None if found is None else found.percentiles.get(percent)


def _spread(found: Spread | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "mean": found.mean,
        "std": found.std,
        "min": found.low,
        "max": found.high,
        "count": found.count,
        **{percent_key(percent): value for percent, value in found.percentiles.items()},
    }


def _request(record: RequestRecord, started_s: float) -> dict[str, Any]:
    return {
        "class": record.class_name,
        "name": record.name,
        "outcome": record.outcome.value,
        "failure": record.failure,
        "detail": record.detail,
        "due_s": record.due_s - started_s,
        "sent_s": None if record.sent_s is None else record.sent_s - started_s,
        "token_times_s": [moment_s - started_s for moment_s in record.token_times_s],
        "end_s": record.end_s - started_s,
        "prompt_tokens": record.num_prompt_tokens,
        "output_tokens": record.num_output_tokens,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s if record.outcome is Outcome.COMPLETED else None,
    }
