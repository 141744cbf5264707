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


@pytest.mark.parametrize("seed", range(5))
def test_requests_whose_rank_changed_take_their_new_places(seed: int) -> None:
    # Goal: after `resort` the list is as if it had been filled with the new ranks, for reading and for removal.
    rng = random.Random(seed)
    ranked, everybody = RankedRequests(), [make_request(rng.choice([5, 9]), number) for number in range(30)]
    for request in everybody:
        ranked.add(request)
    listed = ranked.as_list()
    for _ in range(20):
        for request in rng.sample(everybody, 3):
            request.rank = (max(request.rank[0] - rng.choice([1, 3]), 0), request.rank[1])
        ranked.resort()
        assert list(ranked) == sorted(everybody, key=lambda request: request.rank)
        assert ranked.as_list() is listed
        gone = everybody.pop(rng.randrange(len(everybody)))
        ranked.remove(gone)
        everybody.append(make_request(gone.spec.priority, gone.rank[1]))
        ranked.add(everybody[-1])
        assert list(ranked) == sorted(everybody, key=lambda request: request.rank)


def test_a_list_that_was_not_resorted_says_so_rather_than_remove_somebody_else() -> None:
    ranked, requests = RankedRequests(), [make_request(5, number) for number in range(4)]
    for request in requests:
        ranked.add(request)
    requests[1].rank = (9, 1)
    with pytest.raises(InvariantError, match=r"5\.1 is not in the list"):
        ranked.remove(requests[1])


def test_an_empty_list_can_be_resorted_and_has_nobody_to_remove() -> None:
    ranked = RankedRequests()
    ranked.resort()
    with pytest.raises(InvariantError, match="not in the list"):
        ranked.remove(make_request(5, 0))


def test_removing_somebody_who_is_not_there_is_a_bug_and_says_so() -> None:
    ranked = RankedRequests()
    ranked.add(make_request(5, 0))
    with pytest.raises(InvariantError, match="not in the list"):
        ranked.remove(make_request(5, 0))  # an equal rank is not the same request
