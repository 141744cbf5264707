"""Recompute or swap, by the length of what gives way: where one becomes cheaper than the other, and what `auto` does.

A resident is told to give way while another one decodes, and comes back. Swapping costs the seconds of its copies out
and in. Recomputing costs what its chunks add to steps that run anyway: a step with a chunk minus one without. On the
real model both are measured; with a profile of other hardware the same plans are made by the dry run and priced.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from giveway.bench.measure import Report
from giveway.build import Model, load_model
from giveway.core.commands import Abort, Command, GiveWay, Submit
from giveway.core.config import CacheConfig, PreemptionChoice, SchedulerConfig, blocks_for
from giveway.core.cost_profile import SHIPPED, CostProfile, ForwardWork
from giveway.core.ids import RequestId
from giveway.core.plan import PreemptionMode, StepPlan, Tier
from giveway.core.request import RequestSpec
from giveway.core.sampling import SamplingParams
from giveway.core.scheduler import Scheduler
from giveway.options import EngineOptions
from giveway.runtime.copies import SynchronousCopies
from giveway.runtime.disk_tier import DiskTier
from giveway.runtime.model_executor import ModelExecutor

BLOCK_SIZE = 16
DRY_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
REAL_TOKENS = (64, 256, 1024, 4096)
QUICK_TOKENS = (64, 256)
_BUDGET = 2048  # tokens a step, as by default
_CHOICES = (PreemptionChoice.RECOMPUTE, PreemptionChoice.SWAP, PreemptionChoice.AUTO)
_SMALLEST_VOCABULARY = 256  # prompts use ids that the dry run, the tiny and every real model have
_ANSWER_TOKENS = 256  # more than a measurement generates
_COMPANION_TOKENS = 16
_LEAST_ROUNDS = 2

# Qwen2.5-7B in bf16: 7.6e9 parameters, 28 layers, 28 heads and 4 KV heads of 128 (its published configuration).
#   KV of a token: 2 x 28 x 4 x 128 x 2 bytes = 57,344 bytes.
#   Prefill: 2 x 7.6e9 = 15.2 GFLOP a token; a GPU with 312 TFLOP/s of dense bf16 (A100, its data sheet) at 40 % of that
#   does 8,000 tokens/s, so 125 us each.
#   Attention: 4 x 28 layers x 28 heads x 128 = 0.4 MFLOP for each (token, position), at the same speed 3.3 ns.
#   A step: 15.2 GB of weights at 1.5 TB/s take 10 ms; with launches 12 ms.
_KV_BYTES = 57_344
_GPU = {"step_s": 0.012, "token_s": 1 / 8000, "context_s": 3.3e-9}


def _profile(*, host_bytes_s: float, disk_bytes_s: float, copy_s: float) -> CostProfile:
    """Return that model on that GPU behind links of so many bytes a second."""
    host_s, disk_s = _KV_BYTES / host_bytes_s, _KV_BYTES / disk_bytes_s
    return CostProfile(
        **_GPU,
        copy_s=copy_s,
        slot_out_s=host_s,
        slot_in_s=host_s,
        slot_to_disk_s=disk_s,
        slot_from_disk_s=disk_s,
    )


PROFILES: dict[str, CostProfile] = {
    # PCIe 4.0 x16: 31.5 GB/s raw, about 25 with pinned memory. Disk: NVMe on PCIe 4.0 x4, 3 GB/s of sustained writes.
    "7B, PCIe 4": _profile(host_bytes_s=25e9, disk_bytes_s=3e9, copy_s=20e-6),
    # A host reached over a network or another narrow link: 1 GB/s, with a round trip of 1 ms for each copy. Disk: SATA,
    # 6 Gbit/s less its 8b/10b coding and protocol, 0.5 GB/s.
    "7B, 1 GB/s": _profile(host_bytes_s=1e9, disk_bytes_s=0.5e9, copy_s=1e-3),
}


def bench_crossover(
    options: EngineOptions,
    *,
    real_tokens: Sequence[int] = REAL_TOKENS,
    dry_tokens: Sequence[int] = DRY_TOKENS,
    num_rounds: int = 3,
) -> Report:
    """Measure the model of `options` and price the profiles, for both tiers. Needs room for the disk tier's file."""
    dry_options = EngineOptions(device="dry")
    dry, real = load_model(dry_options), load_model(options)
    rows: list[dict[str, Any]] = []
    for tier in Tier:
        rows += _rows(real, options, real.name, tier, None, real_tokens, num_rounds)
    for name, profile in PROFILES.items():
        for tier in Tier:
            rows += _rows(dry, dry_options, name, tier, profile, dry_tokens, 1)  # a second would give the same
    settings = {
        "measured": f"{real.name} on {real.backend.description}",
        "rounds": f"{num_rounds}, of long ones down to {_LEAST_ROUNDS}; medians",
        "priced": "the plans of the dry run by a cost profile: " + ", ".join(PROFILES),
        "recompute_s": f"what the chunks (at most {_BUDGET} tokens) add to steps in which somebody else decodes",
        "swap_s": "copies out and in",
        "auto": f"chose the cheaper way in {_num_right(rows)} of {len(rows)} rows; where priced, it cost at most "
        f"{_excess_pct(rows):.1f} % more than that way",
        "crossings": "; ".join(_crossings(rows)),
    }
    return Report("Recompute or swap", settings, rows)


