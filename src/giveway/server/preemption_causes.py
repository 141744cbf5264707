"""Why somebody gave way, in one word: for metrics, and for whoever asks what became of a request."""

from __future__ import annotations

from enum import Enum

from giveway.core.events import Preempted
from giveway.core.ids import RequestId
from giveway.core.plan import DeferralReason, Preemption, StepPlan


class PreemptionCause(Enum):
    """For what a request gave way."""

    MORE_URGENT = "more_urgent"  # for requests of more urgent classes alone
    OWN_CLASS = "own_class"  # among those who profit is one of its own class: growth, or the owner of a guest's seat
    COMMAND = "command"  # it was told to
    HELD = "held"  # its reader has not taken what it made so far
    FAILED_STEP = "failed_step"  # a step failed, and with it the KV that it meant to write


class PlannedPreemptions:
    """The preemptions of one step, by victim.

    plan: None if it was not carried out: then whoever gave way did so because it failed.
    """

    def __init__(self, plan: StepPlan | None) -> None:
        self._plan = plan
        self._planned = {} if plan is None else {preemption.victim: preemption for preemption in plan.preemptions}

    def of(self, event: Preempted) -> Preemption | None:
        """Return what was planned for a victim. None: its KV was lost with a step that failed."""
        preemption = self._planned.get(event.request_id)
        if preemption is None or preemption.beneficiary != event.beneficiary:
            return None  # of a step that was broken off, told with the next one
        return preemption

    def cause_of(self, event: Preempted) -> PreemptionCause:
        """Say why a victim gave way."""
        preemption = self.of(event)
        if preemption is None:
            return PreemptionCause.FAILED_STEP
        if preemption.beneficiary is None:
            return PreemptionCause.HELD if self._is_held(event.request_id) else PreemptionCause.COMMAND
        return PreemptionCause.OWN_CLASS if preemption.is_for_its_class else PreemptionCause.MORE_URGENT

    def _is_held(self, victim: RequestId) -> bool:
        deferrals = () if self._plan is None else self._plan.deferrals
        return any(each.request_id == victim and each.reason is DeferralReason.HELD for each in deferrals)
