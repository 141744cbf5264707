"""Work done again under a storm: far more requests at once than the KV pool holds, under several ways of giving way.

The public worst case of recomputation: 300 requests of 128 + 96 tokens, 14 blocks of 16 each, 4,200 in all, 64 seats.
The dry run takes it in full. The real model takes a smaller copy with the same 14 blocks each and the same shares of
seats and pool, and so does the dry run once more: both must count the same, to the token, or the benchmark fails.

The *tax* is recomputed tokens / all computed tokens.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from giveway.bench.measure import Report
from giveway.build import BuiltEngine, Model, build_on, load_model, read_cost_profile
from giveway.core.config import blocks_for
from giveway.core.cost_profile import SHIPPED, CostProfile, ForwardWork
from giveway.core.errors import InvariantError
from giveway.core.events import StepEvent
from giveway.core.plan import StepPlan
from giveway.core.sampling import SamplingParams
from giveway.engine.clock import MonotonicClock, StepClock
from giveway.options import EngineOptions

_SMALLEST_VOCABULARY = 256  # prompts use ids that the dry run, the tiny and every real model have


@dataclass(frozen=True, slots=True)
class Storm:
    """Requests that all arrive at once."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    block_size: int  # tokens
    num_seats: int

    @property
    def blocks_each(self) -> int:
        """Blocks that a request holds at its end; the last token is never stored."""
        return blocks_for(self.prompt_tokens + self.output_tokens - 1, self.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks with which nobody would ever have to wait or give way."""
        return self.num_requests * self.blocks_each

    def pool_blocks(self, share: float) -> int:
        """Blocks of a pool that holds a share of all of it, and at least one request."""
        return max(round(self.num_blocks * share), self.blocks_each)

    def describe(self) -> str:
        """Return one line for people."""
        return (
            f"{self.num_requests} requests of {self.prompt_tokens} + {self.output_tokens} tokens, {self.blocks_each} "
            f"blocks of {self.block_size} each, {self.num_blocks} in all, {self.num_seats} seats"
        )


FULL = Storm(300, 128, 96, block_size=16, num_seats=64)
QUARTER = Storm(75, 128, 96, block_size=16, num_seats=16)
# Every number of FULL divided, but for the 14 blocks each: a tenth of the requests and seats, a quarter of the tokens.
SCALED = Storm(30, 32, 24, block_size=4, num_seats=6)
SCALED_QUICK = Storm(10, 8, 7, block_size=1, num_seats=4)

POOL_SHARES = (1.0, 2800 / 4200, 1600 / 4200, 800 / 4200, 400 / 4200)
QUICK_SHARES = (800 / 4200,)  # with less, the few requests of the quick storm would come one by one

# A published baseline drops a whole victim, finds nothing of it again and never swaps. `-tails` is the same order of
# victims in an engine that is otherwise as it comes: a victim gives up what is lacking, and idle blocks may be found
# again. `recompute` is what --preemption-mode recompute gives.
_PLAIN = {"preemption_mode": "recompute", "partial_preemption": False, "enable_prefix_caching": False}
POLICIES: dict[str, dict[str, Any]] = {
    "newest-recompute": {**_PLAIN, "preemption_victim": "newest"},
    "least-work-recompute": {**_PLAIN, "preemption_victim": "least-work"},
    "newest-recompute-tails": {"preemption_mode": "recompute", "preemption_victim": "newest"},
    "least-work-recompute-tails": {"preemption_mode": "recompute", "preemption_victim": "least-work"},
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap"},
    "auto": {"preemption_mode": "auto"},
}
QUICK_POLICIES = ("least-work-recompute", "swap", "auto")
ANY_POLICY = "any"  # nobody gave way, so the run is that of every policy


@dataclass(frozen=True, slots=True)
class Counts:
    """What a run did, in numbers that do not depend on the executor."""

    num_steps: int
    num_preemptions: int
    computed_tokens: int
    recomputed_tokens: int
    copied_blocks: int  # out and in

    @property
    def tax(self) -> float:
        """Share of the computed tokens that had been computed before."""
        return self.recomputed_tokens / self.computed_tokens


@dataclass(frozen=True, slots=True)
class _Run:
    counts: Counts
    swapped_bytes: int
    modelled_s: float  # by the cost profile
    wall_s: float


def bench_tax(
    options: EngineOptions,
    *,
    storm: Storm = FULL,
    scaled: Storm = SCALED,
    shares: Sequence[float] = POOL_SHARES,
    policies: Sequence[str] = tuple(POLICIES),
) -> Report:
    """Run the storm dry, and its smaller copy on the model of `options` and dry.

    Raises InvariantError if the model and the dry run do not count the same.
    """
    named = options.cost_profile or "shipped"
    with tempfile.TemporaryDirectory() as directory:
        options, profile = _with_pinned_profile(options, Path(directory))
        dry_options = replace(options, model=None, device="dry")
        # PyTorch: the native kernels do not take the few tokens of a small storm's blocks.
        dry, real = load_model(dry_options), load_model(replace(options, backend="torch", block_size=scaled.block_size))
        rows = [
            _row("dry", share, name, run, run.modelled_s)
            for share, name, run in _runs(dry, dry_options, storm, shares, policies, profile)
        ]
        for share, name, run in _runs(real, options, scaled, shares, policies, profile):
            twin = _run(dry, dry_options, scaled, share, name, profile)
            if twin.counts != run.counts:
                raise InvariantError(f"{name} at {share:.0%}: the model counts {run.counts}, the dry run {twin.counts}")
            rows.append(_row("real", share, name, run, run.wall_s))
    settings = {
        "dry": storm.describe(),
        "real": f"{real.name} on {real.backend.description}; scaled down to {scaled.describe()}",
        "host_pool": "holds everything",
        "cost_profile": named,
        "makespan_s": "dry: by the cost profile, forward passes and copies of every step; real: measured",
        "any": "nobody gave way, so the run is that of every policy",
        "counts": "of the real run equal those of its dry twin",
    }
    return Report("Work done again under a storm", settings, rows)


def _with_pinned_profile(options: EngineOptions, directory: Path) -> tuple[EngineOptions, CostProfile]:
    """Return options whose profile no run changes: counts are compared."""
    if options.cost_profile is not None:
        return options, read_cost_profile(Path(options.cost_profile))
    path = directory / "profile.json"
    path.write_text(json.dumps(SHIPPED.as_dict()))
    return replace(options, cost_profile=str(path)), SHIPPED


def _runs(
    model: Model,
    options: EngineOptions,
    storm: Storm,
    shares: Sequence[float],
    policies: Sequence[str],
    profile: CostProfile,
) -> Iterator[tuple[float, str, _Run]]:
    """Yield the share of the pool, the policy and the run; one for all policies where nobody gives way."""
    for share in shares:
        for name in policies:
            run = _run(model, options, storm, share, name, profile)
            if not run.counts.num_preemptions:
                yield share, ANY_POLICY, run
                break
            yield share, name, run


def _run(model: Model, options: EngineOptions, storm: Storm, share: float, policy: str, profile: CostProfile) -> _Run:
    """Serve the whole storm in a pool that holds a share of it."""
    built = _build(model, options, storm, share, POLICIES["auto" if policy == ANY_POLICY else policy])
    engine, meter = built.engine, _Meter(profile, storm.block_size)
    engine.add_listener(meter.listen)
    sampling = SamplingParams(temperature=0, max_tokens=storm.output_tokens, ignore_eos=True)
    for number in range(storm.num_requests):
        rng = random.Random(number)  # noqa: S311  # repeatable on purpose
        engine.submit([rng.randrange(_SMALLEST_VOCABULARY) for _ in range(storm.prompt_tokens)], sampling)
    started_s, recomputed = time.perf_counter(), 0
    while engine.has_work:
        for update in engine.step():
            if update.result is not None:
                recomputed += update.result.stats.num_recomputed_tokens
    wall_s = time.perf_counter() - started_s
    return _Run(
        Counts(meter.num_steps, meter.num_preemptions, meter.num_tokens, recomputed, meter.copied_blocks),
        meter.copied_blocks * engine.block_bytes,
        meter.modelled_s,
        wall_s,
    )


def _build(model: Model, options: EngineOptions, storm: Storm, share: float, policy: dict[str, Any]) -> BuiltEngine:
    block_bytes = storm.block_size * model.backend.kv_bytes_per_token
    options = replace(
        options,
        block_size=storm.block_size,
        num_kv_blocks=storm.pool_blocks(share),
        swap_space=storm.num_blocks * block_bytes,
        max_num_seqs=storm.num_seats,
        max_model_len=storm.prompt_tokens + storm.output_tokens,
        **policy,
    )
    return build_on(model, options, StepClock() if options.device == "dry" else MonotonicClock())


class _Meter:
    """Adds up plans."""

    def __init__(self, profile: CostProfile, block_size: int) -> None:
        self._profile = profile
        self._block_size = block_size
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_tokens = 0
        self.copied_blocks = 0
        self.modelled_s = 0.0

    def listen(self, plan: StepPlan | None, events: Sequence[StepEvent]) -> None:  # noqa: ARG002  # as listeners are
        """Add one step."""
        if plan is None:
            return
        self.num_steps += 1
        self.num_preemptions += len(plan.preemptions)
        self.num_tokens += plan.num_tokens
        spans = [(chunk.start, chunk.start + chunk.num_tokens) for chunk in plan.chunks]
        spans += [(position, position + 1) for position in plan.decodes.positions]
        if spans:
            self.modelled_s += self._profile.forward_s(ForwardWork.of(spans))
        for copy in (*plan.copies_out, *(swap_in.copy for swap_in in plan.swap_ins)):
            num_blocks = len(copy.device_blocks)
            self.copied_blocks += num_blocks
            self.modelled_s += self._profile.copy_one_way_s(copy.direction, copy.tier, num_blocks * self._block_size)


def _row(executor: str, share: float, policy: str, run: _Run, makespan_s: float) -> dict[str, Any]:
    return {
        "executor": executor,
        "pool_pct": 100 * share,
        "policy": policy,
        "recomputed_tokens": run.counts.recomputed_tokens,
        "computed_tokens": run.counts.computed_tokens,
        "tax": run.counts.tax,
        "swapped_bytes": run.swapped_bytes,
        "makespan_s": makespan_s,
        "preemptions": run.counts.num_preemptions,
        "steps": run.counts.num_steps,
    }
