"""An engine under random work: arrivals, aborts, holds, orders to give way, and steps that fail; with all it told."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from giveway.build import BuiltEngine, build_engine
from giveway.core.config import PreemptionChoice
from giveway.core.errors import DeviceFaultError
from giveway.core.events import StepEvent
from giveway.core.executor import Executor, RequestFacts
from giveway.core.ids import RequestId
from giveway.core.plan import BlockCopy, StepOutcome, StepPlan
from giveway.core.request import RequestSpec
from giveway.core.sampling import SamplingParams
from giveway.core.scheduler import Scheduler
from giveway.engine.clock import StepClock
from giveway.engine.engine import Engine
from giveway.engine.intake import Intake, Submission
from giveway.engine.outputs import RequestOutput
from giveway.options import EngineOptions
from giveway.runtime.dry.dry_backend import DryBackend
from giveway.runtime.dry.scripted_copies import CopyFate, ScriptedCopies
from giveway.runtime.model_executor import ModelExecutor
from giveway.server.metrics import ServerMetrics

BLOCK_SIZE = 4
BLOCK_BYTES = BLOCK_SIZE * DryBackend().kv_bytes_per_token
PRIORITIES = (0, 3, 10, 19, 20, 30, 77)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def dry(**options: Any) -> BuiltEngine:
    """Build a small engine on the dry device, with a clock that counts."""
    settings = {"device": "dry", "block_size": BLOCK_SIZE, "seed": 1, "check_invariants": True, **options}
    return build_engine(EngineOptions(**settings), StepClock())


def overlapped(seed: int) -> Engine:
    """Build an engine whose copies end some steps after they began, or fail, or are never heard of again."""
    built = dry(num_kv_blocks=24, max_num_seqs=6, swap_space=12 * BLOCK_BYTES)
    config = replace(built.scheduler_config, overlapped_copies=True, copy_timeout_s=0.1)
    rng, clock, model = random.Random(seed), StepClock(), built.model

    def fate(_: BlockCopy) -> CopyFate:
        draw = rng.random()
        return CopyFate(delay_steps=rng.randrange(4), fails=draw < 0.2, is_lost=0.2 <= draw < 0.22)

    return Engine(
        Scheduler(config, built.cache_config),
        ModelExecutor(model.backend, clock.now, ScriptedCopies(model.backend, fate)),
        model.tokenizer,
        Intake(model.tokenizer, config, built.cache_config, eos_token_ids=model.eos_token_ids),
        clock,
        block_bytes=built.engine.block_bytes,
    )


def samples_of(metrics: ServerMetrics) -> Samples:
    """Read the exposition as Prometheus does; the labels that every series of ours has are left out."""
    common = {("model_name", "dry"), ("engine", "0")}
    samples: Samples = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items()) - common
            assert key not in samples, f"told twice: {key}"
            samples[key] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    """Return one sample."""
    return samples[name, frozenset(labels.items())]


def total(samples: Samples, name: str, **labels: str) -> float:
    """Return the sum over all labels that are not given."""
    wanted = set(labels.items())
    found = [number for (known, have), number in samples.items() if known == name and wanted <= have]
    assert found, f"no series {name} {labels}"
    return sum(found)


class FailingNowAndThen:
    """An executor some of whose steps fail before anything is done."""

    def __init__(self, inner: Executor, chance: Callable[[], bool]) -> None:
        self._inner = inner
        self._chance = chance

    def execute(self, plan: StepPlan, requests: Mapping[RequestId, RequestFacts]) -> StepOutcome:
        if plan.request_ids() and self._chance():
            raise DeviceFaultError("the device hiccups")
        return self._inner.execute(plan, requests)

    def close(self) -> None:
        self._inner.close()


@dataclass(slots=True)
class Told:
    """What listeners heard of one step."""

    plan: StepPlan | None
    events: tuple[StepEvent, ...]
    is_done: bool  # a plan was carried out


@dataclass(slots=True)
class Work:
    """Random work on one engine. Written while it runs."""

    engine: Engine
    rng: random.Random
    hand_in: Callable[[Submission], RequestId]
    told: list[Told] = field(default_factory=list)
    specs: dict[RequestId, RequestSpec] = field(default_factory=dict)
    results: dict[RequestId, RequestOutput] = field(default_factory=dict)

    def listen(self, plan: StepPlan | None, events: Sequence[StepEvent]) -> None:
        """Note what a step told."""
        for event in events:
            spec = self.engine.spec_of(event.request_id)
            if spec is not None:
                self.specs[event.request_id] = spec
        self.told.append(Told(plan, tuple(events), plan is not None and self.engine.last_times is not None))

    def prepare(self) -> Submission:
        """Make a request; some begin like others, and some want several answers."""
        rng = self.rng
        begin = [7] * rng.choice((0, 0, 8, 16))
        prompt = begin + [rng.randrange(256) for _ in range(rng.randrange(1, 30))]
        sampling = SamplingParams(temperature=0, max_tokens=rng.randrange(1, 40), n=rng.choice((1, 1, 1, 3)))
        return self.engine.prepare(prompt, sampling, priority=rng.choice(PRIORITIES))

    def step(self) -> None:
        """Make one step."""
        for update in self.engine.step():
            if update.result is not None:
                self.results[update.request_id] = update.result

    def disturb(self, names: Sequence[RequestId]) -> None:
        """Take back, hold, let go or push aside somebody."""
        rng, engine = self.rng, self.engine
        draw, residents = rng.random(), [resident.request_id for resident in engine.scheduler.state.residents]
        if residents and rng.random() < 0.5:
            names = residents
        if draw < 0.05:
            engine.abort(rng.choice(names))
        elif draw < 0.1:
            engine.hold(rng.choice(names))
        elif draw < 0.2:
            engine.let_go(rng.choice(names))
        elif draw < 0.25:
            engine.give_way(rng.choice(names), rng.choice(tuple(PreemptionChoice)))

    def run(self, num_steps: int, after_step: Callable[[], None] = lambda: None) -> None:
        """Make steps with arrivals and disturbances, then steps until nothing is left."""
        names: list[RequestId] = []
        for _ in range(num_steps):
            if self.rng.random() < 0.35:
                names.append(self.hand_in(self.prepare()))
            if names:
                self.disturb(names[-12:])
            if self.engine.has_work:
                self.step()
                after_step()
        for name in names:
            self.engine.let_go(name)
        while self.engine.has_work:
            self.step()
            after_step()


def busy(seed: int, directory: Path, *, fault_rate: float = 0.01, **options: Any) -> Work:
    """Make an engine too small for its work: device, host and disk all run short."""
    built = dry(
        num_kv_blocks=24,
        max_num_seqs=6,
        max_num_batched_tokens=8,
        swap_space=12 * BLOCK_BYTES,
        swap_disk=16 * BLOCK_BYTES,
        swap_dir=str(directory),
        **options,
    )
    rng = random.Random(seed)
    built.engine._executor = FailingNowAndThen(built.engine._executor, lambda: rng.random() < fault_rate)
    work = Work(built.engine, rng, built.engine.hand_in)
    built.engine.add_listener(work.listen)
    return work
