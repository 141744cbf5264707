"""Tokens of a step: who gets how many, and for how long a step may last."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from giveway.core.budget import allowance_s, prefill_tokens, tokens_within
from giveway.core.cost_profile import SHIPPED, CostProfile, ForwardWork

# A quarter is a whole number of any smaller power of two, so sums of these come out exactly.
PLAIN = replace(SHIPPED, step_s=1.0, token_s=0.25, context_s=0.0)


@pytest.mark.parametrize(
    ("wanted", "left", "set_aside", "is_best", "granted"),
    [
        (20, 64, 0, True, 20),  # all it wants
        (20, 8, 0, True, 8),  # all there is
        (20, 8, 5, False, 3),  # decodes of its class keep their tokens
        (20, 8, 8, False, 0),  # nothing left over for a second prefill
        (20, 8, 8, True, 4),  # the best prefill gets a block whatever is set aside
        (20, 3, 8, True, 3),  # or what is left of one
        (2, 8, 8, True, 2),  # or what it wants of one
        (20, 0, 0, True, 0),  # an empty budget is empty for everybody
        (20, 4, 9, False, 0),  # more set aside than left is not a debt
    ],
)
def test_a_prefill_gets_what_decodes_of_its_class_leave_and_the_best_one_at_least_a_block(
    wanted: int, left: int, set_aside: int, is_best: bool, granted: int
) -> None:
    tokens = prefill_tokens(wanted=wanted, left=left, set_aside=set_aside, block_size=4, is_best_prefill=is_best)
    assert tokens == granted


@pytest.mark.parametrize(
    ("wanted", "left", "set_aside", "is_best", "in_time", "granted"),
    [
        (20, 64, 0, False, 7, 7),  # the time that is left counts
        (20, 64, 0, False, 0, 0),
        (20, 64, 0, False, 99, 20),  # time to spare grants nothing beyond the rest
        (20, 8, 5, False, 7, 3),
        (20, 64, 0, True, 7, 7),
        (20, 64, 0, True, 0, 4),  # the best prefill gets a block whatever the time
        (20, 3, 0, True, 0, 3),
        (2, 64, 0, True, 0, 2),
        (20, 0, 0, True, 0, 0),
    ],
)
def test_a_prefill_held_to_a_time_gets_no_more_than_that_and_the_best_one_still_a_block(
    wanted: int, left: int, set_aside: int, is_best: bool, in_time: int, granted: int
) -> None:
    tokens = prefill_tokens(
        wanted=wanted, left=left, set_aside=set_aside, block_size=4, is_best_prefill=is_best, in_time=in_time
    )
    assert tokens == granted


def test_without_a_target_prefills_may_double_the_time_of_the_decodes() -> None:
    decodes = ForwardWork(8, 800)
    assert allowance_s(PLAIN, decodes, None) == PLAIN.forward_s(decodes) == 3.0


@pytest.mark.parametrize(("target_s", "left_s"), [(10.0, 7.0), (3.0, 0.0), (1.0, 0.0)])
def test_with_a_target_prefills_get_what_the_decodes_leave_of_it_and_never_a_debt(
    target_s: float, left_s: float
) -> None:
    assert allowance_s(PLAIN, ForwardWork(8, 800), target_s) == left_s


def brute_force(costs: CostProfile, start: int, seconds: float) -> int:
    """Add one token after another while the sum stays within the time."""
    num_tokens = 0
    while costs.recompute_s(start, start + num_tokens + 1) <= seconds:
        num_tokens += 1
    return num_tokens


@pytest.mark.parametrize("seed", range(20))
def test_the_tokens_that_fit_into_a_time_are_those_that_a_sum_token_by_token_allows(seed: int) -> None:
    # Oracle: brute force. One token off is allowed only where the sum meets the time to a billionth.
    rng = random.Random(seed)
    for _ in range(40):
        costs = replace(SHIPPED, token_s=rng.choice([0.0, 1e-5, 7e-4]), context_s=rng.choice([0.0, 2e-7, 3e-5]))
        start, seconds = rng.choice([0, 1, 17, 4000]), rng.choice([0.0, 1e-4, 0.013, 0.2])
        found = tokens_within(costs, start, seconds)
        if not costs.token_s and not costs.context_s:
            assert found is None
            continue
        assert found is not None
        expected = brute_force(costs, start, seconds)
        if found != expected:
            assert abs(found - expected) == 1
            edge_s = costs.recompute_s(start, start + max(found, expected))
            assert edge_s == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("token_s", "context_s", "start", "seconds", "tokens"),
    [
        (0.25, 0.0, 0, 1.0, 4),
        (0.25, 0.0, 999, 1.1, 4),  # without a price for context the position does not matter
        (0.25, 0.0, 0, 0.0, 0),
        (0.0, 1.0, 0, 6.0, 3),  # 1 + 2 + 3
        (0.0, 1.0, 0, 5.9, 2),
        (0.0, 1.0, 9, 21.0, 2),  # 10 + 11
        (1.0, 1.0, 0, 9.0, 3),  # 2 + 3 + 4
    ],
)
def test_time_is_turned_into_tokens(token_s: float, context_s: float, start: int, seconds: float, tokens: int) -> None:
    assert tokens_within(replace(SHIPPED, token_s=token_s, context_s=context_s), start, seconds) == tokens


def test_a_profile_without_a_price_sets_no_limit() -> None:
    assert tokens_within(replace(SHIPPED, token_s=0.0, context_s=0.0), 5, 1.0) is None


@pytest.mark.parametrize("context_s", [1e-12, 1e-18, 1e-20, 1e-22, 1e-30])
def test_a_price_for_context_that_is_next_to_nothing_changes_next_to_nothing(context_s: float) -> None:
    # Fails from 1e-20 on: the root and the linear part cancel. With 2 * seconds / (root + linear) they would not.
    costs = replace(SHIPPED, token_s=7e-4, context_s=context_s)
    assert tokens_within(costs, 10, 0.2) == tokens_within(replace(costs, context_s=0.0), 10, 0.2) == 285
