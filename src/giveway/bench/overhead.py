"""What priorities cost while nothing is lacking: the same work with them, and in plain arrival order, in turn.

"On" is the scheduler as it is, with requests of several classes. "Off" is the same scheduler without ranking, victims
and cost model (`plain_planner.py`). Seats, blocks and tokens suffice for everybody, so both do the same work in the
same number of steps, and give the same tokens; both is checked.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import Any

from giveway.bench.instant_executor import InstantExecutor
from giveway.bench.measure import Report
from giveway.bench.plain_planner import plan_in_arrival_order
from giveway.build import load_model
from giveway.core.commands import Submit
from giveway.core.config import CacheConfig, SchedulerConfig, SchedulingPolicy, blocks_for
from giveway.core.errors import InvariantError
from giveway.core.events import StepEvent, TokenEmitted
from giveway.core.executor import Executor
from giveway.core.ids import RequestId, TokenId
from giveway.core.plan import StepPlan
from giveway.core.planner import plan_step
from giveway.core.request import RequestSpec
from giveway.core.sampling import SamplingParams
from giveway.core.scheduler import Scheduler
from giveway.options import EngineOptions
from giveway.runtime.backend import Backend
from giveway.runtime.dry.dry_backend import DryBackend
from giveway.runtime.model_executor import ModelExecutor

CLASSES = (20, 0, 10, 20, 5)  # of the requests in turn: every arrival has others above and below it
BLOCK_SIZE = 16
MIN_ROUNDS = 7  # for a statement about the spread


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive one every so many steps."""

    num_requests: int
    steps_between: int  # arrivals
    prompt_tokens: int  # of each
    output_tokens: int  # of each

    @property
    def cache_config(self) -> CacheConfig:
        """A pool in which all of them fit at once."""
        return CacheConfig(
            self.num_requests * (blocks_for(self.prompt_tokens + self.output_tokens, BLOCK_SIZE) + 1),
            block_size=BLOCK_SIZE,
        )

    def describe(self) -> str:
        """Return it in words."""
        return (
            f"{self.num_requests} requests of {self.prompt_tokens} prompt and {self.output_tokens} output tokens, "
            f"one every {self.steps_between} step(s)"
        )


MODEL_LOAD = Load(num_requests=10, steps_between=2, prompt_tokens=32, output_tokens=24)
SCHEDULER_LOAD = Load(num_requests=64, steps_between=1, prompt_tokens=32, output_tokens=64)


def bench_overhead(
    options: EngineOptions,
    *,
    num_rounds: int = 11,
    model_load: Load = MODEL_LOAD,
    scheduler_load: Load = SCHEDULER_LOAD,
) -> Report:
    """Measure with the model that the options name, with the dry run, and with no model at all.

    The latter two are shorter and take more rounds: 3 and 10 times as many. Raises InvariantError when on and off do
    not do the same.
    """
    rows = []
    about = {}
    if options.device != "dry":
        model = load_model(options)
        about = {"model": model.backend.description}
        rows.append(_row(model.name, Lab.on_backend(model.backend, model_load), num_rounds))
        model.backend.close()
    rows.append(_row("dry run", Lab.on_backend(DryBackend(), scheduler_load), 3 * num_rounds))
    rows.append(_row("no model", Lab(InstantExecutor(), scheduler_load), 10 * num_rounds))
    settings = about | {
        "load of the model": model_load.describe(),
        "load of the others": scheduler_load.describe(),
        "classes": ", ".join(str(number) for number in CLASSES),
        "rounds": f"{num_rounds}, dry run {3 * num_rounds}, no model {10 * num_rounds}",
        "tok_s": "output tokens per second of the whole run",
        "difference_pct": "median of (off - on) / off, round by round; above 0: priorities cost",
        "spread_pct": "interquartile range of the same",
        "off_us, on_us": "accept + plan + commit, a step",
        "scheduling_pct": "on_us - off_us in percent of a step of off: what the throughput should lose",
    }
    return Report("What priorities cost without pressure", settings, rows)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a load."""

    tokens: dict[RequestId, list[TokenId]]  # what each request was answered
    run_s: float
    scheduling_s: list[float]  # accept + plan + commit, step by step
    execution_s: list[float]  # step by step

    @property
    def tok_s(self) -> float:
        """Output tokens per second."""
        return sum(len(tokens) for tokens in self.tokens.values()) / self.run_s


class Lab:
    """Runs one load on one executor, with and without priorities. The pools are shared: one run at a time."""

    def __init__(
        self,
        executor: Executor,
        load: Load,
        *,
        vocab_size: int = 256,  # prompts are made of these tokens
        is_exact: bool = True,  # answers do not depend on the order of the batch
        refine_costs: bool = False,  # with priorities, costs are learned from steps
    ) -> None:
        self.is_exact = is_exact
        self._executor = executor
        self._load = load
        self._refine_costs = refine_costs
        self._specs = _specs(load, vocab_size)

    @classmethod
    def on_backend(cls, backend: Backend, load: Load) -> Lab:
        """Allocate the backend's pools and make a lab of it. Costs are learned where the engine learns them."""
        cache = load.cache_config
        backend.allocate(num_device_blocks=cache.num_device_blocks, num_host_blocks=0, block_size=cache.block_size)
        return cls(
            ModelExecutor(backend, time.perf_counter),
            load,
            vocab_size=backend.vocab_size,
            is_exact=backend.is_exact,
            refine_costs=backend.device != "dry",
        )

    def run(self, *, priorities: bool) -> Run:
        """Run everything once, on a scheduler of its own."""
        scheduler = self.make_scheduler(priorities=priorities)
        plans: list[StepPlan] = []
        events: list[StepEvent] = []
        arrivals = {number * self._load.steps_between: [Submit(spec)] for number, spec in enumerate(self._specs)}
        step, scheduling_s, execution_s, started_s = 0, [], [], time.perf_counter()
        while scheduler.has_work or step <= max(arrivals):
            begun_s = time.perf_counter()
            scheduler.accept(arrivals.get(step, []), begun_s)
            plan = scheduler.plan()
            planned_s = time.perf_counter()
            outcome = self._executor.execute(plan, scheduler.requests)
            executed_s = time.perf_counter()
            events += scheduler.commit(plan, outcome)
            scheduling_s.append(time.perf_counter() - executed_s + planned_s - begun_s)
            execution_s.append(executed_s - planned_s)
            plans.append(plan)
            step += 1
        run_s = time.perf_counter() - started_s
        if any(plan.preemptions or plan.deferrals for plan in plans):
            raise InvariantError("somebody had to wait or to give way, although room was made for everybody")
        return Run(_tokens(events), run_s, scheduling_s, execution_s)

    def make_scheduler(self, *, priorities: bool) -> Scheduler:
        """Return an idle scheduler, the engine's own or the plain one."""
        config = SchedulerConfig(
            max_num_seqs=self._load.num_requests,
            max_num_batched_tokens=self._load.num_requests + 2 * self._load.prompt_tokens,
            policy=SchedulingPolicy.PRIORITY if priorities else SchedulingPolicy.NONE,
            target_step_s=1e6,  # how long a prefill's chunks are is a matter of pace, and not of what deciding costs
            refine_costs=priorities and self._refine_costs,
        )
        planner = plan_step if priorities else plan_in_arrival_order
        return Scheduler(config, self._load.cache_config, planner=planner)


