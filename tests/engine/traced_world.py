"""A world that writes a trace, and remembers what the scheduler really knew, to compare the two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from giveway.core.cost_profile import CostProfile
from giveway.core.events import Finished, StepEvent
from giveway.core.ids import RequestId
from giveway.core.plan import StepPlan
from giveway.core.planner import plan_step
from giveway.core.request import Rank, RequestState
from giveway.core.state import SchedulerState
from giveway.engine.trace import Trace, TraceWriter, read_trace
from tests.six_checks import SixChecks
from tests.world import World


@dataclass(frozen=True, slots=True)
class Truth:
    """What was known when a step was planned, and the plan."""

    plan: StepPlan
    states: dict[RequestId, RequestState]
    ranks: dict[RequestId, Rank]
    costs: CostProfile
    held: frozenset[RequestId]
    suspects: frozenset[RequestId]


class NoChecks(SixChecks):
    """Whether the scheduler does well is the business of other tests; here it is whether the trace says what it does.

    These worlds are of kinds that some of the six checks are not made for, such as those with few looks at guests.
    """

    def check_plan(self, plan: StepPlan) -> None:
        pass

    def check_step(self, plan: StepPlan, events: Iterable[StepEvent]) -> None:
        pass


class TracedWorld(World):
    """Like `World`. Requests must come through `submit`: a trace knows nothing of residents who were placed."""

    def __init__(self, path: Path, **settings: Any) -> None:
        super().__init__(**settings)
        state = self.scheduler.state
        self.checks = NoChecks(self.scheduler, self.specs, self.backend.vocab_size)
        self.path = path
        self.truths: dict[int, Truth] = {}
        self.failed: set[int] = set()  # steps that were discarded
        self.writer = TraceWriter(path, state.config, state.cache_config)
        self.scheduler._planner = self.writer.watch(self._plan)
        self._told: list[StepEvent] = []

    def _plan(self, state: SchedulerState) -> StepPlan:
        plan = plan_step(state)
        self.truths[plan.step_id] = Truth(
            plan,
            {name: request.state for name, request in state.requests.items()},
            {name: request.rank for name, request in state.requests.items()},
            state.costs,
            frozenset(state.held),
            frozenset(state.suspects[0].targets) if state.suspects else frozenset(),
        )
        return plan

    def step(self) -> StepPlan:
        num_failures = self.backend.num_failures
        plan = super().step()
        if self.backend.num_failures > num_failures:
            self.failed.add(plan.step_id)
        self.writer(plan, self._told)
        self._told = []
        return plan

    def _record(self, events: Iterable[StepEvent]) -> None:
        told = list(events)
        super()._record(told)
        self._told += told

    def read(self) -> Trace:
        """Read the trace so far."""
        return read_trace(self.path)

    @property
    def num_ended(self) -> int:
        """Requests that have ended."""
        return sum(1 for event in self.events if isinstance(event, Finished))
