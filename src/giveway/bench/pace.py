"""What the step-time target does for an urgent request that arrives while a long background prompt is being prefilled.

A request that arrives during a step waits until it ends. By default a chunk of background work may lengthen a step by
at most the time of one decode step, also while nobody urgent is there; without the target, the chunk is as long as the
token budget allows. Both kinds of engine take turns, one background prompt each. Urgent requests arrive at random
moments, one after the other, as long as that prompt is not computed; what they wait is counted from that very moment,
in the middle of a step as it is.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from giveway.bench.measure import Report, sample
from giveway.build import BuiltEngine, build_engine
from giveway.core.events import StepEvent
from giveway.core.ids import RequestId
from giveway.core.plan import StepPlan
from giveway.core.sampling import SamplingParams
from giveway.options import EngineOptions

BACKGROUND_TOKENS, QUICK_BACKGROUND_TOKENS = 6000, 2500
URGENT_TOKENS, URGENT_ANSWER_TOKENS = 64, 4
URGENT, BACKGROUND = 0, 20  # classes
_BLOCK_SIZE = 16
_SPARE_BLOCKS = 32  # for one urgent request, so that nobody gives way: the wait for a step alone is measured
_NO_TARGET_MS = 1e9
_GAP_SHARE = 0.15  # the longest gap between two urgent requests, in units of the background prefill
_SMALLEST_VOCABULARY = 256  # prompts use ids that the dry run, the tiny and every real model have


@dataclass(slots=True)
class _Arm:
    """One kind of engine, and what was seen on it."""

    target: str
    built: BuiltEngine
    background: RequestId | None = None  # the one being prefilled
    alone_s: float = 0.0  # prefill of a background prompt without urgent arrivals
    ttfts_s: list[float] = field(default_factory=list)
    backgrounds_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)  # of those with a background chunk
    has_chunk: bool = False  # the latest step had one
    longest_chunk: int = 0  # background tokens in one step

    def listen(self, plan: StepPlan | None, events: Sequence[StepEvent]) -> None:  # noqa: ARG002  # as listeners are
        """See how long the chunks are."""
        if plan is not None:
            found = [chunk.num_tokens for chunk in plan.chunks if chunk.request_id == self.background]
            self.has_chunk = bool(found)
            self.longest_chunk = max([self.longest_chunk, *found])


def bench_pace(
    options: EngineOptions, *, num_arrivals: int = 10, background_tokens: int = BACKGROUND_TOKENS, seed: int = 7
) -> Report:
    """Measure until every engine has seen so many urgent arrivals.

    Two models are loaded: an engine that learns what its steps cost must not be rebuilt between turns.
    """
    rng = random.Random(seed)  # noqa: S311  # repeatable on purpose
    arms = [_arm("default", options, background_tokens, None), _arm("none", options, background_tokens, _NO_TARGET_MS)]
    idle = [_alone(arms[0].built, rng, URGENT_TOKENS, URGENT_ANSWER_TOKENS, URGENT) for _ in range(5)]
    for arm in arms:
        arm.alone_s = _alone(arm.built, rng, background_tokens, 1, BACKGROUND).ttft_s
    number = 0
    while any(len(arm.ttfts_s) < num_arrivals for arm in arms):
        for arm in arms if number % 2 else reversed(arms):
            if len(arm.ttfts_s) < num_arrivals:
                _one_background(arm, rng, background_tokens, num_arrivals)
        number += 1
    built = arms[0].built
    settings = {
        "model": f"{built.model.name} on {built.model.backend.description}",
        "background": f"a prompt of {background_tokens} tokens, class {BACKGROUND}",
        "urgent": f"{URGENT_TOKENS} + {URGENT_ANSWER_TOKENS} tokens, class {URGENT}",
        "arrivals": num_arrivals,
        "token_budget": built.scheduler_config.max_num_batched_tokens,
        "idle_ttft_s": round(median(each.ttft_s for each in idle), 4),
        "decode_step_s": round(median(each.decode_step_s for each in idle), 4),
        "seed": seed,
    }
    return Report("Urgent arrivals during a background prefill", settings, [_row(arm) for arm in arms])


def _arm(target: str, options: EngineOptions, background_tokens: int, target_step_ms: float | None) -> _Arm:
    options = replace(
        options,
        target_step_ms=target_step_ms,
        most_urgent_priority=URGENT,  # as if an urgent request had come in the last ten minutes
        block_size=_BLOCK_SIZE,
        num_kv_blocks=background_tokens // _BLOCK_SIZE + _SPARE_BLOCKS,
        swap_space=0,
        max_model_len=background_tokens + URGENT_ANSWER_TOKENS,
    )
    arm = _Arm(target, build_engine(options))
    arm.built.engine.add_listener(arm.listen)
    return arm


def _row(arm: _Arm) -> dict[str, Any]:
    waits, prefills, steps = sample(arm.ttfts_s), sample(arm.backgrounds_s), sample(arm.steps_s)
    return {
        "target": arm.target,
        "ttft_p50_s": waits.median,
        "ttft_max_s": waits.high,
        "background_s": prefills.median,
        "background_low_s": prefills.low,
        "background_high_s": prefills.high,
        "background_alone_s": arm.alone_s,
        "longest_chunk": arm.longest_chunk,
        "step_p50_s": steps.median,
        "step_max_s": steps.high,
        "background_prompts": len(arm.backgrounds_s),
    }


def _prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """Draw a prompt that has no beginning in common with any other."""
    return [rng.randrange(_SMALLEST_VOCABULARY) for _ in range(num_tokens)]


@dataclass(frozen=True, slots=True)
class _Alone:
    """A request that had the engine to itself."""

    ttft_s: float
    decode_step_s: float  # median; 0: it has a single token


def _alone(built: BuiltEngine, rng: random.Random, prompt_tokens: int, answer_tokens: int, priority: int) -> _Alone:
    engine, times_s = built.engine, []
    engine.submit(_prompt(rng, prompt_tokens), _sampling(answer_tokens), priority=priority)
    started_s = time.perf_counter()
    while engine.has_work:
        if engine.step():
            times_s.append(time.perf_counter())
    decodes_s = [after - before for before, after in pairwise(times_s)]
    return _Alone(times_s[0] - started_s, median(decodes_s) if decodes_s else 0.0)


def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def _one_background(arm: _Arm, rng: random.Random, background_tokens: int, num_arrivals: int) -> None:
    """Prefill one background prompt, with urgent arrivals until there are enough of them."""
    engine, longest_gap_s = arm.built.engine, _GAP_SHARE * arm.alone_s
    arm.background = engine.submit(_prompt(rng, background_tokens), _sampling(1), priority=BACKGROUND)
    started_s = now_s = time.perf_counter()
    ended_s: float | None = None  # of the background prefill
    arrival_s, urgent, is_waiting = now_s + rng.uniform(0, longest_gap_s), None, False
    while True:
        is_during = arrival_s <= (now_s if ended_s is None else ended_s)
        if urgent is None and is_during and len(arm.ttfts_s) < num_arrivals:
            urgent = engine.submit(_prompt(rng, URGENT_TOKENS), _sampling(URGENT_ANSWER_TOKENS), priority=URGENT)
            is_waiting = True
        if not engine.has_work:
            break
        step_started_s, updates = now_s, engine.step()
        now_s = time.perf_counter()
        if arm.has_chunk:
            arm.steps_s.append(now_s - step_started_s)
        for update in updates:
            if update.request_id == arm.background and update.token_ids:
                ended_s = now_s
            elif update.request_id == urgent:
                if is_waiting and update.token_ids:
                    arm.ttfts_s.append(now_s - arrival_s)
                    is_waiting = False
                if update.result is not None:
                    urgent, arrival_s = None, now_s + rng.uniform(0, longest_gap_s)
    if ended_s is not None:
        arm.backgrounds_s.append(ended_s - started_s)
