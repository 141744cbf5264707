"""Prometheus metrics of one engine and its server: a listener of steps, and what `/metrics` answers."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import generate_latest

from giveway.core.config import LEAST_URGENT_CLASS, MOST_URGENT_CLASS, clamp_class
from giveway.core.events import (
    Accepted,
    Admitted,
    CopyEnded,
    Finished,
    ParkedMoved,
    Preempted,
    PromptLogprobs,
    Refused,
    StepEvent,
    TokenEmitted,
    TokensComputed,
)
from giveway.core.ids import RequestId
from giveway.core.kv_cache import Tier
from giveway.core.plan import PreemptionMode, StepPlan
from giveway.core.request import FinishReason, Request, RequestState
from giveway.engine.engine import Engine
from giveway.server.classes import PriorityClasses
from giveway.server.metric_families import OTHER, STATUSES, STEP_PARTS, EngineFamilies, HttpFamilies, Rejection
from giveway.server.preemption_causes import PlannedPreemptions
from giveway.server.series import Gauge, SeriesCollector

_SEATED = frozenset({RequestState.RUNNING, RequestState.SWAPPING_IN})
_PARKED = frozenset({RequestState.SWAPPED, RequestState.SWAPPING_OUT})


class _Live:
    """What is remembered of an unfinished request."""

    __slots__ = ("arrival_s", "class_name", "has_sat", "is_stalled", "last_token_s", "num_prompt_tokens", "place")

    def __init__(self, class_name: str, arrival_s: float, num_prompt_tokens: int) -> None:
        self.class_name = class_name
        self.arrival_s = arrival_s
        self.num_prompt_tokens = num_prompt_tokens
        self.last_token_s: float | None = None  # None: no token yet
        self.place: Gauge | None = None  # that counts it now; None: none yet
        self.has_sat = False
        self.is_stalled = False  # it had a seat, lost it, and has none yet


class EngineMetrics:
    """Counts what steps tell; called under the lock of its series, in the engine's thread.

    A request's class is the name that its own integer belongs to, whatever aging has made of it since.
    """

    def __init__(self, engine: Engine, families: EngineFamilies, classes: PriorityClasses) -> None:
        self.families = families
        self._engine = engine
        # By the integer: a look at a table for every request.
        self._names = [classes.name_of(number) for number in range(MOST_URGENT_CLASS, LEAST_URGENT_CLASS + 1)]
        self._live: dict[RequestId, _Live] = {}
        self._num_in: dict[Gauge, int] = {families.running: 0, families.waiting: 0, families.swapped: 0}
        self._num_stalled = dict.fromkeys(classes.names, 0)
        self._stall_changes: list[tuple[float, str, int]] = []  # of the step being told: when, class, one more or less
        self._stalls_until_s = 0.0
        self._tokens_at_s = -1.0  # when the latest tokens came
        self._preemptions = PlannedPreemptions(None)  # of the step being told
        self._read_pools()

    def count(self, plan: StepPlan | None, events: Sequence[StepEvent]) -> None:
        """Take in one step."""
        is_done = self._engine.last_times is not None  # else no step was made, or it failed
        carried_out = plan if is_done else None
        self._preemptions = PlannedPreemptions(carried_out)
        self._count_events(events)
        if carried_out is not None:
            self._count_step(carried_out)
        elif plan is not None:
            self.families.failed_steps.add(1)
        self._check_places()
        self._add_stalls(self._engine.scheduler.state.now_s)
        self._read_pools()

    # Events

    def _count_events(self, events: Sequence[StepEvent]) -> None:
        """Count events one by one; tokens, of which there are by far the most, by class and equal gap."""
        live, before_s = self._live, self._tokens_at_s
        now_s: float | None = None  # when the first of the tokens came; with it nearly all
        steady = dict.fromkeys(self._num_stalled, 0)  # of these, tokens whose predecessors came at `before_s`
        for event in events:
            if type(event) is not TokenEmitted:
                self._count_event(event)
                continue
            request = live.get(event.request_id) or self._find(event.request_id)
            if request is None:
                continue
            if now_s is None:
                now_s = self._tokens_at_s = event.time_s
            last_s = request.last_token_s
            request.last_token_s = event.time_s
            if last_s == before_s and event.time_s == now_s:
                steady[request.class_name] += 1
            elif last_s is None:
                self._count_first_token(request, event.time_s)
            else:
                self._count_gaps(request.class_name, event.time_s - last_s, 1)
        if now_s is not None:
            for class_name, times in steady.items():
                if times:
                    self._count_gaps(class_name, now_s - before_s, times)

    def _count_gaps(self, class_name: str, seconds: float, times: int) -> None:
        self.families.between_tokens_s.observe(seconds, class_name, times=times)
        self.families.generated_tokens.add(times, class_name)

    def _count_first_token(self, request: _Live, now_s: float) -> None:
        families, name = self.families, request.class_name
        families.first_token_s.observe(now_s - request.arrival_s, name)
        families.prompt_tokens.add(request.num_prompt_tokens, name)
        families.generated_tokens.add(1, name)

    def _count_event(self, event: StepEvent) -> None:
        if isinstance(event, Refused | PromptLogprobs):
            return
        request = self._live.get(event.request_id) or self._find(event.request_id)
        if request is None:
            return
        if isinstance(event, TokensComputed):
            if event.num_recomputed:
                self.families.recomputed_tokens.add(event.num_recomputed, request.class_name)
            return
        if isinstance(event, Accepted):
            self.families.accepted.add(1, request.class_name)
        elif isinstance(event, Admitted):
            self._count_admission(request, event)
        elif isinstance(event, Preempted):
            self._count_preemption(request, event)
        elif isinstance(event, CopyEnded):
            self._count_copy(request, event)
        elif isinstance(event, ParkedMoved):
            self._count_move(request, event)
        elif isinstance(event, Finished):
            self._count_end(request, event)
            return
        facts = self._engine.scheduler.requests.get(event.request_id)
        # Whoever is seated after the step took its seat when the event says so that tells of it, and not before.
        if facts is not None and (isinstance(event, Admitted) or facts.state not in _SEATED):
            self._put(request, facts, event.time_s)

    def _find(self, request_id: RequestId) -> _Live | None:
        """Begin to remember a request."""
        spec = self._engine.spec_of(request_id)
        if spec is None:
            return None
        class_name = self._names[clamp_class(spec.priority)]
        request = self._live[request_id] = _Live(class_name, spec.arrival_s, len(spec.prompt_token_ids))
        return request

    def _count_admission(self, request: _Live, event: Admitted) -> None:
        self._leave_place(request, event.time_s)  # here, for it may have ended by the end of the step
        if request.has_sat:
            return
        families, name = self.families, request.class_name
        request.has_sat = True
        families.queue_s.observe(event.time_s - request.arrival_s, name)
        if self._engine.scheduler.state.kv.index is not None:
            families.prefix_queries.add(request.num_prompt_tokens, name)
            families.prefix_hits.add(event.num_hit_tokens, name)

    def _count_preemption(self, request: _Live, event: Preempted) -> None:
        families, name = self.families, request.class_name
        if event.is_again:
            families.further_losses.add(1, name)
            return
        cause = self._preemptions.cause_of(event)
        families.preemptions_by_cause.add(1, event.mode.value, cause.value, name)
        if event.mode is not PreemptionMode.UN_ADMIT:
            families.preemptions.add(1, name)

    def _count_copy(self, request: _Live, event: CopyEnded) -> None:
        if event.failed:
            self.families.failed_copies.add(1)
            return
        num_bytes = event.num_blocks * self._engine.block_bytes
        self.families.swapped_bytes.add(num_bytes, event.direction.value, event.tier.value, request.class_name)

    def _count_move(self, request: _Live, event: ParkedMoved) -> None:
        if event.tier is Tier.DISK:
            self.families.moved_bytes.add(event.num_blocks * self._engine.block_bytes)
        else:
            self.families.further_losses.add(1, request.class_name)

    def _count_end(self, request: _Live, event: Finished) -> None:
        families, name = self.families, request.class_name
        self._leave_place(request, event.time_s)
        del self._live[event.request_id]
        families.finished.add(1, event.reason.value, name)
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            families.whole_s.observe(event.time_s - request.arrival_s, name)

    # Who is where

    def _put(self, request: _Live, facts: Request, now_s: float) -> None:
        """Count a request where it is now."""
        families, state = self.families, facts.state
        place = families.waiting
        if state in _SEATED:
            place = families.running
        elif state in _PARKED:
            place = families.swapped
        if place is request.place:
            return
        self._leave_place(request, now_s)
        request.place = place
        place.add(1, request.class_name)
        self._num_in[place] += 1
        if request.has_sat and place is not families.running:
            self._stall(request, 1, now_s)

    def _leave_place(self, request: _Live, now_s: float) -> None:
        if request.is_stalled:
            self._stall(request, -1, now_s)
        if request.place is not None:
            request.place.add(-1, request.class_name)
            self._num_in[request.place] -= 1
            request.place = None

    def _check_places(self) -> None:
        """Count anew if a request changed hands without an event, as when a copy that others relied on fails."""
        state, families, counted = self._engine.scheduler.state, self.families, self._num_in
        num_parked = len(state.kv.parked)
        if (
            len(self._live) == len(state.requests)
            and counted[families.running] == len(state.residents)
            and counted[families.swapped] == num_parked + len(state.swapping_out)
            and counted[families.waiting] + num_parked == len(state.newcomers)
        ):
            return
        for request_id in self._live.keys() - state.requests.keys():
            self._leave_place(self._live.pop(request_id), state.now_s)
        for request_id, facts in state.requests.items():
            request = self._live.get(request_id) or self._find(request_id)
            if request is not None:
                request.has_sat = facts.num_admissions > 0
                self._put(request, facts, state.now_s)

    # Stalls: added up as they last, so that a long one shows before it ends

    def _stall(self, request: _Live, change: int, now_s: float) -> None:
        request.is_stalled = change > 0
        self._stall_changes.append((now_s, request.class_name, change))

    def _add_stalls(self, until_s: float) -> None:
        """Add up to the end of the step, by the order of time: a seat is taken at its begin, and lost at its end."""
        for time_s, class_name, change in sorted(self._stall_changes):
            self._pass_stall_time(time_s)
            self._num_stalled[class_name] += change
        self._stall_changes.clear()
        self._pass_stall_time(until_s)

    def _pass_stall_time(self, until_s: float) -> None:
        seconds = until_s - self._stalls_until_s
        if seconds <= 0:
            return
        self._stalls_until_s = until_s
        for class_name, num_stalled in self._num_stalled.items():
            if num_stalled:
                self.families.stall_s.add(num_stalled * seconds, class_name)

    # Steps

    def _count_step(self, plan: StepPlan) -> None:
        families, times = self.families, self._engine.last_times
        num_tokens = plan.num_tokens
        if num_tokens:
            families.step_tokens.observe(num_tokens)
            families.computed_tokens.add(num_tokens)
        for deferral in plan.deferrals:
            request = self._live.get(deferral.request_id)
            if request is not None:
                families.deferrals.add(1, deferral.reason.value, request.class_name)
        if times is not None:
            for part in STEP_PARTS:
                families.step_s.observe(getattr(times, f"{part}_s"), part)

    def _read_pools(self) -> None:
        state, families = self._engine.scheduler.state, self.families
        kv, blocks = state.kv, families.blocks.values
        families.cache_usage.set(kv.device.num_owned / kv.device.size)
        for tier, pool in (("device", kv.device), ("host", kv.host), ("disk", kv.disk)):
            num_owned, num_free = pool.num_owned, pool.num_free
            blocks[tier, "owned"] = num_owned
            blocks[tier, "free"] = num_free
            blocks[tier, "idle"] = pool.size - num_owned - num_free
        families.held.set(len(state.held))


class ServerMetrics:
    """All metrics of a server. Hand it to `Engine.add_listener` before the first step; `/metrics` is `exposition()`.

    Every request counts, and each of several answers to a prompt is one, as in vLLM.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(
        self,
        engine: Engine,
        classes: PriorityClasses | None = None,
        *,
        model_name: str,
        routes: Sequence[str] = (),
        engine_label: str = "0",
    ) -> None:
        """model_name: as clients know it. routes: templates of all routes of the server."""
        classes = classes or PriorityClasses()
        engine_families = EngineFamilies(classes.names)
        self._http = HttpFamilies(routes, classes.names)
        self._series = SeriesCollector(
            [*engine_families.all(), *self._http.all()], {"model_name": model_name, "engine": engine_label}
        )
        self._engine = EngineMetrics(engine, engine_families, classes)
        self._registry = CollectorRegistry()
        self._registry.register(self._series)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def __call__(self, plan: StepPlan | None, events: Sequence[StepEvent]) -> None:
        """Take in one step of the engine."""
        with self._series.lock:
            self._engine.count(plan, events)

    def count_answer(self, route: str, status: int) -> None:
        """Count an answered HTTP request. route: its template; one that is not known counts as `other`."""
        responses = self._http.responses
        code = str(status) if str(status) in STATUSES else f"{min(max(status // 100, 1), 5)}xx"
        with self._series.lock:
            responses.add(1, route if (route, code) in responses.values else OTHER, code)

    def count_rejection(self, reason: Rejection) -> None:
        """Count a request that was turned away before it reached the engine."""
        with self._series.lock:
            self._http.rejections.add(1, reason.value)

    def count_disconnect(self, class_name: str) -> None:
        """Count a client that went away before its answer was complete. class_name: one of the configured names."""
        with self._series.lock:
            self._http.disconnects.add(1, class_name)

    def exposition(self) -> bytes:
        """Return all series in the text format of Prometheus, to be sent as `content_type`. From any thread."""
        return generate_latest(self._registry)
