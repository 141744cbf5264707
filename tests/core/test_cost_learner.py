"""The filter that learns a machine's prices from its steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from giveway.core.cost_learner import CostLearner
from giveway.core.cost_profile import SHIPPED, CostProfile, ForwardWork

DECODES = ForwardWork.of([(500, 501)] * 8)
LATE_CHUNK = ForwardWork.of([(500, 501)] * 8 + [(4000, 4016)])
PREFILL = ForwardWork.of([(0, 512)])


def taught(truth: CostProfile, num_steps: int, *, seed: int, noise: float = 0.0) -> CostProfile:
    """Teach the shipped profile with decodes of all batch sizes, and chunks that wander through a long prompt."""
    rng, learner, profile, start = random.Random(seed), CostLearner(), SHIPPED, 0
    for number in range(num_steps):
        spans = [(context, context + 1) for context in rng.sample(range(50, 1500), rng.randint(1, 16))]
        if number % 4 == 0:
            num_tokens = rng.choice([16, 128])
            spans.append((start, start + num_tokens))
            start = (start + num_tokens) % 6000
        work = ForwardWork.of(spans)
        stall = 10 if noise and rng.random() < 0.03 else 1
        profile = learner.refined(profile, work, stall * truth.forward_s(work) * rng.lognormvariate(0, noise))
    return profile


@pytest.mark.parametrize(
    "truth",
    [
        replace(SHIPPED, step_s=SHIPPED.step_s * 3, token_s=SHIPPED.token_s * 3, context_s=SHIPPED.context_s * 3),
        replace(SHIPPED, context_s=SHIPPED.context_s * 20),
        replace(SHIPPED, context_s=SHIPPED.context_s / 1000),
        replace(SHIPPED, step_s=0.002, token_s=0.00003, context_s=1e-9),
    ],
    ids=["slower", "dear context", "cheap context", "much faster"],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_prices_of_a_machine_are_known_within_some_hundred_steps(truth: CostProfile, seed: int) -> None:
    # Goal: each price by itself, so that work of other shapes than those seen most is told right too.
    learned = taught(truth, 300, seed=seed)
    for work in (DECODES, LATE_CHUNK, PREFILL):
        assert learned.forward_s(work) == pytest.approx(truth.forward_s(work), rel=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_a_busy_machine_blurs_the_prices_and_does_not_turn_them_over(seed: int) -> None:
    # Goal: times that vary by a quarter, and three in a hundred ten times too long.
    truth = replace(SHIPPED, step_s=0.006, token_s=0.0001, context_s=5e-7)
    learned = taught(truth, 1000, seed=seed, noise=0.25)
    for work in (DECODES, LATE_CHUNK, PREFILL):
        assert truth.forward_s(work) / 2 < learned.forward_s(work) < 2 * truth.forward_s(work)


def test_one_stalled_step_moves_the_profile_by_little() -> None:
    learner, profile = CostLearner(), SHIPPED
    for _ in range(20):
        profile = learner.refined(profile, DECODES, SHIPPED.forward_s(DECODES))
    stalled = learner.refined(profile, DECODES, 1000 * SHIPPED.forward_s(DECODES))
    assert stalled.forward_s(DECODES) < 1.5 * SHIPPED.forward_s(DECODES)


def test_a_time_that_says_nothing_teaches_nothing() -> None:
    learner = CostLearner()
    assert learner.refined(SHIPPED, DECODES, 0.0) is SHIPPED
    assert learner.refined(SHIPPED, DECODES, -1.0) is SHIPPED
    nothing = CostProfile(0, 0, 0, 0, 0, 0, 0, 0)
    assert learner.refined(nothing, DECODES, 1.0) is nothing


def test_ten_thousand_equal_steps_leave_the_other_prices_where_they_were() -> None:
    # Goal: what steps of one shape do not tell is neither forgotten nor drifts away.
    learner, profile = CostLearner(), SHIPPED
    for _ in range(10_000):
        profile = learner.refined(profile, DECODES, 0.5 * SHIPPED.forward_s(DECODES))
    assert profile.forward_s(DECODES) == pytest.approx(0.5 * SHIPPED.forward_s(DECODES), rel=0.01)
    assert 0.1 * SHIPPED.forward_s(PREFILL) < profile.forward_s(PREFILL) < 2 * SHIPPED.forward_s(PREFILL)


def test_the_filter_is_as_steady_after_thirty_thousand_steps_as_after_some_hundred() -> None:
    # Goal: rounding errors do not add up until a gain turns over and prices run away, which took seven thousand steps.
    truth = replace(SHIPPED, step_s=0.0003, token_s=0.00002, context_s=1e-8)
    rng, learner, profile = random.Random(1), CostLearner(), SHIPPED
    for _ in range(30_000):
        num_tokens, context = rng.choice([(rng.randint(1, 16), rng.randint(5, 60)), (60, 30)])
        work = ForwardWork(num_tokens, num_tokens * context)
        profile = learner.refined(profile, work, truth.forward_s(work) * rng.lognormvariate(0, 0.3))
    for work in (ForwardWork(1, 30), ForwardWork(16, 600), ForwardWork(60, 1800)):
        assert profile.forward_s(work) == pytest.approx(truth.forward_s(work), rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_no_times_however_wild_make_a_price_that_is_none(seed: int) -> None:
    # Goal: a clock that jumps, or a machine that sleeps, must not stop the engine.
    rng, learner, profile = random.Random(seed), CostLearner(), SHIPPED
    for number in range(20_000):
        work = ForwardWork(rng.randint(1, 2048), rng.randint(1, 10_000_000))
        usual_s = (1e-12, 1e12)[number // 5000 % 2]
        profile = learner.refined(profile, work, usual_s * rng.lognormvariate(0, 10))
    for _ in range(5_000):  # and it finds back, from as far away as prices can be
        work = rng.choice([DECODES, LATE_CHUNK, PREFILL])
        profile = learner.refined(profile, work, SHIPPED.forward_s(work))
    for work in (DECODES, LATE_CHUNK, PREFILL):
        assert SHIPPED.forward_s(work) / 4 < profile.forward_s(work) < 4 * SHIPPED.forward_s(work)