def _num_right(rows: Sequence[Mapping[str, Any]]) -> int:
    """Count rows in which auto took the way that was found to be cheaper."""
    return sum(row["auto_mode"] == _cheaper(row) for row in rows)


def _cheaper(row: Mapping[str, Any]) -> str:
    return "swap" if row["swap_s"] < row["recompute_s"] else "recompute"


def _excess_pct(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return by how much auto cost more than the cheaper way, in the worst priced row (percent).

    Where seconds are measured, the same copy twice differs by more than that.
    """
    priced = [row for row in rows if row["profile"] in PROFILES]
    excess: list[float] = [row["auto_s"] / min(row["recompute_s"], row["swap_s"]) - 1 for row in priced]
    return 100 * max(excess)


def _crossings(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say for every profile and tier which way is cheaper, from which length on."""
    for key in dict.fromkeys((row["profile"], row["tier"]) for row in rows):
        mine = [row for row in rows if (row["profile"], row["tier"]) == key]
        cheaper = [_cheaper(row) for row in mine]
        found = [cheaper[0]]
        for row, (before, way) in zip(mine[1:], pairwise(cheaper), strict=True):
            if way != before:
                found.append(f"{way} from {row['tokens']}")
        yield f"{', '.join(key)}: {', '.join(found)}"


# Running


@dataclass(frozen=True, slots=True)
class _Step:
    """One step, as planned, and the seconds of its parts: measured, or by a profile."""

    plan: StepPlan
    forward_s: float
    copy_s: float


@dataclass(frozen=True, slots=True)
class _Episode:
    """A resident gave way and came back."""

    mode: PreemptionMode
    alone_s: float  # the forward pass without it
    chunks_s: tuple[float, ...]  # forward passes with a chunk of it
    copies_s: float

    def cost_s(self, alone_s: float) -> float:
        """What it cost: copies, and what chunks added to passes that take `alone_s` without them (s)."""
        return self.copies_s + sum(chunk_s - alone_s for chunk_s in self.chunks_s)


class _Bench:
    """One scheduler and executor, driven by hand: the engine does not tell how long the parts of a step took."""

    def __init__(
        self, model: Model, tier: Tier, *, max_tokens: int, disk: DiskTier | None, profile: CostProfile | None
    ) -> None:
        """Allocate pools. profile: prices the steps; None: they are measured, and the scheduler learns from them."""
        num_blocks = _num_blocks(max_tokens)
        cache = CacheConfig(
            2 * num_blocks,
            num_blocks if tier is Tier.HOST else 0,
            BLOCK_SIZE,
            enable_prefix_caching=False,  # idle blocks would be found again, and recomputing would cost nothing
            num_disk_blocks=num_blocks if tier is Tier.DISK else 0,
        )
        config = SchedulerConfig(
            max_num_batched_tokens=_BUDGET, max_model_len=max_tokens + _ANSWER_TOKENS, refine_costs=profile is None
        )
        model.backend.allocate(
            num_device_blocks=cache.num_device_blocks, num_host_blocks=cache.num_host_blocks, block_size=BLOCK_SIZE
        )
        self._profile = profile
        self._scheduler = Scheduler(config, cache, profile or SHIPPED)
        self._executor = ModelExecutor(model.backend, time.perf_counter, SynchronousCopies(model.backend, disk))

    def submit(self, name: str, num_tokens: int) -> RequestId:
        """Make a request resident, with its prompt computed."""
        rng = random.Random(name)  # noqa: S311  # repeatable on purpose
        request_id = RequestId(name)
        prompt = tuple(rng.randrange(_SMALLEST_VOCABULARY) for _ in range(num_tokens))
        sampling = SamplingParams(temperature=0.0, top_p=1.0)
        self._step(Submit(RequestSpec(request_id, prompt, _ANSWER_TOKENS, sampling=sampling)))
        while not self._scheduler.requests[request_id].is_decoding:
            self._step()
        return request_id

    def end(self, request_id: RequestId) -> None:
        """Take a request out."""
        self._scheduler.accept([Abort(request_id)], time.perf_counter())

    def give_way(self, victim: RequestId, choice: PreemptionChoice) -> _Episode:
        """Let a resident give way, as `Engine.give_way` does, and come back."""
        first = self._step(GiveWay(victim, choice))  # in this step the others run without it
        steps = [first]
        while not self._scheduler.requests[victim].is_decoding or len(steps) < 2:
            steps.append(self._step())
        return _Episode(
            mode=first.plan.preemptions[0].mode,
            alone_s=first.forward_s,
            chunks_s=tuple(step.forward_s for step in steps if any(c.request_id == victim for c in step.plan.chunks)),
            copies_s=sum(step.copy_s for step in steps),
        )

    def _step(self, *commands: Command) -> _Step:
        scheduler = self._scheduler
        scheduler.accept(commands, time.perf_counter())
        plan = scheduler.plan()
        outcome = self._executor.execute(plan, scheduler.requests)
        scheduler.commit(plan, outcome)
        if self._profile is not None:
            return _priced(plan, self._profile)
        return _Step(plan, outcome.forward_s, outcome.copy_out_s + outcome.copy_in_s)


def _priced(plan: StepPlan, profile: CostProfile) -> _Step:
    spans = [(chunk.start, chunk.start + chunk.num_tokens) for chunk in plan.chunks]
    spans += [(position, position + 1) for position in plan.decodes.positions]
    copies = [*plan.copies_out, *(swap_in.copy for swap_in in plan.swap_ins)]
    copy_s = sum(
        profile.copy_one_way_s(copy.direction, copy.tier, len(copy.device_blocks) * BLOCK_SIZE) for copy in copies
    )
    return _Step(plan, profile.forward_s(ForwardWork.of(spans)), copy_s)


def _num_blocks(max_tokens: int) -> int:
    """Blocks that hold the longest context and what it generates."""
    return blocks_for(max_tokens + _ANSWER_TOKENS, BLOCK_SIZE)


def _rows(
    model: Model,
    options: EngineOptions,
    name: str,
    tier: Tier,
    profile: CostProfile | None,
    lengths: Sequence[int],
    num_rounds: int,
) -> Iterator[dict[str, Any]]:
    """Yield a row for every length (tokens)."""
    max_tokens = max(lengths)
    model.backend.allocate(num_device_blocks=1, num_host_blocks=0, block_size=BLOCK_SIZE)  # a block has a size now
    disk = None
    if tier is Tier.DISK:
        directory = Path(options.swap_dir or tempfile.gettempdir())
        disk = DiskTier(directory, num_blocks=_num_blocks(max_tokens), block_bytes=model.backend.block_bytes)
    try:
        bench = _Bench(model, tier, max_tokens=max_tokens, disk=disk, profile=profile)
        for tokens in lengths:
            companion, victim = bench.submit("companion", _COMPANION_TOKENS), bench.submit("victim", tokens)
            rounds = min(num_rounds, max(_LEAST_ROUNDS, num_rounds * _BUDGET // tokens // 2))  # long ones take long
            yield {"profile": name, "tier": tier.value, "tokens": tokens, **_measure(bench, victim, rounds)}
            bench.end(victim)
            bench.end(companion)
    finally:
        if disk is not None:
            disk.close()


def _measure(bench: _Bench, victim: RequestId, num_rounds: int) -> dict[str, Any]:
    """Let a resident give way in every manner, in turn."""
    episodes: dict[PreemptionChoice, list[_Episode]] = {choice: [] for choice in _CHOICES}
    for _ in range(num_rounds):
        for choice in _CHOICES:
            episodes[choice].append(bench.give_way(victim, choice))
    alone_s = median(episode.alone_s for group in episodes.values() for episode in group)
    costs = {choice: median(episode.cost_s(alone_s) for episode in group) for choice, group in episodes.items()}
    return {
        "recompute_s": costs[PreemptionChoice.RECOMPUTE],
        "swap_s": costs[PreemptionChoice.SWAP],
        "auto_s": costs[PreemptionChoice.AUTO],
        "auto_mode": "+".join(sorted({episode.mode.value for episode in episodes[PreemptionChoice.AUTO]})),
    }
