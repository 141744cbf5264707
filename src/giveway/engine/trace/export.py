"""A trace for ui.perfetto.dev and chrome://tracing: a track for each request, counters for the pools.

Format: "Trace Event Format" (JSON object form): complete events (X), instants (i), counters (C), names (M); times in
microseconds, counted from the first moment of the trace.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from giveway.core.ids import RequestId
from giveway.core.plan import Preemption, PreemptionMode
from giveway.core.request import RequestState
from giveway.engine.trace.causes import Causes, UnservedReason
from giveway.engine.trace.content import PoolCounts, TraceContent, TracedEnd, TracedRequest, TracedStep
from giveway.engine.trace.explain import alternatives_of, way_of
from giveway.engine.trace.situation import Situation, Standing

_PROCESS = 1
_COUNTERS = {
    "device pool (blocks)": ("device_owned", "device_idle"),
    "host pool (blocks)": ("host_owned",),
    "disk pool (blocks)": ("disk_owned",),
}

Event = dict[str, Any]


def chrome_trace(content: TraceContent) -> dict[str, Any]:
    """Return the whole file as plain values."""
    return {"traceEvents": _Export(content).events(), "displayTimeUnit": "ms"}


class _Track:
    """One request: slices one after the other, of which the last is open."""

    def __init__(self, request: TracedRequest, start_s: float) -> None:
        self.request = request
        self.phase = "waiting"
        self.start_s = start_s
        self.counts: Counter[str] = Counter()  # steps by reason, or tokens

    @property
    def tid(self) -> int:
        return self.request.number + 1


class _Export:
    """One pass over a trace."""

    def __init__(self, content: TraceContent) -> None:
        self._content = content
        self._tracks: dict[RequestId, _Track] = {}
        self._events: list[Event] = []
        self._names: list[Event] = [_name("process_name", 0, name="giveway")]
        starts = [step.start_s for step in content.steps]
        arrivals = [request.arrival_s for step in content.steps for request in step.accepted]
        self._origin_s = min([*starts, *arrivals], default=0.0)
        self._pools: PoolCounts | None = None

    def events(self) -> list[Event]:
        situation, last_s = Situation(self._content.config), self._origin_s
        for step in self._content.steps:
            situation.begin(step)
            self._begin(step)
            self._set_phases(step, situation)
            situation.end(step)
            for end in step.finished:
                self._finish(end, step.end_s)
            if step.pools is not None:
                self._count(step.pools, step.end_s)
            last_s = max(last_s, step.end_s)
        for track in self._tracks.values():
            self._close(track, last_s)
        self._events.sort(key=lambda event: event["ts"])  # stable: of one moment, as they were told
        return self._names + self._events

    def _begin(self, step: TracedStep) -> None:
        for request in step.accepted:
            track = self._tracks[request.request_id] = _Track(request, min(request.arrival_s, step.start_s))
            label = f"{request.request_id} (class {request.priority})"
            self._names += [
                _name("thread_name", track.tid, name=label),
                _name("thread_sort_index", track.tid, sort_index=track.tid),
            ]
        for end in step.aborted:
            self._finish(end, step.start_s)

    def _set_phases(self, step: TracedStep, situation: Situation) -> None:
        if step.step_id is None:
            return
        causes = Causes(situation, step)
        chunks = {chunk.request_id: chunk.num_tokens for chunk in step.chunks}
        for name, standing in situation.standings.items():
            cause, track = causes.of(name), self._tracks[name]
            if cause is None:
                self._enter(track, "prefill" if name in chunks else "decode", step.start_s)
                track.counts["tokens"] += chunks.get(name, 1)
                continue
            preemption = cause.preemption if not step.has_failed else None
            self._enter(track, _phase(standing, step, preemption), step.start_s)
            track.counts[cause.reason.value] += 1
            if preemption is not None or cause.reason is UnservedReason.STEP_FAILED:
                self._mark(track, step, preemption)

    def _enter(self, track: _Track, phase: str, at_s: float) -> None:
        if phase != track.phase:
            self._close(track, at_s)
            track.phase = phase

    def _close(self, track: _Track, at_s: float) -> None:
        start, stop = self._us(track.start_s), self._us(max(at_s, track.start_s))
        if stop > start:
            self._events.append(
                {
                    "ph": "X",
                    "pid": _PROCESS,
                    "tid": track.tid,
                    "name": track.phase,
                    "cat": "request",
                    "ts": start,
                    "dur": stop - start,
                    "args": dict(track.counts),
                }
            )
        track.start_s, track.counts = max(at_s, track.start_s), Counter()

    def _finish(self, end: TracedEnd, at_s: float) -> None:
        track = self._tracks.pop(end.request_id)
        self._close(track, at_s)
        args = {
            "output tokens": end.num_output_tokens,
            "preemptions": end.num_preemptions,
            "tokens recomputed": end.num_recomputed_tokens,
        }
        self._instant(track, f"ends: {end.reason.value}", at_s, args)

    def _mark(self, track: _Track, step: TracedStep, preemption: Preemption | None) -> None:
        if preemption is None:
            self._instant(track, "step failed", step.start_s, {"step": step.step_id})
            return
        args: dict[str, Any] = {
            "step": step.step_id,
            "beneficiary": preemption.beneficiary or "(by command)",
            "blocks given up": preemption.num_blocks,
            "blocks kept": preemption.num_kept,
        }
        for each in alternatives_of(preemption):
            args[f"{each.way} (ms)"] = "not possible" if each.seconds is None else round(1e3 * each.seconds, 6)
        self._instant(track, f"gives way: {way_of(preemption.cost)}", step.start_s, args)

    def _instant(self, track: _Track, name: str, at_s: float, args: dict[str, Any]) -> None:
        at = self._us(max(at_s, track.start_s))
        self._events.append(
            {"ph": "i", "s": "t", "pid": _PROCESS, "tid": track.tid, "name": name, "ts": at, "args": args}
        )

    def _count(self, pools: PoolCounts, at_s: float) -> None:
        for title, names in _COUNTERS.items():
            values = {name.split("_")[1]: getattr(pools, name) for name in names}
            if self._pools is None or any(getattr(self._pools, name) != getattr(pools, name) for name in names):
                at = self._us(at_s)
                self._events.append({"ph": "C", "pid": _PROCESS, "tid": 0, "name": title, "ts": at, "args": values})
        self._pools = pools

    def _us(self, at_s: float) -> int:
        """Whole numbers, so that a slice ends exactly where the next one begins."""
        return round(1e6 * (at_s - self._origin_s))


def _name(kind: str, tid: int, **args: Any) -> Event:
    return {"ph": "M", "pid": _PROCESS, "tid": tid, "name": kind, "ts": 0, "args": args}


_STATES = {
    RequestState.WAITING: "waiting",
    RequestState.RUNNING: "on its seat, not served",
    RequestState.SWAPPING_OUT: "swapping out",
    RequestState.SWAPPED: "swapped out",
    RequestState.SWAPPING_IN: "swapping in",
    RequestState.PREEMPTED: "preempted",
}

_MODES = {
    PreemptionMode.SWAP: "swapping out",
    PreemptionMode.RECOMPUTE: "preempted",
    PreemptionMode.PAUSE: "paused",
    PreemptionMode.UN_ADMIT: "waiting",
}


def _phase(standing: Standing, step: TracedStep, preemption: Preemption | None) -> str:
    """Name what a request that is not served goes through in a step."""
    if preemption is not None:
        tier = preemption.cost.tier
        return _MODES[preemption.mode] + (f" ({tier.value})" if tier is not None else "")
    if not step.has_failed and any(swap_in.request_id == standing.request.request_id for swap_in in step.swap_ins):
        return f"swapping in ({standing.tier.value})" if standing.tier is not None else "swapping in"
    if standing.state is RequestState.PREEMPTED and standing.preemption is not None:
        return _MODES[standing.preemption.mode] if standing.preemption.mode is PreemptionMode.PAUSE else "preempted"
    where = f" ({standing.tier.value})" if standing.tier is not None else ""
    return _STATES[standing.state] + where
