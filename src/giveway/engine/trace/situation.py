"""Who was where, step by step: what the scheduler knew, put together again from a trace alone."""

from __future__ import annotations

from dataclasses import dataclass

from giveway.core.config import SchedulerConfig, SchedulingPolicy
from giveway.core.errors import ConfigError
from giveway.core.ids import RequestId
from giveway.core.kv_cache import CopyDirection, Tier
from giveway.core.plan import Preemption, PreemptionMode
from giveway.core.policy import aged_class, num_aging_spans, rank_of
from giveway.core.request import NEWCOMER_STATES, Rank, RequestState, paid_rank
from giveway.engine.trace.content import TracedCopy, TracedRequest, TracedStep


@dataclass(slots=True)
class Standing:
    """What is known of an unfinished request. Written by `Situation` alone."""

    request: TracedRequest
    state: RequestState = RequestState.WAITING
    num_output_tokens: int = 0
    num_kept_blocks: int = 0  # of one that has given way
    tier: Tier | None = None  # where KV is parked, or on its way to
    preemption: Preemption | None = None  # how it gave way, until it is back on a seat
    preempted_in: int | None = None  # step id of that
    has_paid: bool = False  # it has lost its own length to its class, and goes first in it

    @property
    def is_newcomer(self) -> bool:
        """Whether it wants a seat."""
        return self.state in NEWCOMER_STATES


class Situation:
    """The unfinished requests. For each step of a trace, in order, `begin` leads to the plan and `end` behind it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._last_number = -1
        self.standings: dict[RequestId, Standing] = {}

    def rank_of(self, standing: Standing, now_s: float) -> Rank:
        """Return the rank that a request had in a step planned at `now_s`."""
        request, aging_s = standing.request, self._config.priority_aging_s
        priority = request.priority
        if aging_s is not None and self._config.policy is SchedulingPolicy.PRIORITY:
            priority = aged_class(priority, num_aging_spans(request.arrival_s, now_s, aging_s))
        rank = rank_of(priority, request.number, self._config.policy)
        return paid_rank(rank) if standing.has_paid else rank

    def begin(self, step: TracedStep) -> None:
        """Take in what happened before the plan was made. Raises ConfigError for what cannot have happened."""
        for request in step.accepted:
            if request.request_id in self.standings:
                raise ConfigError(f"request {request.request_id!r} is accepted a second time")
            if request.number <= self._last_number:
                raise ConfigError(
                    f"request {request.request_id!r} has the arrival number {request.number} a second time"
                )
            self._last_number = request.number
            self.standings[request.request_id] = Standing(request)
        for name in step.set_back_before:
            self._set_back(name)
        for copy in step.overdue:
            self._end_copy(copy)
        for end in step.aborted:
            self._forget(end.request_id)

    def check(self, step: TracedStep) -> None:
        """Raise ConfigError if a plan names somebody who was not there, or serves one twice."""
        served = [*(chunk.request_id for chunk in step.chunks), *step.decodes]
        if len(set(served)) != len(served):
            raise ConfigError("a request is served twice in one step")
        named = [
            *served,
            *(preemption.victim for preemption in step.preemptions),
            *(preemption.beneficiary for preemption in step.preemptions if preemption.beneficiary is not None),
            *(deferral.request_id for deferral in step.deferrals),
            *(admission.request_id for admission in step.admissions),
            *(swap_in.request_id for swap_in in step.swap_ins),
            *step.dropped,
            *step.moving,
            *step.given_up,
        ]
        for name in named:
            self._find(name)

    def end(self, step: TracedStep) -> None:
        """Take in what the step did. Raises ConfigError for what cannot have happened."""
        if not step.has_failed:
            self._carry_out(step)
        for copy in step.copies:
            self._end_copy(copy)
        for name in step.set_back:
            self._set_back(name)
        for move in step.moved:
            standing = self._find(move.request_id)
            standing.tier = move.tier
            if move.tier is None and standing.state is RequestState.SWAPPED:
                standing.state = RequestState.PREEMPTED
        for end in step.finished:
            self._forget(end.request_id)

    def _carry_out(self, step: TracedStep) -> None:
        for preemption in step.preemptions:
            self._preempt(preemption, step.step_id)
        for name in [*(a.request_id for a in step.admissions), *(s.request_id for s in step.swap_ins)]:
            standing = self._find(name)
            standing.state, standing.num_kept_blocks = RequestState.RUNNING, 0
            standing.preemption = standing.preempted_in = None
        for swap_in in step.swap_ins:
            self._find(swap_in.request_id).state = RequestState.SWAPPING_IN
        for name in [*(chunk.request_id for chunk in step.chunks if chunk.samples), *step.decodes]:
            self._find(name).num_output_tokens += 1

    def _preempt(self, preemption: Preemption, step_id: int | None) -> None:
        standing = self._find(preemption.victim)
        standing.preemption, standing.preempted_in = preemption, step_id
        standing.has_paid = standing.has_paid or preemption.has_paid
        standing.num_kept_blocks = preemption.num_kept
        if preemption.mode is PreemptionMode.SWAP:
            standing.state, standing.tier = RequestState.SWAPPING_OUT, preemption.cost.tier
        elif preemption.mode is PreemptionMode.UN_ADMIT and not standing.num_output_tokens:
            standing.state = RequestState.WAITING
        else:
            standing.state = RequestState.PREEMPTED

    def _end_copy(self, copy: TracedCopy) -> None:
        standing = self._find(copy.request_id)
        if copy.has_failed:
            standing.state, standing.tier = RequestState.PREEMPTED, None
        elif copy.direction is CopyDirection.OUT:
            standing.state = RequestState.SWAPPED
        else:
            standing.state, standing.tier = RequestState.RUNNING, None

    def _set_back(self, name: RequestId) -> None:
        standing = self._find(name)
        standing.state, standing.num_kept_blocks, standing.tier = RequestState.PREEMPTED, 0, None

    def _forget(self, name: RequestId) -> None:
        self._find(name)
        del self.standings[name]

    def _find(self, name: RequestId) -> Standing:
        standing = self.standings.get(name)
        if standing is None:
            raise ConfigError(f"request {name!r} is not there: it was never accepted, or has ended")
        return standing
