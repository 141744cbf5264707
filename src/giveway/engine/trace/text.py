"""Explanations for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from giveway.core.ids import RequestId
from giveway.core.plan import Preemption
from giveway.engine.trace.causes import UnservedReason
from giveway.engine.trace.explain import RequestTotals, Unserved, alternatives_of, way_of

_NUM_NAMED = 3  # of a long list of requests

# What each reason means, as the rest of a sentence about the request.
MEANINGS = {
    UnservedReason.NO_DEVICE_BLOCKS: "no room in the pool, and nobody whom it may displace would free enough",
    UnservedReason.NO_TOKENS: "the tokens or the time of the step went to others",
    UnservedReason.NO_SEAT: "every seat is taken by work that it may not displace",
    UnservedReason.COPY_IN_FLIGHT: "its own KV is being copied",
    UnservedReason.NO_ROOM_TO_STAY: "comes back only to stay, and others of its class who do may need all of the pool",
    UnservedReason.PROMPT_IN_PROGRESS: "another answer to its prompt computes the KV that both will share",
    UnservedReason.GIVES_WAY: "gives up what it had kept",
    UnservedReason.FORCED_OUT: "told to give way",
    UnservedReason.HELD: "its reader is too slow",
    UnservedReason.FAULT_ISOLATION: "a failed step is repeated in parts to find who breaks it",
    UnservedReason.BEHIND_DEFERRED: "stands behind another that could not be served",
    UnservedReason.PREEMPTED: "gives way",
    UnservedReason.STEP_FAILED: "the step failed, and is repeated in parts",
    UnservedReason.GIVEN_UP: "nothing can free what it lacks; it ends",
}


def describe(totals: RequestTotals, spans: Sequence[Unserved], *, origin_s: float = 0.0) -> str:
    """Return the story of one request: two lines on the whole, then a paragraph for each span.

    origin_s: times are counted from here.
    """
    request, unserved = totals.request, sum(totals.num_unserved_steps.values())
    seconds = sum(totals.unserved_s.values())
    lines = [
        f"{printable(request.request_id)}: class {request.priority}, {request.num_prompt_tokens} prompt tokens, "
        f"at most {request.max_new_tokens} new ones; arrived at {request.arrival_s - origin_s:.3f} s",
        f"{_end(totals, origin_s)}; served in {totals.num_served_steps} steps, "
        f"not served in {unserved} ({_time(seconds)})",
    ]
    for span in spans:
        lines += ["", *_paragraph(span, origin_s)]
    return "\n".join(lines)


def describe_all(everybody: Sequence[RequestTotals]) -> str:
    """Return a table of all requests, and what kept each from being served."""
    rows = [("request", "class", "served", "not", "seconds", "preempted", "why not served (steps)")]
    for totals in everybody:
        why = ", ".join(f"{reason.value} {count}" for reason, count in totals.num_unserved_steps.most_common())
        modes = ", ".join(f"{mode.value} {count}" for mode, count in totals.preemptions.most_common())
        rows.append(
            (
                printable(totals.request.request_id),
                str(totals.request.priority),
                str(totals.num_served_steps),
                str(sum(totals.num_unserved_steps.values())),
                f"{sum(totals.unserved_s.values()):.3f}",
                modes or "-",
                why or "-",
            )
        )
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def printable(name: str) -> str:
    """Return a request id as it stands, or escaped if a terminal could take it for something else."""
    return name if name.isprintable() else ascii(name)[1:-1]


def _end(totals: RequestTotals, origin_s: float) -> str:
    end, end_s = totals.end, totals.end_s
    if end is None or end_s is None:
        return "unfinished where the trace ends"
    return f"ended ({end.reason.value}) at {end_s - origin_s:.3f} s after {end.num_output_tokens} tokens"


def _paragraph(span: Unserved, origin_s: float) -> Iterator[str]:
    steps = f"step {span.first_step}" if span.num_steps == 1 else f"steps {span.first_step} .. {span.last_step}"
    at = f"at {span.start_s - origin_s:.3f} s for {_time(span.seconds)}"
    yield f"{steps}, {at}: {span.reason.value}"
    yield f"    {_meaning(span)}"
    if span.preemption is None:
        return
    if span.preempted_in == span.first_step:
        yield from _preemption(span.preemption)
    else:
        yield f"    without a seat since step {span.preempted_in} ({way_of(span.preemption.cost)}, {_whom(span)})"


def _whom(span: Unserved) -> str:
    name = None if span.preemption is None else span.preemption.beneficiary
    return "by command" if name is None else f"for {printable(name)}"


def _meaning(span: Unserved) -> str:
    text, reason = MEANINGS[span.reason], span.reason
    if reason is UnservedReason.COPY_IN_FLIGHT and span.victims:
        return f"its room comes free when KV of {_names(span.victims)} has been copied"
    if reason is UnservedReason.GIVES_WAY and span.preemption is None and span.beneficiary:
        return f"its place on the host goes to KV of {printable(span.beneficiary)}"
    if reason is UnservedReason.BEHIND_DEFERRED and span.beneficiary:
        return f"stands behind {printable(span.beneficiary)}, which could not be served"
    if reason is UnservedReason.PROMPT_IN_PROGRESS and span.beneficiary:
        return f"{printable(span.beneficiary)} computes the prompt that both will share"
    if span.beneficiary:
        text += f" for {printable(span.beneficiary)}"
    if span.num_lacking_blocks:
        text += f"; blocks lacking: {span.num_lacking_blocks}"
    return f"{text}; held by {_names(span.holders)}" if span.holders else text


def _preemption(preemption: Preemption) -> Iterator[str]:
    yield (
        f"    {way_of(preemption.cost)}: blocks given up {preemption.num_blocks}, kept {preemption.num_kept}; "
        f"wanted: {preemption.wanted.value}"
    )
    for each in alternatives_of(preemption):
        price = "not possible" if each.seconds is None else _time(each.seconds)
        yield f"    {'>' if each.is_chosen else ' '} {each.way:<26} {price:>12}"


def _names(names: Sequence[RequestId]) -> str:
    named = ", ".join(printable(name) for name in names[:_NUM_NAMED])
    return named if len(names) <= _NUM_NAMED else f"{named} and {len(names) - _NUM_NAMED} more"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms" if seconds < 1 else f"{seconds:.3f} s"
