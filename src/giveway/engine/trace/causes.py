"""Why a request was not served in one step: exactly one reason for each, from what a trace says of that step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from giveway.core.ids import RequestId
from giveway.core.plan import DeferralReason, Preemption, PreemptionMode
from giveway.core.request import Rank, RequestState
from giveway.engine.trace.content import TracedStep
from giveway.engine.trace.situation import Situation, Standing


class UnservedReason(Enum):
    """Why a request was not served in a step: the reasons of a deferral, and what a plan says in other ways."""

    NO_DEVICE_BLOCKS = DeferralReason.NO_DEVICE_BLOCKS.value
    NO_TOKENS = DeferralReason.NO_TOKENS.value
    NO_SEAT = DeferralReason.NO_SEAT.value
    COPY_IN_FLIGHT = DeferralReason.COPY_IN_FLIGHT.value
    NO_ROOM_TO_STAY = DeferralReason.NO_ROOM_TO_STAY.value
    PROMPT_IN_PROGRESS = DeferralReason.PROMPT_IN_PROGRESS.value
    GIVES_WAY = DeferralReason.GIVES_WAY.value
    FORCED_OUT = DeferralReason.FORCED_OUT.value
    HELD = DeferralReason.HELD.value
    FAULT_ISOLATION = DeferralReason.FAULT_ISOLATION.value
    BEHIND_DEFERRED = DeferralReason.BEHIND_DEFERRED.value
    PREEMPTED = "preempted"  # it was a resident and gave way for somebody in this very step
    STEP_FAILED = "step_failed"  # it was to be served, but the step failed
    GIVEN_UP = "given_up"  # nothing can ever free what it lacks; it ends


@dataclass(frozen=True, slots=True)
class Cause:
    """The reason, and who else is part of it."""

    reason: UnservedReason
    beneficiary: RequestId | None = None  # for whom it gives way, or behind whom it stands
    victims: tuple[RequestId, ...] = ()  # the copy of whose KV it waits for: it gets their room
    holders: tuple[RequestId, ...] = ()  # who has what it lacks
    num_lacking_blocks: int = 0
    preemption: Preemption | None = None  # in this very step


# What ends the search for a seat: whoever is further down may stand behind a deferral for one of these.
BLOCKING = frozenset({DeferralReason.NO_DEVICE_BLOCKS, DeferralReason.NO_TOKENS, DeferralReason.NO_SEAT})


class Causes:
    """The causes of one step. situation: between `begin` and `end` of it."""

    def __init__(self, situation: Situation, step: TracedStep) -> None:
        self._situation = situation
        self._step = step
        self._chunked = tuple(chunk.request_id for chunk in step.chunks)
        self._served = frozenset(self._chunked + step.decodes)
        self._deferrals = {deferral.request_id: deferral for deferral in step.deferrals}
        self._preemptions = {preemption.victim: preemption for preemption in step.preemptions}
        self._admitted = frozenset(admission.request_id for admission in step.admissions)
        self._swapped_in = frozenset(swap_in.request_id for swap_in in step.swap_ins)
        self._holders: tuple[RequestId, ...] | None = None
        self._blockers: list[tuple[Rank, RequestId, DeferralReason]] | None = None

    def of(self, name: RequestId) -> Cause | None:
        """Return why an unfinished request was not served; None: it was, or no step was made."""
        step = self._step
        if step.step_id is None:
            return None
        if name in self._served:
            return Cause(UnservedReason.STEP_FAILED) if step.has_failed else None
        if name in step.given_up:
            return Cause(UnservedReason.GIVEN_UP)
        deferral = self._deferrals.get(name)
        if deferral is not None:
            return self._deferred(name, deferral.reason, deferral.lacking_blocks)
        if name in self._preemptions or name in step.dropped or name in step.moving:
            return Cause(UnservedReason.STEP_FAILED) if step.has_failed else self._gives_way(name)
        if name in self._swapped_in:
            return Cause(UnservedReason.STEP_FAILED if step.has_failed else UnservedReason.COPY_IN_FLIGHT)
        return self._not_mentioned(name)

    def _not_mentioned(self, name: RequestId) -> Cause:
        """The plan does not speak of it: its copy is under way, or nobody looked at it."""
        standing = self._situation.standings[name]
        if not standing.is_newcomer and standing.state is not RequestState.RUNNING:
            return Cause(UnservedReason.COPY_IN_FLIGHT)
        if name in self._step.held:
            return Cause(UnservedReason.HELD)
        if self._step.suspects:
            return Cause(UnservedReason.FAULT_ISOLATION, holders=self._step.suspects)
        return Cause(UnservedReason.BEHIND_DEFERRED, beneficiary=self._better_deferred(standing))

    def _deferred(self, name: RequestId, reason: DeferralReason, num_lacking_blocks: int) -> Cause:
        unserved = UnservedReason(reason.value)
        if reason is DeferralReason.COPY_IN_FLIGHT:
            return Cause(unserved, victims=self._leaving_for(name))
        if reason in (DeferralReason.GIVES_WAY, DeferralReason.FORCED_OUT):
            return self._gives_way(name, unserved)
        if reason is DeferralReason.HELD:
            return Cause(unserved, preemption=self._preemptions.get(name))
        if reason is DeferralReason.PROMPT_IN_PROGRESS:
            return Cause(unserved, beneficiary=self._branch_at_work(name))
        if reason is DeferralReason.FAULT_ISOLATION:
            return Cause(unserved, holders=self._step.suspects)
        if reason is DeferralReason.NO_TOKENS:
            return Cause(unserved, holders=self._chunked or self._step.decodes)
        return Cause(unserved, holders=self._residents(but=name), num_lacking_blocks=num_lacking_blocks)

    def _gives_way(self, name: RequestId, reason: UnservedReason | None = None) -> Cause:
        preemption = self._preemptions.get(name)
        if preemption is None:  # its place on the host goes to somebody who gives way in this step
            for other in self._step.preemptions:
                if other.mode is PreemptionMode.SWAP and other.giving.num_moved_blocks:
                    return Cause(UnservedReason.GIVES_WAY, beneficiary=other.victim)
            return Cause(UnservedReason.GIVES_WAY)
        usual = UnservedReason.PREEMPTED if preemption.is_resident else UnservedReason.GIVES_WAY
        return Cause(reason or usual, beneficiary=preemption.beneficiary, preemption=preemption)

    # Who else

    def _leaving_for(self, name: RequestId) -> tuple[RequestId, ...]:
        """Return those whose blocks a request is to get when their copies have ended; empty: its own is under way."""
        standings = self._situation.standings
        if standings[name].state is RequestState.SWAPPING_IN:
            return ()
        now = [preemption.victim for preemption in self._step.preemptions if preemption.beneficiary == name]
        leaving = {other: each for other, each in standings.items() if each.state is RequestState.SWAPPING_OUT}
        before = [
            other
            for other, each in leaving.items()
            if each.preemption is not None and each.preemption.beneficiary == name
        ]
        return tuple(dict.fromkeys(now + before)) or tuple(leaving)

    def _branch_at_work(self, name: RequestId) -> RequestId | None:
        """Return the branch of the same prompt that computes it."""
        standings = self._situation.standings
        root = standings[name].request.branch_of
        for other in (*self._chunked, *self._admitted, *standings):
            standing = standings[other]
            is_seated = other in self._admitted or standing.state is RequestState.RUNNING
            if other != name and root is not None and standing.request.branch_of == root and is_seated:
                return other
        return None

    def _residents(self, *, but: RequestId) -> tuple[RequestId, ...]:
        """Return who holds seats and blocks when the plan is carried out, best rank first."""
        if self._holders is None:
            now_s, situation = self._step.start_s, self._situation
            holding = [
                (situation.rank_of(standing, now_s), name)
                for name, standing in situation.standings.items()
                if self._holds(name, standing)
            ]
            self._holders = tuple(name for _, name in sorted(holding))
        return tuple(name for name in self._holders if name != but)

    def _holds(self, name: RequestId, standing: Standing) -> bool:
        preemption = self._preemptions.get(name)
        if preemption is not None:
            return preemption.num_kept > 0
        is_seated = name in self._admitted or name in self._swapped_in
        return is_seated or not standing.is_newcomer or standing.num_kept_blocks > 0

    def _better_deferred(self, standing: Standing) -> RequestId | None:
        """Return the newcomer because of which nobody further down was looked at.

        That is the one without a seat, or else the first that could not be placed.
        """
        if self._blockers is None:
            self._blockers = [
                (self._situation.rank_of(other, self._step.start_s), deferral.request_id, deferral.reason)
                for deferral in self._step.deferrals
                if deferral.reason in BLOCKING
                and deferral.request_id not in self._admitted
                and (other := self._situation.standings[deferral.request_id]).is_newcomer
            ]
        rank = self._situation.rank_of(standing, self._step.start_s)
        better = [blocker for blocker in self._blockers if blocker[0] < rank]
        seatless = [blocker for blocker in better if blocker[2] is DeferralReason.NO_SEAT]
        first = next(iter(seatless or better), None)
        return None if first is None else first[1]
