"""Requests in rank order."""

from __future__ import annotations

import random

import pytest

from giveway.core.errors import InvariantError
from giveway.core.ids import RequestId
from giveway.core.request import Request, RequestSpec
from giveway.core.state import RankedRequests


def make_request(priority: int, number: int) -> Request:
    return Request(RequestSpec(RequestId(f"{priority}.{number}"), (1,), 1, priority), (priority, number))


@pytest.mark.parametrize("seed", range(5))
def test_requests_stay_in_rank_order_whatever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)
    ranked, oracle = RankedRequests(), list[Request]()
    for number in range(200):
        if oracle and rng.random() < 0.4:
            ranked.remove(oracle.pop(rng.randrange(len(oracle))))
        else:
            oracle.append(make_request(rng.choice([0, 5, 9]), number))
            ranked.add(oracle[-1])
        assert list(ranked) == sorted(oracle, key=lambda request: request.rank)
        assert len(ranked) == len(oracle)


def test_removing_somebody_who_is_not_there_is_a_bug_and_says_so() -> None:
    ranked = RankedRequests()
    ranked.add(make_request(5, 0))
    with pytest.raises(InvariantError, match="not in the list"):
        ranked.remove(make_request(5, 0))  # an equal rank is not the same request
