"""Stands in for a model: every step takes no time and gives every request the same token."""

from __future__ import annotations

from collections.abc import Mapping

from giveway.core.executor import RequestFacts
from giveway.core.ids import RequestId
from giveway.core.plan import StepOutcome, StepPlan
from giveway.core.request import StopDecision

TOKEN = 7
STEP_S = 0.02  # what the scheduler is told that a step took


class InstantExecutor:
    """An `Executor` whose requests may end before their limit, as if their model had chosen to stop."""

    def __init__(self, output_lengths: Mapping[RequestId, int] | None = None) -> None:
        self._output_lengths = output_lengths or {}  # tokens; who is not named goes on to its limit
        self._now_s = 0.0

    def execute(self, plan: StepPlan, requests: Mapping[RequestId, RequestFacts]) -> StepOutcome:
        """Say that everything planned has happened."""
        self._now_s += STEP_S
        sampled = dict.fromkeys(plan.decodes.request_ids, TOKEN)
        sampled |= {chunk.request_id: TOKEN for chunk in plan.chunks if chunk.samples}
        stops = {}
        if self._output_lengths:
            for request_id in sampled:
                length = self._output_lengths.get(request_id)
                if length is not None and len(requests[request_id].output_token_ids) + 1 >= length:
                    stops[request_id] = StopDecision()
        copies = [*plan.copies_out, *(swap_in.copy for swap_in in plan.swap_ins)]
        return StepOutcome(
            plan.step_id,
            self._now_s,
            forward_s=STEP_S,
            sampled=sampled,
            stops=stops,
            finished_copies=tuple(copy.copy_id for copy in copies),
        )

    def close(self) -> None:
        """Nothing to release."""
