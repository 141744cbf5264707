"""Runs one workload under one policy, counts what happened, and compares the answers with an undisturbed run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from giveway.build import BuiltEngine, Model, build_on
from giveway.core.errors import KVCacheFullError
from giveway.core.events import CopyEnded, Preempted, StepEvent, TokensComputed
from giveway.core.ids import RequestId
from giveway.core.plan import PreemptionMode, StepPlan
from giveway.core.request import FinishReason
from giveway.core.scheduler import Scheduler
from giveway.demo.workload import DemoRequest, Workload
from giveway.engine.engine import Engine
from giveway.engine.outputs import RequestOutput, RequestUpdate
from giveway.options import EngineOptions

Watcher = Callable[[Scheduler, StepPlan | None, Sequence[StepEvent]], None]
"""Called after every step; must not write back."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way to run a workload."""

    policy: str  # as it stands in the table's first column and in the JSON
    title: str
    scheduling_policy: str  # EngineOptions.scheduling_policy
    preemption_mode: str  # EngineOptions.preemption_mode
    must_finish: bool = True


SCENARIOS = (
    Scenario("none", "no preemption", "none", "recompute", must_finish=False),
    Scenario("fcfs", "first come first served", "fcfs", "recompute"),
    Scenario("priority-recompute", "priority, recompute", "priority", "recompute"),
    Scenario("priority-swap", "priority, swap", "priority", "swap"),
)
UNDISTURBED = Scenario("undisturbed", "ample pool", "priority", "recompute")


@dataclass(slots=True)
class Tally:
    """Counts over one run, taken from events."""

    preemptions: Counter[PreemptionMode] = field(default_factory=Counter)
    num_recomputed_tokens: int = 0
    swapped_bytes: int = 0  # out and back

    def add(self, events: Sequence[StepEvent], block_bytes: int) -> None:
        """Count the events of one step."""
        for event in events:
            if isinstance(event, Preempted):
                self.preemptions[event.mode] += 1
            elif isinstance(event, TokensComputed):
                self.num_recomputed_tokens += event.num_recomputed
            elif isinstance(event, CopyEnded) and not event.failed:
                self.swapped_bytes += event.num_blocks * block_bytes


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run gave."""

    scenario: Scenario
    workload: Workload
    answers: Mapping[str, RequestOutput]  # of the requests that finished, by name
    tally: Tally
    background_s: float | None  # start to the last background token (s); None: the background did not finish
    error: str | None = None  # what ended the whole run

    @property
    def urgent_ttft_s(self) -> list[float]:
        """Time to first token of each urgent request that got one (s)."""
        urgent = (request.name for request in self.workload.requests if request.is_urgent)
        times = (self.answers[name].stats.ttft_s for name in urgent if name in self.answers)
        return [time_s for time_s in times if time_s is not None]

    @property
    def background_tok_s(self) -> float | None:
        """Output tokens of the background by its time (tokens/s); None: it did not finish."""
        if not self.background_s:
            return None
        names = [request.name for request in self.workload.requests if not request.is_urgent]
        return sum(len(self.answers[name].token_ids) for name in names) / self.background_s


def run_scenario(
    model: Model, options: EngineOptions, workload: Workload, scenario: Scenario, watch: Watcher | None = None
) -> RunResult:
    """Run a workload in the pool that is too small for it."""
    block_bytes = workload.block_size * model.backend.kv_bytes_per_token
    swap_space = workload.num_blocks_wanted * block_bytes if scenario.preemption_mode == "swap" else 0
    built = _build(model, options, workload, scenario, workload.num_blocks, workload.num_seats, swap_space)
    return run_workload(built, workload, scenario, watch)


def run_undisturbed(
    model: Model, options: EngineOptions, workload: Workload, watch: Watcher | None = None
) -> RunResult:
    """Run the same requests, arriving in the same way, with room for everybody."""
    seats = len(workload.requests)
    built = _build(model, options, workload, UNDISTURBED, workload.num_blocks_wanted, seats, 0)
    return run_workload(built, workload, UNDISTURBED, watch)


def _build(
    model: Model,
    options: EngineOptions,
    workload: Workload,
    scenario: Scenario,
    num_blocks: int,
    num_seats: int,
    swap_space: int,
) -> BuiltEngine:
    return build_on(
        model,
        replace(
            options,
            scheduling_policy=scenario.scheduling_policy,
            preemption_mode=scenario.preemption_mode,
            num_kv_blocks=num_blocks,
            kv_cache_memory_bytes=None,
            swap_space=swap_space,
            block_size=workload.block_size,
            max_num_seqs=num_seats,
            max_model_len=workload.max_slots_of_one,
        ),
    )


def run_workload(built: BuiltEngine, workload: Workload, scenario: Scenario, watch: Watcher | None = None) -> RunResult:
    """Hand in every request when the background has got so far, and step until all have ended or the batch is lost."""
    engine, tally = built.engine, Tally()

    def listen(plan: StepPlan | None, events: Sequence[StepEvent]) -> None:
        tally.add(events, engine.block_bytes)
        if watch is not None:
            watch(engine.scheduler, plan, events)

    engine.add_listener(listen)
    run = _Run(engine, workload)
    error = None
    try:
        while run.step():
            pass
    except KVCacheFullError as full:
        error = str(full)
    return RunResult(scenario, workload, run.answers, tally, run.background_s, error)


class _Run:
    """One workload under way."""

    def __init__(self, engine: Engine, workload: Workload) -> None:
        self._engine = engine
        self._pending = deque(sorted(workload.requests, key=lambda request: request.after_tokens))
        self._background: set[RequestId] = {RequestId(r.name) for r in workload.requests if not r.is_urgent}
        self._num_background_tokens = 0
        self._started_s = engine.clock.now()
        self.answers: dict[str, RequestOutput] = {}
        self.background_s: float | None = None

    def step(self) -> bool:
        """Hand in what is due and make one step; False: nothing is left to do."""
        while self._pending and self._is_due(self._pending[0]):
            request = self._pending.popleft()
            self._engine.submit(request.token_ids, request.sampling, priority=request.priority, request_id=request.name)
        if not self._engine.has_work:
            return False
        for update in self._engine.step():
            self._take(update)
        return True

    def _is_due(self, request: DemoRequest) -> bool:
        return request.after_tokens <= self._num_background_tokens or not self._engine.has_work

    def _take(self, update: RequestUpdate) -> None:
        if update.request_id in self._background:
            self._num_background_tokens += len(update.token_ids)
        result = update.result
        if result is None or result.finish_reason is FinishReason.ERROR:
            return
        self.answers[update.request_id] = result
        if self._background <= self.answers.keys():
            self.background_s = self.background_s or self._engine.clock.now() - self._started_s


def count_equal(result: RunResult, reference: RunResult) -> int:
    """Return how many answers are those of the undisturbed run: the same tokens, ended in the same way."""
    return sum(
        other is not None and answer.token_ids == other.token_ids and answer.finish_reason is other.finish_reason
        for answer, other in ((answer, reference.answers.get(name)) for name, answer in result.answers.items())
    )
