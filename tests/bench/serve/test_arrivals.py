"""When the requests of an open loop come."""

from __future__ import annotations

import math
import random
from itertools import islice, pairwise
from statistics import fmean, pstdev

import pytest

from giveway.bench.serve.arrivals import due_times_s, gaps_s
from giveway.bench.serve.load_class import ClassDefaults, LoadClass, TokenRange, parse_class
from giveway.core.errors import InvariantError

ONE = TokenRange(1, 1)


def load(text: str) -> LoadClass:
    return parse_class(text, ClassDefaults(ONE, ONE))


def gaps(number: int, *, rate: float, burstiness: float, seed: int = 3) -> list[float]:
    return list(islice(gaps_s(random.Random(seed), rate=rate, burstiness=burstiness), number))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness: float) -> None:
    # Goal: gamma distributed gaps; their standard deviation is the mean over the root of the shape.
    found = gaps(20_000, rate=5.0, burstiness=burstiness)
    assert fmean(found) == pytest.approx(0.2, rel=0.05)
    assert pstdev(found) == pytest.approx(0.2 / math.sqrt(burstiness), rel=0.05)


def test_poisson_arrivals_forget_what_was_before() -> None:
    # Goal: burstiness 1 is a Poisson process: as many arrivals a second as their variance, and 1/e of the gaps are
    # longer than the mean.
    due = list(due_times_s(load("a:rate=4,num=20000"), random.Random(5), duration_s=None))
    counts = [0] * int(due[-1])
    for moment in due:
        if moment < len(counts):
            counts[int(moment)] += 1
    assert fmean(counts) == pytest.approx(4, rel=0.05)
    assert pstdev(counts) ** 2 == pytest.approx(4, rel=0.1)
    longer = sum(after - before > 0.25 for before, after in pairwise(due)) / len(due)
    assert longer == pytest.approx(1 / math.e, rel=0.05)


def test_the_two_ends_of_burstiness_and_rate_are_even_gaps_and_no_gaps() -> None:
    assert gaps(3, rate=4.0, burstiness=math.inf) == [0.25] * 3
    assert gaps(3, rate=math.inf, burstiness=1.0) == [0.0] * 3


def test_the_same_seed_gives_the_same_arrivals() -> None:
    assert gaps(50, rate=2.0, burstiness=0.5) == gaps(50, rate=2.0, burstiness=0.5)
    assert gaps(50, rate=2.0, burstiness=0.5) != gaps(50, rate=2.0, burstiness=0.5, seed=4)


def test_a_burst_comes_all_at_once_at_its_start() -> None:
    assert list(due_times_s(load("a:burst=3,start=2"), random.Random(1), duration_s=None)) == [2.0] * 3
    assert list(due_times_s(load("a:burst=3,start=2"), random.Random(1), duration_s=1.0)) == []


def test_arrivals_end_with_the_number_of_requests_or_the_duration_whichever_is_first() -> None:
    counted = list(due_times_s(load("a:rate=10,num=5,start=1"), random.Random(1), duration_s=1000.0))
    assert len(counted) == 5
    assert all(1.0 < before < after for before, after in pairwise(counted))
    timed = list(due_times_s(load("a:rate=10"), random.Random(1), duration_s=20.0))
    assert len(timed) == pytest.approx(200, rel=0.3)
    assert timed[-1] <= 20.0


def test_a_closed_loop_has_no_moments_of_its_own() -> None:
    with pytest.raises(InvariantError, match="closed loop"):
        next(due_times_s(load("a:concurrency=1"), random.Random(1), duration_s=None))
