"""The loop: commands in, accept, plan, execute, review, commit, updates out. One step at a time, in one thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from giveway.core.commands import Abort, Command, GiveWay, Hold, LetGo, Submit
from giveway.core.config import PreemptionChoice
from giveway.core.errors import GiveWayError, InvalidRequestError, InvariantError, KVCacheFullError
from giveway.core.events import StepEvent
from giveway.core.executor import Executor
from giveway.core.ids import RequestId
from giveway.core.plan import StepOutcome, StepPlan
from giveway.core.request import RequestSpec, StopDecision
from giveway.core.sampling import SamplingParams
from giveway.core.scheduler import Scheduler
from giveway.core.tokenizing import Tokenizing
from giveway.engine.clock import Clock
from giveway.engine.intake import Intake, Prompt, Submission, branch_id
from giveway.engine.outputs import RequestUpdate
from giveway.engine.tracker import RequestTracker, SubmissionTracker

logger = logging.getLogger("giveway")

Listener = Callable[[StepPlan | None, Sequence[StepEvent]], None]
"""Called after every step with its plan (None: no step was made) and events. It must not write back."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the time of one step went (s)."""

    schedule_s: float  # accept, plan, commit
    forward_s: float  # forward pass and sampling
    copy_s: float  # swap copies that were waited for
    other_s: float  # detokenizing, building the batch


