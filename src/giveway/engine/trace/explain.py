"""What became of a request, step by step: spans of steps in which it was not served, and why; totals of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from giveway.core.ids import RequestId
from giveway.core.kv_cache import Tier
from giveway.core.plan import Preemption, PreemptionCost, PreemptionMode
from giveway.core.request import FinishReason
from giveway.engine.trace.causes import Cause, Causes, UnservedReason
from giveway.engine.trace.content import TraceContent, TracedEnd, TracedRequest, TracedStep
from giveway.engine.trace.situation import Situation, Standing

_WAYS = {
    PreemptionMode.RECOMPUTE: "recompute",
    PreemptionMode.PAUSE: "pause",
    PreemptionMode.UN_ADMIT: "un-admit",
}


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way in which a victim could give way."""

    way: str  # recompute, swap to host, swap to disk, pause, un-admit; or "everything: " and one of these
    seconds: float | None  # None: not possible
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class Unserved:
    """Steps in a row in which a request was not served, for one reason."""

    request_id: RequestId
    number: int  # arrival number: the name may be used again
    reason: UnservedReason
    first_step: int
    last_step: int
    num_steps: int
    start_s: float  # when the first was planned
    end_s: float  # when the last ended
    beneficiary: RequestId | None  # for whom it gives way, or behind whom it stands
    victims: tuple[RequestId, ...]  # the copy of whose KV it waits for: it gets their room
    holders: tuple[RequestId, ...]  # who had what it lacked, in the first of the steps
    num_lacking_blocks: int  # at most, in these steps
    preemption: Preemption | None  # how it gave way, if it is because of that that it has no seat
    preempted_in: int | None  # the step of that; this one, or an earlier one

    @property
    def seconds(self) -> float:
        """How long the steps took."""
        return self.end_s - self.start_s

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """Every way in which it could have given way, with its price. Empty: it has not, or is back."""
        return () if self.preemption is None else alternatives_of(self.preemption)


@dataclass(slots=True)
class RequestTotals:
    """One request in all. Built by `totals_of`."""

    request: TracedRequest
    num_served_steps: int = 0
    num_unserved_steps: Counter[UnservedReason] = field(default_factory=Counter)
    unserved_s: dict[UnservedReason, float] = field(default_factory=dict)
    preemptions: Counter[PreemptionMode] = field(default_factory=Counter)  # as in the result's statistics
    end: TracedEnd | None = None  # None: unfinished where the trace ends
    end_s: float | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None: it has not."""
        return None if self.end is None else self.end.reason


def way_of(cost: PreemptionCost) -> str:
    """Return the chosen way in words."""
    if cost.mode is PreemptionMode.SWAP:
        return f"swap to {(cost.tier or Tier.HOST).value}"
    return _WAYS[cost.mode]


def alternatives_of(preemption: Preemption) -> tuple[Alternative, ...]:
    """Return every way in which a victim could give way, one of them chosen."""
    cost, whole = preemption.cost, preemption.whole
    chosen = way_of(cost)
    if cost.mode in (PreemptionMode.PAUSE, PreemptionMode.UN_ADMIT):
        prices: dict[str, float | None] = {chosen: 0.0}
    else:
        prices = {"recompute": cost.recompute_s, "swap to host": cost.host_s, "swap to disk": cost.disk_s}
    ways = [Alternative(way, seconds, way == chosen) for way, seconds in prices.items()]
    if whole is not None:
        ways.append(Alternative(f"everything: {way_of(whole)}", whole.seconds, is_chosen=False))
    return tuple(ways)


def explain(content: TraceContent, request_id: RequestId) -> tuple[Unserved, ...]:
    """Return every step in which a request was not served, steps in a row with the same reason as one.

    Several requests that bore the name, one after the other, are told one after the other.
    """
    spans: list[Unserved] = []
    is_open = False
    for step, situation in _walk(content):
        standing = situation.standings.get(request_id)
        if standing is None or step.step_id is None:
            is_open = is_open and step.step_id is None
            continue
        cause = Causes(situation, step).of(request_id)
        if cause is None:
            is_open = False
            continue
        span = _span(step, standing, cause)
        if is_open and _is_same(spans[-1], span):
            spans[-1] = _joined(spans[-1], span)
        else:
            spans.append(span)
        is_open = True
    return tuple(spans)


def totals_of(content: TraceContent) -> tuple[RequestTotals, ...]:
    """Return one entry for each request, by arrival."""
    current: dict[RequestId, RequestTotals] = {}
    everybody: list[RequestTotals] = []
    for step, situation in _walk(content):
        for request in step.accepted:
            current[request.request_id] = RequestTotals(request)
            everybody.append(current[request.request_id])
        for end in step.aborted:
            current[end.request_id].end, current[end.request_id].end_s = end, step.start_s
        causes = Causes(situation, step)
        for name in situation.standings:
            _count(current[name], step, causes.of(name))
        _count_preemptions(current, step)
        for end in step.finished:
            current[end.request_id].end, current[end.request_id].end_s = end, step.end_s
    return tuple(everybody)


def _count(totals: RequestTotals, step: TracedStep, cause: Cause | None) -> None:
    if cause is not None:
        totals.num_unserved_steps[cause.reason] += 1
        seconds = totals.unserved_s.get(cause.reason, 0.0)
        totals.unserved_s[cause.reason] = seconds + step.end_s - step.start_s
    elif step.step_id is not None:
        totals.num_served_steps += 1


def _count_preemptions(current: dict[RequestId, RequestTotals], step: TracedStep) -> None:
    for name in (*step.set_back_before, *step.set_back):
        current[name].preemptions[PreemptionMode.RECOMPUTE] += 1
    if not step.has_failed:
        for preemption in step.preemptions:
            current[preemption.victim].preemptions[preemption.mode] += 1


def _walk(content: TraceContent) -> Iterator[tuple[TracedStep, Situation]]:
    """Yield every step with the situation that it was planned in."""
    situation = Situation(content.config)
    for step in content.steps:
        situation.begin(step)
        yield step, situation
        situation.end(step)


def _span(step: TracedStep, standing: Standing, cause: Cause) -> Unserved:
    preemption, preempted_in = cause.preemption, step.step_id
    if preemption is None:
        preemption, preempted_in = standing.preemption, standing.preempted_in
    return Unserved(
        request_id=standing.request.request_id,
        number=standing.request.number,
        reason=cause.reason,
        first_step=step.step_id or 0,
        last_step=step.step_id or 0,
        num_steps=1,
        start_s=step.start_s,
        end_s=step.end_s,
        beneficiary=cause.beneficiary,
        victims=cause.victims,
        holders=cause.holders,
        num_lacking_blocks=cause.num_lacking_blocks,
        preemption=preemption,
        preempted_in=preempted_in,
    )


def _is_same(span: Unserved, later: Unserved) -> bool:
    return (span.number, span.reason, span.beneficiary, span.victims, span.preempted_in) == (
        later.number,
        later.reason,
        later.beneficiary,
        later.victims,
        later.preempted_in,
    )


def _joined(span: Unserved, later: Unserved) -> Unserved:
    return replace(
        span,
        last_step=later.last_step,
        num_steps=span.num_steps + 1,
        end_s=later.end_s,
        num_lacking_blocks=max(span.num_lacking_blocks, later.num_lacking_blocks),
    )
