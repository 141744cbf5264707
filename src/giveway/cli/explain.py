"""`giveway explain`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from giveway.cli.flags import flag, takes_engine_options
from giveway.options import EngineOptions

if TYPE_CHECKING:
    from giveway.engine.trace import RequestTotals, Trace, Unserved


@click.command("explain")
@click.argument("trace_file", metavar="TRACE", type=click.Path(dir_okay=False, path_type=Path))
@flag("request", metavar="ID", variable="explain_request", help="Tell of this request. Default: a table of all.")
@flag("json", into="as_json", variable="explain_json", is_flag=True, help="Print JSON instead of text.")
@takes_engine_options(only=())
def command(options: EngineOptions, trace_file: Path, request: str | None, as_json: bool) -> None:  # noqa: ARG001
    """Say why a request waited: TRACE is a file that --trace wrote.

    For every step in which the request was not served: the named reason, who is behind it, and, where it gave way for
    somebody, the estimated cost of each way it could have done so (> marks the one taken). Without --request: every
    request with its steps by reason and its preemptions.
    """
    from giveway.engine.trace import read_trace
    from giveway.engine.trace.text import describe, describe_all

    trace = read_trace(trace_file)
    tell_if_cut_off(trace)
    if request is None:
        everybody = trace.totals()
        click.echo(_as_text([_totals(each) for each in everybody]) if as_json else describe_all(everybody))
        return
    spans = trace.explain(request)
    if as_json:
        click.echo(_as_text([_span(span) for span in spans]))
        return
    for totals in trace.totals():
        if totals.request.request_id == request:
            own = [span for span in spans if span.number == totals.request.number]
            click.echo(describe(totals, own, origin_s=trace.origin_s))


def tell_if_cut_off(trace: Trace) -> None:
    """Note on standard error that the last line is missing."""
    if trace.is_cut_off:
        print(f"{trace.path}: the last line is not whole and is left out", file=sys.stderr)


def _as_text(value: object) -> str:
    return json.dumps(value, indent=2)


def _span(span: Unserved) -> dict[str, Any]:
    preemption = span.preemption
    gave_way = None
    if preemption is not None:
        gave_way = {
            "step": span.preempted_in,
            "beneficiary": preemption.beneficiary,
            "mode": preemption.mode.value,
            "tier": None if preemption.cost.tier is None else preemption.cost.tier.value,
            "blocks_given_up": preemption.num_blocks,
            "blocks_kept": preemption.num_kept,
            "alternatives": [
                {"way": each.way, "seconds": each.seconds, "is_chosen": each.is_chosen} for each in span.alternatives
            ],
        }
    return {
        "request": span.request_id,
        "reason": span.reason.value,
        "first_step": span.first_step,
        "last_step": span.last_step,
        "num_steps": span.num_steps,
        "start_s": span.start_s,
        "seconds": span.seconds,
        "beneficiary": span.beneficiary,
        "victims": list(span.victims),
        "holders": list(span.holders),
        "lacking_blocks": span.num_lacking_blocks,
        "gave_way": gave_way,
    }


def _totals(totals: RequestTotals) -> dict[str, Any]:
    return {
        "request": totals.request.request_id,
        "class": totals.request.priority,
        "arrival_s": totals.request.arrival_s,
        "served_steps": totals.num_served_steps,
        "unserved_steps": {reason.value: count for reason, count in totals.num_unserved_steps.items()},
        "unserved_s": {reason.value: seconds for reason, seconds in totals.unserved_s.items()},
        "preemptions": {mode.value: count for mode, count in totals.preemptions.items()},
        "finish_reason": None if totals.finish_reason is None else totals.finish_reason.value,
        "end_s": totals.end_s,
    }
