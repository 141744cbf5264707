"""The one writer of scheduling state: `accept`, `commit` and `discard` change it, `plan` reads it.

accept(commands) -> events        between steps: submissions, aborts, orders to give way
plan() -> StepPlan                decide; nothing changes
commit(plan, outcome) -> events   what was planned has happened
discard(plan, message) -> events  executing the plan failed: exactly one of commit and discard follows every plan
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from giveway.core.commands import Abort, Command, Submit
from giveway.core.config import CacheConfig, SchedulerConfig
from giveway.core.cost_profile import SHIPPED, CostProfile, ForwardWork
from giveway.core.errors import InvalidRequestError, InvariantError
from giveway.core.events import (
    Accepted,
    Admitted,
    CopyEnded,
    Finished,
    Preempted,
    PromptLogprobs,
    Refused,
    StepEvent,
    TokenEmitted,
    TokensComputed,
)
from giveway.core.ids import BlockTable, CopyId, RequestId
from giveway.core.invariants import check_invariants
from giveway.core.isolation import blocks_written, halves, targets_of
from giveway.core.kv_cache import BlockCopy, CopyDirection
from giveway.core.limits import check_limits
from giveway.core.plan import PreemptionMode, ScheduledChunk, StepOutcome, StepPlan
from giveway.core.planner import plan_step
from giveway.core.policy import rank_of
from giveway.core.request import FinishReason, Request, RequestSpec, RequestState
from giveway.core.state import SchedulerState


class Scheduler:
    """Owns all scheduling state."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        costs: CostProfile = SHIPPED,
        planner: Callable[[SchedulerState], StepPlan] = plan_step,
    ) -> None:
        self._state = SchedulerState(config, cache_config, costs)
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
        return bool(self._state.requests) or self._state.kv.has_live_copies

    def check_request(self, spec: RequestSpec) -> None:
        """Raise InvalidRequestError if the request can never be served. Reads configuration only."""
        check_limits(spec, self._state.config, self._state.cache_config)

    # Accept

    def accept(self, commands: Sequence[Command], now_s: float) -> list[StepEvent]:
        """Take in commands, and give up on copies that were not heard of for too long. Only between steps."""
        if self._plan_is_open:
            raise InvariantError("accept was called between plan and commit")
        events: list[StepEvent] = []
        for command in commands:
            if isinstance(command, Submit):
                events.append(self._submit(command.spec, now_s))
            elif isinstance(command, Abort):
                request = self._state.requests.get(command.request_id)
                if request is not None:
                    events.append(self._finish(request, FinishReason.ABORT, None, now_s))
            elif command.request_id in self._state.requests:
                self._state.forced[command.request_id] = command.choice
        events += self._lose_overdue_copies(now_s)
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
        state.kv.learn(spec.request_id, request.num_known_tokens, request.known_token_ids)
        return Accepted(spec.request_id, now_s)

    def _lose_overdue_copies(self, now_s: float) -> list[StepEvent]:
        """Declare overdue copies lost. Their blocks stay pinned: a late copy may still write them."""
        state = self._state
        events: list[StepEvent] = []
        for copy_id, started_s in list(state.copy_started_s.items()):
            if now_s - started_s > state.config.copy_timeout_s:
                del state.copy_started_s[copy_id]
                state.kv.lost.add(copy_id)
                copy = state.kv.copies[copy_id]
                request = self._stop_awaiting(copy)
                if request is not None:
                    events.append(self._lose_kv(request, copy, now_s))
        return events

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
        state, now_s = self._state, outcome.now_s
        events: list[StepEvent] = []
        self._apply_preemptions(plan, now_s, events)
        self._end_copies(plan.copies_out, outcome, events)
        self._apply_admissions(plan, now_s, events)
        self._end_copies([swap_in.copy for swap_in in plan.swap_ins], outcome, events)
        for growth in plan.growths:
            state.kv.grow(growth.request_id, growth.table)
        for chunk in plan.chunks:
            self._advance_chunk(chunk, outcome, events)
        for request_id in plan.decodes.request_ids:
            self._advance(state.requests[request_id], 1, True, outcome, events)
        events += [
            self._finish(state.requests[lost.request_id], FinishReason.ERROR, lost.message, now_s)
            for lost in plan.given_up
        ]
        self._clear_suspects(plan)
        if state.config.refine_costs:
            self._refine_costs(plan, outcome)
        self._next_step()
        return events

    def _refine_costs(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Learn from what the step took."""
        costs, block_size = self._state.costs, self._state.cache_config.block_size
        spans = [(chunk.start, chunk.start + chunk.num_tokens) for chunk in plan.chunks]
        spans += [(position, position + 1) for position in plan.decodes.positions]
        if spans:
            costs = costs.refined(ForwardWork.of(spans), outcome.forward_s)
        if plan.copies_out or plan.swap_ins:
            costs = costs.with_copies(
                num_out=block_size * sum(len(copy.device_blocks) for copy in plan.copies_out),
                out_s=outcome.copy_out_s,
                num_in=block_size * sum(len(swap_in.copy.device_blocks) for swap_in in plan.swap_ins),
                in_s=outcome.copy_in_s,
            )
        self._state.costs = costs

    def _next_step(self) -> None:
        state = self._state
        state.forced.clear()
        state.next_step_id += 1
        state.version += 1
        if state.config.check_invariants:
            check_invariants(state)

    def _apply_preemptions(self, plan: StepPlan, now_s: float, events: list[StepEvent]) -> None:
        state = self._state
        copies = {copy.request_id: copy for copy in plan.copies_out}
        for preemption in plan.preemptions:
            request = state.requests[preemption.victim]
            if preemption.mode is PreemptionMode.SWAP:
                self._begin_copy(copies[preemption.victim], now_s)
                state.residents.remove(request)
                request.begin_swap_out()
                state.swapping_out[preemption.victim] = request
            elif preemption.mode is PreemptionMode.UN_ADMIT:
                self._drop(request, request.un_admit)
            else:
                self._drop(request, request.preempt)
            events.append(
                Preempted(preemption.victim, now_s, preemption.beneficiary, preemption.mode, preemption.num_blocks)
            )

    def _drop(self, request: Request, event: Callable[[], None]) -> None:
        """Take a resident's blocks away; it becomes a newcomer by `event`."""
        self._state.kv.release(request.request_id)
        self._state.residents.remove(request)
        event()
        self._state.newcomers.add(request)

    def _begin_copy(self, copy: BlockCopy, now_s: float, table: BlockTable = ()) -> None:
        state = self._state
        state.kv.begin_copy(copy, table=table)
        state.copy_started_s[copy.copy_id] = now_s
        state.awaited_copies[copy.request_id] = copy.copy_id
        state.next_copy_id = max(state.next_copy_id, copy.copy_id + 1)

    def _apply_admissions(self, plan: StepPlan, now_s: float, events: list[StepEvent]) -> None:
        state = self._state
        for admission in plan.admissions:
            request = state.requests[admission.request_id]
            num_hits = len(admission.hits) * state.cache_config.block_size
            state.kv.admit(admission.request_id, hits=admission.hits, new=admission.new)
            is_resume = request.num_admissions > 0
            state.newcomers.remove(request)
            request.admit(num_hit_tokens=num_hits, is_guest=admission.is_guest)
            state.residents.add(request)
            events.append(Admitted(admission.request_id, now_s, num_hits, admission.is_guest, is_resume))
        for swap_in in plan.swap_ins:
            request = state.requests[swap_in.copy.request_id]
            self._begin_copy(swap_in.copy, now_s, swap_in.table)
            state.newcomers.remove(request)
            request.begin_swap_in(is_guest=swap_in.is_guest)
            state.residents.add(request)
            events.append(Admitted(request.request_id, now_s, 0, swap_in.is_guest, True))

    # Copies

    def _end_copies(self, planned: Sequence[BlockCopy], outcome: StepOutcome, events: list[StepEvent]) -> None:
        """End every copy that the outcome tells of; without overlap, a planned one that it does not tell of is lost.

        Called once after the copies out have begun, so that their blocks are free for admissions, and once after the
        copies in have begun; ids that are not under way are left for the other call, or belong to nobody any more.
        """
        for copy_id in outcome.finished_copies:
            events += self._end_copy(copy_id, outcome.now_s, failed=False)
        for copy_id in outcome.failed_copies:
            events += self._end_copy(copy_id, outcome.now_s, failed=True)
        if not self._state.config.overlapped_copies:
            for copy in planned:
                events += self._end_copy(copy.copy_id, outcome.now_s, failed=True)

    def _end_copy(self, copy_id: CopyId, now_s: float, *, failed: bool) -> list[StepEvent]:
        state = self._state
        copy = state.kv.copies.get(copy_id)
        if copy is None:
            return []
        state.copy_started_s.pop(copy_id, None)
        request = self._stop_awaiting(copy)
        if request is not None and failed:
            events: list[StepEvent] = [self._lose_kv(request, copy, now_s)]
            state.kv.end_copy(copy_id, keep=False)
            return events
        state.kv.end_copy(copy_id, keep=request is not None)
        if request is None:
            return []
        if copy.direction is CopyDirection.OUT:
            del state.swapping_out[request.request_id]
            request.finish_swap_out()
            state.newcomers.add(request)
        else:
            request.finish_swap_in()
            self._publish(request)
        return [CopyEnded(request.request_id, now_s, copy.direction, len(copy.device_blocks), failed=False)]

    def _stop_awaiting(self, copy: BlockCopy) -> Request | None:
        """Return the request that waits for this copy, and now no longer does; None: it gave up waiting, or has ended.

        By copy and not by name alone: another request may bear the name of one that was aborted during its copy.
        """
        state = self._state
        if state.awaited_copies.get(copy.request_id) != copy.copy_id:
            return None
        del state.awaited_copies[copy.request_id]
        return state.requests[copy.request_id]

    def _lose_kv(self, request: Request, copy: BlockCopy, now_s: float) -> CopyEnded:
        """The copy failed or is lost: the request behind it has no KV any more and will recompute."""
        state = self._state
        if request.state is RequestState.SWAPPING_OUT:
            del state.swapping_out[request.request_id]
        else:
            state.residents.remove(request)
            state.kv.release(request.request_id)
        request.lose_copy()
        state.newcomers.add(request)
        return CopyEnded(request.request_id, now_s, copy.direction, len(copy.device_blocks), failed=True)

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
            events.append(self._finish(request, FinishReason.ERROR, fault, now_s))
            return
        again = request.compute(num_tokens)
        if num_tokens > 1 or again or not request.output_token_ids:
            events.append(TokensComputed(request_id, now_s, num_tokens, again))
        if token_id is not None:
            request.append(token_id)
            index = len(request.output_token_ids) - 1
            events.append(TokenEmitted(request_id, now_s, token_id, index, outcome.logprobs.get(request_id)))
        if (request.num_computed_tokens % self._state.cache_config.block_size) < num_tokens:  # a block was filled
            self._publish(request)
        if token_id is not None:
            self._finish_if_done(request, token_id, outcome, events)

    def _publish(self, request: Request) -> None:
        kv = self._state.kv
        if kv.index is not None:
            kv.learn(request.request_id, request.num_known_tokens, request.known_token_ids)
            kv.publish(request.request_id, request.num_computed_tokens)

    def _finish_if_done(self, request: Request, token_id: int, outcome: StepOutcome, events: list[StepEvent]) -> None:
        spec, num_output = request.spec, len(request.output_token_ids)
        stop = outcome.stops.get(request.request_id) if outcome.stops else None
        if stop is not None:
            events.append(self._finish(request, stop.reason, stop.detail, outcome.now_s))
        elif token_id in spec.stop_token_ids and num_output >= spec.sampling.min_tokens:
            events.append(self._finish(request, FinishReason.STOP, None, outcome.now_s))
        elif num_output >= spec.max_new_tokens:
            events.append(self._finish(request, FinishReason.LENGTH, None, outcome.now_s))

    def _finish(self, request: Request, reason: FinishReason, detail: str | None, now_s: float) -> Finished:
        """End a request in whatever state; copies under way keep their blocks until they end."""
        state, request_id = self._state, request.request_id
        if request.state is RequestState.SWAPPING_OUT:
            del state.swapping_out[request_id]
        elif request.state in (RequestState.RUNNING, RequestState.SWAPPING_IN):
            state.residents.remove(request)
        else:
            state.newcomers.remove(request)
        state.kv.forget(request_id)
        state.awaited_copies.pop(request_id, None)
        del state.requests[request_id]
        request.finish(reason)
        return Finished(
            request_id,
            now_s,
            reason,
            detail,
            len(request.output_token_ids),
            request.num_preemptions,
            request.num_recomputed_tokens,
        )

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
            events.append(self._finish(state.requests[culprit], FinishReason.ERROR, message, now_s))
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
        state.next_copy_id += len(plan.copies_out) + len(plan.swap_ins)  # a late word of them must find nobody
        dirty = blocks_written(plan, state.cache_config.block_size)
        state.kv.forget_content(dirty)
        events: list[StepEvent] = []
        for request in list(state.residents):
            table = state.kv.tables[request.request_id]
            if request.state is RequestState.RUNNING and (request.request_id in touched or not dirty.isdisjoint(table)):
                self._drop(request, request.preempt)
                events.append(Preempted(request.request_id, now_s, None, PreemptionMode.RECOMPUTE, len(table)))
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