class Engine:
    """Serves requests on one model. `submit` and `abort` may be called from any thread, `step` from one only."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizing,
        intake: Intake,
        clock: Clock,
        *,
        block_bytes: int,
        listeners: Sequence[Listener] = (),
        at_close: Callable[[], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.clock = clock
        self.block_bytes = block_bytes
        self._executor = executor
        self._intake = intake
        self._listeners = list(listeners)
        self._at_close = at_close
        self._inbox: deque[Command] = deque()
        self._tracked: dict[RequestId, RequestTracker] = {}
        # Every name of a prompt's branches stays taken until the last of them has ended.
        self._taken: dict[RequestId, Submission] = {}
        # Re-entrant: an abort may come from a finalizer or a signal handler in the middle of a submission.
        self._at_the_door = threading.RLock()
        self._untold: list[StepEvent] = []  # of a step that was broken off: told with the next one
        self._numbers = count()
        self._in_step = threading.Lock()
        self._is_closed = False
        self.last_times: StepTimes | None = None  # of the latest step that was executed, for listeners
        self._has_warned_of_disk = False

    # Any thread

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        priority: int | None = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> RequestId:
        """Hand in a request; it is looked at in the next step. Raises InvalidRequestError, and then nothing is kept.

        With `sampling.n` above 1 it branches: each answer is a request of its own, waits and gives way for itself, and
        its updates carry its own name and `index`. Choice 0 bears the name that is returned, choice 2 of `a` is `a/2`.

        prompt: text, or token ids. priority: 0 is the most urgent; None: the default class. cache_salt: KV of the
        prompt is shared only with requests of the same salt (for a tenant: a secret of its own); None: with those that
        name none.
        """
        return self.hand_in(
            self.prepare(prompt, sampling, priority=priority, request_id=request_id, cache_salt=cache_salt)
        )

    def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        priority: int | None = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> Submission:
        """Resolve and check a request with all its branches, without handing it in. Arguments as of `submit`."""
        if self._is_closed:
            raise GiveWayError("the engine is closed")
        if request_id is not None and not isinstance(request_id, str):
            raise InvalidRequestError(f"request_id must be a string, not {request_id!r}")
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise InvalidRequestError(f"sampling must be SamplingParams, not {type(sampling).__name__}")
        name = RequestId(request_id if request_id is not None else f"request-{next(self._numbers)}")
        sampling = sampling or SamplingParams()
        self._check_free([branch_id(name, index) for index in range(sampling.n)])  # before any work
        submission = self._intake.resolve(
            name, prompt, sampling, priority=priority, cache_salt=cache_salt, arrival_s=self.clock.now()
        )
        for spec in submission.branches:
            self.scheduler.check_request(spec)
        return submission

    def _check_free(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            if request_id in self._taken:
                whole = f" (for an answer of {request_ids[0]!r})" if request_id != request_ids[0] else ""
                raise InvalidRequestError(f"request id {request_id!r}{whole} is already in use")

    def hand_in(self, submission: Submission) -> RequestId:
        """Hand in what `prepare` has checked: all its branches, or none if a name was taken meanwhile."""
        names, whole = submission.request_ids, SubmissionTracker(submission)
        trackers = [RequestTracker(whole, index, self.tokenizer, self.block_bytes) for index in range(len(names))]
        with self._at_the_door:
            self._check_free(names)
            self._taken.update(dict.fromkeys(names, submission))
            self._tracked.update(zip(names, trackers, strict=True))
            self._inbox.extend([Submit(spec) for spec in submission.branches])  # at once: no step sees a part
        return submission.request_id

    def abort(self, request_id: RequestId) -> None:
        """Take a request back with all its branches, or a single branch (`a/2`), which leaves its siblings alone.

        Unknown or finished ids are ignored: it may have ended just now.
        """
        with self._at_the_door:
            submission = self._taken.get(request_id)
            if submission is None:
                return
            ids = submission.request_ids if request_id == submission.request_id else (request_id,)
            self._inbox.extend([Abort(each) for each in ids if each in self._tracked])

    def give_way(self, request_id: RequestId, choice: PreemptionChoice = PreemptionChoice.SWAP) -> None:
        """Tell a running request to give way in the next step; whoever is not running is left alone.

        choice: what becomes of its KV; "swap", "recompute" or "auto" is as good. It comes back as soon as there is
        room, so told so in every step it never gets anywhere. Raises InvalidRequestError for another choice.
        """
        try:
            wanted = PreemptionChoice(choice)
        except ValueError as error:
            known = ", ".join(each.value for each in PreemptionChoice)
            raise InvalidRequestError(f"choice is {choice!r}; it must be one of {known}") from error
        self._inbox.append(GiveWay(request_id, wanted))

    def hold(self, request_id: RequestId) -> None:
        """Keep a request, with all its branches, off the device until `let_go`: it gives way and loses nothing.

        Unknown or finished ids are ignored.
        """
        self._send_to_branches(Hold, request_id)

    def let_go(self, request_id: RequestId) -> None:
        """End a hold; harmless for a request that is not held."""
        self._send_to_branches(LetGo, request_id)

    def _send_to_branches(self, command: type[Hold] | type[LetGo], request_id: RequestId) -> None:
        with self._at_the_door:
            submission = self._taken.get(request_id)
            if submission is not None:
                self._inbox.extend([command(each) for each in submission.request_ids if each in self._tracked])

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._inbox) or self.scheduler.has_work

    @property
    def num_unfinished(self) -> int:
        """Requests handed in and not ended; each branch counts."""
        return len(self._tracked)

    # One thread

    def spec_of(self, request_id: RequestId) -> RequestSpec | None:
        """Return what was asked, for listeners: known up to the step that tells the end. None: unknown."""
        tracker = self._tracked.get(request_id)
        return None if tracker is None else tracker.spec

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` after every step from now on."""
        self._listeners.append(listener)

    def step(self) -> list[RequestUpdate]:
        """Make one step; return what is new, at most one update a request, and a branch is one.

        Raises KVCacheFullError under the policy `none`, after which nothing is left of the batch; InvariantError for
        a bug of ours. Every other fault ends the one request that it belongs to. Raises GiveWayError when the engine is
        closed, or when another thread is in a step: there is one loop.
        """
        if self._is_closed:
            raise GiveWayError("the engine is closed")
        if not self._in_step.acquire(blocking=False):
            raise GiveWayError("the engine is in a step already: call step() from one thread, submit() from any")
        try:
            return self._step()
        finally:
            self._in_step.release()

    def _step(self) -> list[RequestUpdate]:
        started_s = self.clock.now()
        self.last_times = None
        self._untold += self.scheduler.accept(self._drain(), started_s)
        plan: StepPlan | None = None
        if self.scheduler.has_work:
            try:
                plan = self.scheduler.plan()
            except KVCacheFullError:
                self._lose_batch()
                raise
            self._execute(plan, started_s)
        return self._report(plan)

    def _drain(self) -> list[Command]:
        commands = []
        while self._inbox:
            commands.append(self._inbox.popleft())
        return commands

    def _execute(self, plan: StepPlan, started_s: float) -> None:
        planned_s = self.clock.now()
        try:
            outcome = self._executor.execute(plan, self.scheduler.requests)
        except BaseException as error:
            # A fault of the step is told by the request that causes it. Not so Ctrl-C, a bug in the bookkeeping, or a
            # device that fails without anybody computing: there the caller must hear of it, and the state stays whole.
            is_fault = isinstance(error, Exception) and not isinstance(error, InvariantError)
            if not is_fault or not plan.request_ids():
                self._untold += self.scheduler.abandon(plan, self.clock.now())
                raise
            logger.warning("step %d failed and is repeated in parts: %r", plan.step_id, error)
            self._untold += self.scheduler.discard(plan, str(error) or type(error).__name__, self.clock.now())
            return
        try:
            stops = self._review(outcome)
        except BaseException:
            self._untold += self.scheduler.abandon(plan, self.clock.now())
            raise
        reviewed_s = self.clock.now()
        self._untold += self.scheduler.commit(plan, replace(outcome, stops=stops))
        ended_s = self.clock.now()
        copy_s = outcome.copy_out_s + outcome.copy_in_s
        self.last_times = StepTimes(
            schedule_s=(planned_s - started_s) + (ended_s - reviewed_s),
            forward_s=outcome.forward_s,
            copy_s=copy_s,
            other_s=max(reviewed_s - planned_s - outcome.forward_s - copy_s, 0.0),
        )
        self._warn_of_disk()

    def _review(self, outcome: StepOutcome) -> dict[RequestId, StopDecision]:
        """Detokenize what was sampled, so that a stop string ends its request in this very step."""
        stops: dict[RequestId, StopDecision] = {}
        for request_id, token_id in outcome.sampled.items():
            if request_id not in outcome.faults:
                stop = self._tracked[request_id].review(token_id)
                if stop is not None:
                    stops[request_id] = stop
        return stops

    def _lose_batch(self) -> None:
        aborts = [Abort(request_id) for request_id in self.scheduler.requests]
        self._untold += self.scheduler.accept(aborts, self.clock.now())
        self._report(None)

    def _warn_of_disk(self) -> None:
        """Say once that swapping to disk has stopped, and why it is no error."""
        state = self.scheduler.state
        if not self._has_warned_of_disk and state.num_disk_failures >= state.config.max_disk_failures:
            self._has_warned_of_disk = True
            logger.warning(
                "%d writes to the swap file failed in a row: it is left alone from now on, and KV that finds no room "
                "on the host is computed again",
                state.num_disk_failures,
            )

    def _report(self, plan: StepPlan | None) -> list[RequestUpdate]:
        events, self._untold = self._untold, []
        changed: dict[RequestId, RequestTracker] = {}
        for event in events:
            tracker = self._tracked.get(event.request_id)
            if tracker is not None:
                tracker.apply(event)
                changed[event.request_id] = tracker
        for listener in self._listeners:
            listener(plan, events)
        updates = []
        for request_id, tracker in changed.items():
            update = tracker.take_update()
            if update.result is not None:
                del self._tracked[request_id]
            if update.whole is not None:
                self._release(tracker.whole.submission)
            if update.token_ids or update.text or update.result is not None:
                updates.append(update)
        return updates

    def _release(self, submission: Submission) -> None:
        with self._at_the_door:
            for request_id in submission.request_ids:
                del self._taken[request_id]

    def close(self) -> None:
        """Release the model. Unfinished requests are lost; abort them first if anybody waits. Twice is harmless."""
        if not self._is_closed:
            self._is_closed = True
            try:
                if self._at_close is not None:
                    self._at_close()
            finally:
                self._executor.close()
