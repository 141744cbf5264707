"""What became of each request: all unfinished ones and the latest that ended, for `GET /v1/requests/{id}`.

A listener of the engine. A step costs as much as it has events and deferrals, and those of the step before; whoever is
not mentioned stands behind another, which is written down once and not in every step.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from giveway.core.errors import InvalidRequestError
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
from giveway.core.plan import Deferral, StepPlan
from giveway.core.request import NEWCOMER_STATES, Request, RequestState
from giveway.engine.engine import Engine
from giveway.engine.trace import UnservedReason
from giveway.engine.trace.causes import BLOCKING
from giveway.server.classes import PriorityClasses
from giveway.server.preemption_causes import PlannedPreemptions
from giveway.server.request_record import Loss, RequestRecord
from giveway.server.request_story import Answer, Story

MAX_FINISHED = 1000  # API requests
MAX_FINISHED_ANSWERS = 8 * MAX_FINISHED  # of all of them: one API request may have thousands

_SERVED = frozenset({RequestState.RUNNING, RequestState.FINISHED})
_COPYING = frozenset({RequestState.SWAPPING_OUT, RequestState.SWAPPING_IN})


@dataclass(slots=True)
class _Entry:
    """One API request."""

    api_id: str
    alias: str | None
    owner: str
    request_ids: tuple[RequestId, ...]
    records: dict[RequestId, RequestRecord] = field(default_factory=dict)  # of those the engine has seen
    num_ended: int = 0

    @property
    def has_ended(self) -> bool:
        return self.num_ended == len(self.request_ids)


class RequestBook:
    """Hand it to `Engine.add_listener`. `register` and `withdraw` may be called from any thread."""

    def __init__(
        self, engine: Engine, classes: PriorityClasses | None = None, *, max_finished: int = MAX_FINISHED
    ) -> None:
        self._engine = engine
        self._story = Story(classes or PriorityClasses())
        self._max_finished = max_finished
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}  # by API id
        self._aliases: dict[tuple[str, str], _Entry] = {}  # by owner and alias: the newest that bears it
        self._entry_of: dict[RequestId, _Entry] = {}  # of requests registered and not ended
        self._finished: OrderedDict[str, _Entry] = OrderedDict()  # the oldest first
        self._num_finished_answers = 0
        self._told: set[RequestId] = set()  # whom the latest plan deferred or took something from
        self._head: Deferral | None = None  # the first in the queue whom the latest plan could not serve
        self._had_suspects = False  # when the step being told was planned
        self._until_s = 0.0  # when the latest step ended

    # Any thread

    def register(self, api_id: str, request_ids: Sequence[RequestId], owner: str, alias: str | None) -> None:
        """Make an API request known, before its requests are handed in to the engine.

        request_ids: of all its prompts with all their answers, by index. owner: who may look. alias: a further name
        that its owner may ask by; if several bear it, the newest counts. If handing in fails, `withdraw` it.
        Raises InvalidRequestError for an id in use.
        """
        entry = _Entry(api_id, alias, owner, tuple(request_ids))
        with self._lock:
            if api_id in self._entries and api_id not in self._finished:
                raise InvalidRequestError(f"request id {api_id!r} is already in use")
            taken = next((each for each in entry.request_ids if each in self._entry_of), None)
            if taken is not None:
                raise InvalidRequestError(f"request id {taken!r} is already in use")
            self._drop(api_id)
            self._entries[api_id] = entry
            if alias is not None:
                self._aliases[owner, alias] = entry
            self._entry_of.update(dict.fromkeys(entry.request_ids, entry))

    def withdraw(self, api_id: str) -> None:
        """Forget an API request that could not be handed in as a whole."""
        with self._lock:
            self._drop(api_id)

    # The engine's thread

    def describe(self, api_id_or_alias: str, owner: str) -> dict[str, Any] | None:
        """Return all about a request as JSON values. None: unknown, forgotten, or somebody else's.

        Only between two steps, as by `AsyncEngine.ask`, or when the engine has stopped: it looks at the queue.
        """
        with self._lock:
            entry = self._entries.get(api_id_or_alias)
            if entry is None or entry.owner != owner:  # nobody learns that an id exists
                entry = self._aliases.get((owner, api_id_or_alias))
            if entry is None:
                return None
            answers = [Answer(entry.records.get(each), self._unfinished(entry, each)) for each in entry.request_ids]
            state, now_s = self._engine.scheduler.state, self._engine.clock.now()
            return self._story.whole(entry.api_id, entry.alias, answers, state, now_s, self._head)

    def _unfinished(self, entry: _Entry, request_id: RequestId) -> Request | None:
        """Return the progress of an answer. None: it has ended, and another may bear its name."""
        known = self._entry_of.get(request_id) is entry
        return self._engine.scheduler.requests.get(request_id) if known else None

    def __call__(self, plan: StepPlan | None, events: Sequence[StepEvent]) -> None:
        """Take in one step of the engine."""
        with self._lock:
            is_done = plan is not None and self._engine.last_times is not None
            preemptions = PlannedPreemptions(plan if is_done else None)
            moved: set[RequestId] = set()  # whose wait ends, or begins
            losses: dict[RequestId, Preempted] = {}
            for event in events:
                if type(event) is TokenEmitted and event.output_index:
                    continue
                record = self._record_of(event)
                if record is None:
                    continue
                if isinstance(event, Accepted | Admitted):
                    moved.add(event.request_id)
                if isinstance(event, Preempted):
                    losses[event.request_id] = event
                    self._lose(record, event, preemptions)
                else:
                    self._apply(record, event)
            if plan is None:
                self._told |= moved  # for the next plan to tell; it may be long in coming
                for request_id in moved & self._engine.scheduler.state.held:
                    self._unserved(request_id, UnservedReason.HELD, self._told)
            else:
                self._explain(plan, moved, losses, is_done=is_done)
            state = self._engine.scheduler.state
            self._had_suspects, self._until_s = bool(state.suspects), state.now_s

    # Events

    def _record_of(self, event: StepEvent) -> RequestRecord | None:
        """Return the record of a request that was registered, a new one at its first event. None: nobody will ask."""
        if isinstance(event, PromptLogprobs | ParkedMoved):
            return None
        entry = self._entry_of.get(event.request_id)
        if entry is None:
            return None
        record = entry.records.get(event.request_id)
        if record is None:
            spec = self._engine.spec_of(event.request_id)
            if spec is not None:
                record = entry.records[event.request_id] = RequestRecord(spec)
        return record

    def _apply(self, record: RequestRecord, event: StepEvent) -> None:
        if isinstance(event, TokenEmitted):
            record.emit(event)
        elif isinstance(event, TokensComputed):
            record.compute(event)
        elif isinstance(event, Admitted):
            record.admit(event)
        elif isinstance(event, CopyEnded):
            record.copied(event, self._engine.block_bytes)
        elif isinstance(event, Finished):
            record.finish(event)
            self._end(event.request_id)
        elif isinstance(event, Refused):
            record.refuse(event)
            self._end(event.request_id)

    def _lose(self, record: RequestRecord, event: Preempted, preemptions: PlannedPreemptions) -> None:
        spec = None if event.beneficiary is None else self._engine.spec_of(event.beneficiary)
        priority = None if spec is None else spec.priority
        cause, planned = preemptions.cause_of(event), preemptions.of(event)
        if planned is not None:
            planned = replace(planned, parked=())  # a number for each block: too many to remember
        record.lose(Loss(event, cause, planned, priority))

    # Who waits for what

    def _explain(
        self,
        plan: StepPlan,
        moved: set[RequestId],
        losses: dict[RequestId, Preempted],
        *,
        is_done: bool,
    ) -> None:
        """Write down why those whom the plan mentions were not served, and who is not mentioned any more.

        moved: who arrived or took a seat. is_done: the plan was carried out.
        """
        told: set[RequestId] = set()
        requests = self._engine.scheduler.requests
        self._head = next((each for each in plan.deferrals if _heads_the_queue(each, requests)), None)
        for deferral in plan.deferrals:
            self._defer(deferral, told)
        victims = {preemption.victim for preemption in plan.preemptions} if losses else set[RequestId]()
        for request_id, loss in losses.items():
            if request_id in told:
                continue
            reason = UnservedReason.PREEMPTED
            if request_id in self._engine.scheduler.state.held and request_id not in victims:
                reason = UnservedReason.HELD  # it lost what it had kept before the plan was made
            elif not is_done:
                reason = UnservedReason.STEP_FAILED
            elif loss.is_again:
                reason = UnservedReason.GIVES_WAY
            self._unserved(request_id, reason, told)
        self._explain_others(plan, told, is_done=is_done)
        for request_id in (self._told | moved) - told:
            self._not_mentioned(request_id, told)
        self._told = told

    def _explain_others(self, plan: StepPlan, told: set[RequestId], *, is_done: bool) -> None:
        """Tell those whose KV was on its way, or had to move or go; in a failed step all whom the plan was to touch."""
        returning = [swap_in.copy.request_id for swap_in in plan.swap_ins]
        moving = [*plan.dropped, *(move.request_id for move in plan.moves)]
        if not is_done:
            victims = [preemption.victim for preemption in plan.preemptions]
            for request_id in (*plan.request_ids(), *returning, *victims, *moving):
                if request_id not in told:  # what the plan says of a request holds in any case
                    self._unserved(request_id, UnservedReason.STEP_FAILED, told)
            return
        for request_id in returning:
            self._unserved(request_id, UnservedReason.COPY_IN_FLIGHT, told)
        for request_id in moving:
            if request_id not in told:
                self._unserved(request_id, UnservedReason.GIVES_WAY, told)

    def _defer(self, deferral: Deferral, told: set[RequestId]) -> None:
        reason = UnservedReason(deferral.reason.value)
        self._unserved(deferral.request_id, reason, told, deferral.lacking_blocks)

    def _unserved(
        self, request_id: RequestId, reason: UnservedReason, told: set[RequestId], num_lacking_blocks: int = 0
    ) -> None:
        record = self._waiting_record(request_id)
        if record is not None:
            told.add(request_id)
            record.unserved(reason, self._since(record), num_lacking_blocks)

    def _waiting_record(self, request_id: RequestId) -> RequestRecord | None:
        entry = self._entry_of.get(request_id)
        return None if entry is None else entry.records.get(request_id)

    def _since(self, record: RequestRecord) -> float:
        """Return when the step began for a request: when the one before had ended, or the request arrived."""
        return max(self._until_s, record.arrival_s)

    def _not_mentioned(self, request_id: RequestId, told: set[RequestId]) -> None:
        """Served, or its copy is under way, or nobody looked at it."""
        record = self._waiting_record(request_id)
        facts: Request | None = self._engine.scheduler.requests.get(request_id)
        if record is None or facts is None:
            return
        if facts.state in _SERVED:
            record.served(self._since(record))
        elif facts.state in _COPYING:
            self._unserved(request_id, UnservedReason.COPY_IN_FLIGHT, told)
        elif request_id in self._engine.scheduler.state.held:
            self._unserved(request_id, UnservedReason.HELD, told)
        elif self._had_suspects:
            self._unserved(request_id, UnservedReason.FAULT_ISOLATION, told)
        else:
            record.unserved(UnservedReason.BEHIND_DEFERRED, self._since(record))

    # The end

    def _end(self, request_id: RequestId) -> None:
        entry = self._entry_of.pop(request_id)
        entry.num_ended += 1
        if not entry.has_ended:
            return
        self._finished[entry.api_id] = entry
        self._num_finished_answers += len(entry.request_ids)
        while len(self._finished) > self._max_finished or (
            self._num_finished_answers > MAX_FINISHED_ANSWERS and len(self._finished) > 1
        ):
            self._drop(next(iter(self._finished)))

    def _drop(self, api_id: str) -> None:
        entry = self._entries.pop(api_id, None)
        if entry is None:
            return
        if self._finished.pop(api_id, None) is not None:
            self._num_finished_answers -= len(entry.request_ids)
        if entry.alias is not None and self._aliases.get((entry.owner, entry.alias)) is entry:
            del self._aliases[entry.owner, entry.alias]
        for request_id in entry.request_ids:
            if self._entry_of.get(request_id) is entry:
                del self._entry_of[request_id]


def _heads_the_queue(deferral: Deferral, requests: Mapping[RequestId, Request]) -> bool:
    """Whether a deferral, looked at in rank order, is of one in the queue whom those behind must not overtake."""
    request = requests.get(deferral.request_id)
    return request is not None and request.state in NEWCOMER_STATES and deferral.reason in BLOCKING