def _specs(load: Load, vocab_size: int) -> list[RequestSpec]:
    rng = random.Random(3)  # noqa: S311  # repeatable on purpose
    sampling = SamplingParams(temperature=0.0, top_p=1.0, ignore_eos=True)
    return [
        RequestSpec(
            RequestId(f"r{number}"),
            tuple(rng.randrange(vocab_size) for _ in range(load.prompt_tokens)),
            load.output_tokens,
            priority=CLASSES[number % len(CLASSES)],
            sampling=sampling,
        )
        for number in range(load.num_requests)
    ]


def _tokens(events: list[StepEvent]) -> dict[RequestId, list[TokenId]]:
    tokens: dict[RequestId, list[TokenId]] = {}
    for event in events:
        if isinstance(event, TokenEmitted):
            tokens.setdefault(event.request_id, []).append(event.token_id)
    return tokens


def _row(name: str, lab: Lab, num_rounds: int) -> dict[str, Any]:
    _check_equal_work(name, lab)  # the warm-up, too
    off: list[Run] = []
    on: list[Run] = []
    for number in range(num_rounds):
        for priorities in (True, False) if number % 2 else (False, True):
            (on if priorities else off).append(lab.run(priorities=priorities))
    differences = [
        100 * (without.tok_s - with_it.tok_s) / without.tok_s for without, with_it in zip(off, on, strict=True)
    ]
    difference, spread = median(differences), _interquartile_range(differences)
    off_us, on_us = (_typical_us([run.scheduling_s for run in runs]) for runs in (off, on))
    return {
        "backend": name,
        "off_tok_s": median(run.tok_s for run in off),
        "on_tok_s": median(run.tok_s for run in on),
        "difference_pct": difference,
        "spread_pct": spread,
        "within_spread": is_within_spread(difference, spread, num_rounds),
        "off_us": off_us,
        "on_us": on_us,
        "scheduling_pct": 100 * (on_us - off_us) / (off_us + _typical_us([run.execution_s for run in off])),
    }


def _check_equal_work(name: str, lab: Lab) -> None:
    off, on = lab.run(priorities=False), lab.run(priorities=True)
    if len(off.scheduling_s) != len(on.scheduling_s):
        raise InvariantError(f"{name}: {len(on.scheduling_s)} steps with priorities, {len(off.scheduling_s)} without")
    if lab.is_exact and off.tokens != on.tokens:
        raise InvariantError(f"{name}: an answer changed with priorities")


def is_within_spread(difference: float, spread: float, num_rounds: int) -> str:
    """Return yes or no; two or three rounds that happen to agree say nothing about the spread."""
    if num_rounds < MIN_ROUNDS:
        return f"unknown below {MIN_ROUNDS} rounds"
    return "yes" if abs(difference) <= spread else "no"


def _typical_us(runs: list[list[float]]) -> float:
    """Microseconds of a step: the mean over the steps of a run of the median over the runs (s).

    Step n is the same work in every run, so the median leaves out the runs in which something else had the core.
    """
    return 1e6 * fmean(median(times) for times in zip(*runs, strict=True))


def _interquartile_range(values: list[float]) -> float:
    """Distance between the first and the third quartile; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    first, _, third = quantiles(values, n=4, method="inclusive")
    return third - first
