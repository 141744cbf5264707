"""The one writer of scheduling state: `accept`, `commit` and `discard` change it, `plan` reads it.

accept(commands) -> events        between steps: submissions, aborts, orders to give way
plan() -> StepPlan                decide; nothing changes
commit(plan, outcome) -> events   what was planned has happened
discard(plan, message) -> events  executing the plan failed: exactly one of commit and discard follows every plan
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush

from giveway.core.commands import Abort, Command, GiveWay, Hold, Submit
from giveway.core.config import MOST_URGENT_CLASS, CacheConfig, SchedulerConfig, SchedulingPolicy
from giveway.core.cost_profile import SHIPPED, CostProfile, ForwardWork
from giveway.core.errors import InvalidRequestError, InvariantError
from giveway.core.events import (
    Accepted,
    ParkedMoved,
    PromptLogprobs,
    Refused,
    StepEvent,
    TokenEmitted,
    TokensComputed,
)
from giveway.core.ids import RequestId
from giveway.core.invariants import check_invariants
from giveway.core.isolation import blocks_written, halves, targets_of
from giveway.core.kv_cache import CopyDirection, Tier
from giveway.core.limits import check_limits
from giveway.core.plan import ScheduledChunk, StepOutcome, StepPlan
from giveway.core.planner import plan_step
from giveway.core.policy import aged_class, num_aging_spans, rank_of
from giveway.core.request import NEWCOMER_STATES, FinishReason, Request, RequestSpec, RequestState
from giveway.core.state import SchedulerState
from giveway.core.transitions import Transitions


class Scheduler:
    """Owns all scheduling state."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        costs: CostProfile = SHIPPED,
        *,
        planner: Callable[[SchedulerState], StepPlan] = plan_step,
    ) -> None:
        self._state = SchedulerState(config, cache_config, costs)
        self._transitions = Transitions(self._state)
        self._planner = planner
        self._num_arrivals = 0
        self._plan_is_open = False

    # Reading

    @property
    def state(self) -> SchedulerState:
        """Everything known; for reading only."""
        return self._state

    @property
    def requests(self) -> Mapping[RequestId, Request]:
        """Unfinished requests by id; for reading only."""
        return self._state.requests

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: unfinished requests, or copies whose blocks are still to come back."""
        return self._state.has_unheld or self._state.kv.has_live_copies

    def check_request(self, spec: RequestSpec) -> None:
        """Raise InvalidRequestError if the request can never be served. Reads configuration only."""
        check_limits(spec, self._state.config, self._state.cache_config)

    # Accept

    def accept(self, commands: Sequence[Command], now_s: float) -> list[StepEvent]:
        """Take in commands, and give up on copies that were not heard of for too long. Only between steps."""
        if self._plan_is_open:
            raise InvariantError("accept was called between plan and commit")
        self._state.now_s = self._state.kv.now_s = now_s
        events: list[StepEvent] = []
        for command in commands:
            if isinstance(command, Submit):
                events.append(self._submit(command.spec, now_s))
            elif isinstance(command, Abort):
                request = self._state.requests.get(command.request_id)
                if request is not None:
                    events.append(self._transitions.finish(request, FinishReason.ABORT, None, now_s))
            elif isinstance(command, GiveWay):
                if command.request_id in self._state.requests:
                    self._state.forced[command.request_id] = command.choice
            elif isinstance(command, Hold):
                if command.request_id in self._state.requests:
                    self._state.held.add(command.request_id)
            else:
                self._state.held.discard(command.request_id)
        events += self._transitions.lose_overdue_copies(now_s)
        for request_id in sorted(self._state.held & self._state.kv.kept.keys()):
            # What it had kept when it gave way earlier: it may stand in everybody's way, and nobody might take it.
            request = self._state.requests[request_id]
            if request.state in NEWCOMER_STATES:
                events.append(self._transitions.drop_all_kept(request, now_s))
        self._age(now_s)
        self._state.version += 1
        return events

    def _submit(self, spec: RequestSpec, now_s: float) -> StepEvent:
        state = self._state
        try:
            self.check_request(spec)
            if spec.request_id in state.requests:
                raise InvalidRequestError(f"request id {spec.request_id!r} is already in use")
        except InvalidRequestError as error:
            return Refused(spec.request_id, now_s, error)
        request = Request(spec, rank_of(spec.priority, self._num_arrivals, state.config.policy))
        self._num_arrivals += 1
        state.requests[spec.request_id] = request
        state.newcomers.add(request)
        state.kv.learn(spec.request_id, request.num_known_tokens, request.known_token_ids, spec.cache_salt)
        state.last_arrival_s[request.rank[0]] = now_s
        if spec.branch_of is not None:
            state.branches.setdefault(spec.branch_of, []).append(request)
        if request.rank[0] > MOST_URGENT_CLASS:
            self._age_later(request, 1)
        return Accepted(spec.request_id, now_s)

    def _age(self, now_s: float) -> None:
        """Lower the class of those who arrived long enough ago; it counts everywhere from now on."""
        state, aging_s = self._state, self._state.config.priority_aging_s
        if aging_s is None or state.config.policy is not SchedulingPolicy.PRIORITY:
            return
        has_changed = False
        while state.next_aging and state.next_aging[0][0] <= now_s:
            due_s, num_spans, request_id = heappop(state.next_aging)
            request = state.requests.get(request_id)
            if request is None or request.spec.arrival_s + num_spans * aging_s != due_s:
                continue  # it has ended, and another may bear its name
            num_spans = num_aging_spans(request.spec.arrival_s, now_s, aging_s)
            group = aged_class(request.spec.priority, num_spans)
            has_changed = has_changed or group != request.rank[0]
            request.rank = (group, request.rank[1])
            if group > MOST_URGENT_CLASS:
                self._age_later(request, num_spans + 1)
        if has_changed:
            state.residents.resort()
            state.newcomers.resort()

    def _age_later(self, request: Request, num_spans: int) -> None:
        aging_s = self._state.config.priority_aging_s
        if aging_s is not None:
            due_s = request.spec.arrival_s + num_spans * aging_s
            heappush(self._state.next_aging, (due_s, num_spans, request.request_id))

    # Plan

    def plan(self) -> StepPlan:
        """Choose the next step. Changes nothing but the promise that commit or discard follows.

        Raises KVCacheFullError under the policy `none`; InvariantError for an empty plan in spite of runnable work.
        """
        if self._plan_is_open:
            raise InvariantError("plan was called twice without commit or discard")
        plan = self._planner(self._state)
        if plan.given_up and not self._state.kv.lost:
            raise InvariantError(f"nobody can go on, yet no block is lost: {plan.describe()}")
        self._plan_is_open = True
        return plan

    def _close(self, plan: StepPlan) -> None:
        if not self._plan_is_open or plan.state_version != self._state.version:
            raise InvariantError(
                f"step {plan.step_id} was planned on state {plan.state_version}, which is now {self._state.version}"
            )
        self._plan_is_open = False

    # Commit

    def commit(self, plan: StepPlan, outcome: StepOutcome) -> list[StepEvent]:
        """Apply a plan and its outcome; the only place where requests advance."""
        if outcome.step_id != plan.step_id:
            raise InvariantError(f"the outcome of step {outcome.step_id} was given for step {plan.step_id}")
        self._close(plan)
        state, now_s, transitions = self._state, outcome.now_s, self._transitions
        state.now_s = state.kv.now_s = now_s
        self._use_copy_ids(plan)
        events: list[StepEvent] = []
        seated = [(admission.request_id, admission.hits) for admission in plan.admissions]
        seated += [(swap_in.copy.request_id, swap_in.hits) for swap_in in plan.swap_ins]
        for request_id, hits in seated:  # before their owners give way
            if hits:
                state.kv.hold_hits(hits, state.requests[request_id].rank[0])
        transitions.give_all(plan, outcome, events)
        transitions.end_copies(plan.copies_out, outcome, events)
        seated_s = now_s - outcome.duration_s  # a seat is taken when the step begins
        events += [transitions.admit(admission, seated_s) for admission in plan.admissions]
        events += [transitions.begin_swap_in(swap_in, now_s) for swap_in in plan.swap_ins]
        transitions.end_copies([swap_in.copy for swap_in in plan.swap_ins], outcome, events)
        for growth in plan.growths:
            state.kv.grow(growth.request_id, growth.table, state.requests[growth.request_id].rank[0])
        for chunk in plan.chunks:
            self._advance_chunk(chunk, outcome, events)
        for request_id in plan.decodes.request_ids:
            self._advance(state.requests[request_id], 1, True, outcome, events)
        events += [
            transitions.finish(state.requests[lost.request_id], FinishReason.ERROR, lost.message, now_s)
            for lost in plan.given_up
        ]
        self._clear_suspects(plan)
        if state.config.refine_costs and _teaches(plan):
            self._refine_costs(plan, outcome)
        self._next_step()
        return events

    def _use_copy_ids(self, plan: StepPlan) -> None:
        """No copy of a later plan bears the id of one of this: a late word of it must find nobody else."""
        self._state.next_copy_id += len(plan.moves) + len(plan.copies_out) + len(plan.swap_ins)

    def _refine_costs(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Learn from what the step took; copies only where all of one direction went to one tier."""
        costs, block_size = self._state.costs, self._state.cache_config.block_size
        spans = [(chunk.start, chunk.start + chunk.num_tokens) for chunk in plan.chunks]
        spans += [(position, position + 1) for position in plan.decodes.positions]
        if spans:
            costs = self._state.learner.refined(costs, ForwardWork.of(spans), outcome.forward_s)
        out = [(copy.tier, len(copy.device_blocks)) for copy in plan.copies_out]
        out += [(Tier.DISK, len(move.host_blocks)) for move in plan.moves]
        back = [(swap_in.copy.tier, len(swap_in.copy.device_blocks)) for swap_in in plan.swap_ins]
        for direction, copies, actual_s in (
            (CopyDirection.OUT, out, outcome.copy_out_s),
            (CopyDirection.IN, back, outcome.copy_in_s),
        ):
            tiers = {tier for tier, _ in copies}
            if len(tiers) == 1:
                num_slots = block_size * sum(num_blocks for _, num_blocks in copies)
                costs = costs.with_copy(direction, tiers.pop(), num_slots, actual_s)
        self._state.costs = costs

    def _next_step(self) -> None:
        state = self._state
        state.forced.clear()
        state.next_step_id += 1
        state.version += 1
        if state.config.check_invariants:
            check_invariants(state)

    # Progress

    def _advance_chunk(self, chunk: ScheduledChunk, outcome: StepOutcome, events: list[StepEvent]) -> None:
        request = self._state.requests[chunk.request_id]
        values = outcome.prompt_logprobs.get(chunk.request_id)
        if values is not None:
            known = request.num_prompt_logprobs  # values[0] stands at position start + 1; position 1 is the first
            fresh = values[max(known - chunk.start, 0) :]
            if fresh:
                request.report_prompt_logprobs(len(fresh))
                events.append(PromptLogprobs(chunk.request_id, outcome.now_s, known + 1, fresh))
        self._advance(request, chunk.num_tokens, chunk.samples, outcome, events)

    def _advance(
        self, request: Request, num_tokens: int, samples: bool, outcome: StepOutcome, events: list[StepEvent]
    ) -> None:
        """Count computed tokens, publish filled blocks, take the sampled token, finish if that was the last."""
        request_id, now_s = request.request_id, outcome.now_s
        fault = outcome.faults.get(request_id) if outcome.faults else None
        token_id = outcome.sampled.get(request_id) if samples else None
        if samples and token_id is None and fault is None:
            fault = "the executor gave no token for it"
        if fault is not None:
            # What it computed may be as bad as its logits: nobody may find it.
            self._state.kv.forget_content(self._state.kv.tables[request_id])
            events.append(self._transitions.finish(request, FinishReason.ERROR, fault, now_s))
            return
        again = request.compute(num_tokens)
        if num_tokens > 1 or again or not request.output_token_ids:
            events.append(TokensComputed(request_id, now_s, num_tokens, again))
        if token_id is not None:
            request.append(token_id)
            index = len(request.output_token_ids) - 1
            events.append(TokenEmitted(request_id, now_s, token_id, index, outcome.logprobs.get(request_id)))
        if (request.num_computed_tokens % self._state.cache_config.block_size) < num_tokens:  # a block was filled
            self._transitions.publish(request)
        if token_id is not None:
            self._finish_if_done(request, token_id, outcome, events)

    def _finish_if_done(self, request: Request, token_id: int, outcome: StepOutcome, events: list[StepEvent]) -> None:
        spec, num_output = request.spec, len(request.output_token_ids)
        stop = outcome.stops.get(request.request_id) if outcome.stops else None
        if stop is not None:
            events.append(self._transitions.finish(request, stop.reason, stop.detail, outcome.now_s))
        elif token_id in spec.stop_token_ids and num_output >= spec.sampling.min_tokens:
            events.append(self._transitions.finish(request, FinishReason.STOP, None, outcome.now_s))
        elif num_output >= spec.max_new_tokens:
            events.append(self._transitions.finish(request, FinishReason.LENGTH, None, outcome.now_s))

    # A failed step

    def discard(self, plan: StepPlan, message: str, now_s: float) -> list[StepEvent]:
        """Executing the plan failed: nothing of it happened, and every block it meant to write is of unknown content.

        Whoever computed in it goes back to recompute, and is tried again in halves, then alone; one that fails alone
        ends with `message` as its error. Raises InvariantError if nobody computed: there is nobody to single out.
        """
        touched = targets_of(plan)
        if not touched:
            raise InvariantError(f"step {plan.step_id} computed nothing, yet failed: {message}")
        state = self._state
        events = self._undo(plan, now_s)
        if len(touched) == 1:
            (culprit,) = touched
            events.append(self._transitions.finish(state.requests[culprit], FinishReason.ERROR, message, now_s))
            state.suspects = state.suspects[1:]
        else:
            state.suspects = halves(touched) + state.suspects[1:]
        self._next_step()
        return events

    def abandon(self, plan: StepPlan, now_s: float) -> list[StepEvent]:
        """Like `discard`, but nobody is suspected: the step was broken off from outside, for example by Ctrl-C."""
        events = self._undo(plan, now_s)
        self._next_step()
        return events

    def _undo(self, plan: StepPlan, now_s: float) -> list[StepEvent]:
        """Drop the KV that the plan meant to write, and with it the residents who computed or whose blocks it took."""
        self._close(plan)
        state = self._state
        touched = set(plan.request_ids())
        self._use_copy_ids(plan)
        dirty = blocks_written(plan, state.cache_config.block_size)
        state.kv.forget_content(dirty)
        events: list[StepEvent] = []
        for request in list(state.residents):
            table = state.kv.tables[request.request_id]
            if request.state is RequestState.RUNNING and (request.request_id in touched or not dirty.isdisjoint(table)):
                events.append(self._transitions.drop_resident(request, now_s))
        events += self._transitions.drop_kept(dirty, now_s)
        for request_id in (*plan.dropped, *(move.request_id for move in plan.moves)):
            if request_id in state.kv.parked:  # its place on the host may be overwritten already
                self._transitions.drop_parked(request_id)
                events.append(ParkedMoved(request_id, now_s, 0, None))
        return events

    def _clear_suspects(self, plan: StepPlan) -> None:
        """Let go of suspects that are past the point of failure, and of a group that could not be served at all."""
        state = self._state
        if not state.suspects:
            return
        targets = state.suspects[0].targets
        for request_id, target in list(targets.items()):
            request = state.requests.get(request_id)
            if request is None or request.num_computed_tokens >= target:
                del targets[request_id]
        if not targets or (plan.is_empty and not state.kv.has_live_copies):
            state.suspects = state.suspects[1:]


# Steady decodes are all alike: one step in so many teaches as much as all of them.
_STEADY_STEPS_A_LESSON = 8


def _teaches(plan: StepPlan) -> bool:
    """Whether the time of a step is worth learning from: prefills and copies always, steady decodes now and then."""
    is_steady = not (plan.chunks or plan.copies_out or plan.swap_ins or plan.moves)
    return not is_steady or plan.step_id % _STEADY_STEPS_A_LESSON == 0
