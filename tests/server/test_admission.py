"""Limits on who may wait: of a class, of a key; told with a time after which trying again makes sense."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from giveway.core.events import Admitted, Finished
from giveway.core.ids import RequestId
from giveway.core.request import FinishReason
from giveway.server.access import Caller
from giveway.server.admission import WaitingCounts
from giveway.server.http_errors import ApiError
from tests.server.running import running, wait_until
from tests.server.test_clients_that_go_away import open_request, slam, states


def test_a_class_whose_queue_is_full_gets_a_429_with_a_time_and_other_classes_are_served() -> None:
    limits = {"max_queued": 3, "max_queued_of": {"flex": 1}}
    with running(max_num_seqs=1, num_kv_blocks=300, step_s=0.005, limits=limits) as server:
        alive = [open_request(server, {"prompt": [1], "max_tokens": 4000, "priority": 0})]
        wait_until(lambda: len(server.engine.scheduler.state.residents) == 1, "the seat is not taken")
        alive += [open_request(server, {"prompt": [n], "max_tokens": 9, "priority": 12}) for n in (2, 3, 4)]
        alive += [open_request(server, {"prompt": [5], "max_tokens": 9, "priority": 25})]
        wait_until(lambda: len(states(server)) == 5, "they are not queued")
        for priority in (12, 25):
            refused = server.post("/v1/completions", {"prompt": [6], "max_tokens": 9, "priority": priority})
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert 1 <= int(refused.headers["Retry-After"]) <= 60
        alive += [open_request(server, {"prompt": [7], "max_tokens": 9, "priority": 35})]
        wait_until(lambda: len(states(server)) == 6, "another class is held up by a full queue")
        for connection in alive:
            slam(connection)
        server.until_idle()
        assert server.post("/v1/completions", {"prompt": [6], "max_tokens": 2, "priority": 12}).status_code == 200


def test_ten_thousand_requests_wait_and_an_urgent_one_goes_past_them_all() -> None:
    # Goal: a long queue costs neither the urgent one nor the HTTP side anything to speak of.
    prompts = [[n % 200 + 1, n // 200 + 1] for n in range(2000)]
    with running(max_num_seqs=2, num_kv_blocks=300, step_s=0.002, check_invariants=False) as server:
        alive = [
            open_request(server, {"prompt": prompts, "max_tokens": 50, "priority": 20, "stream": True})
            for _ in range(5)
        ]
        wait_until(lambda: len(server.engine.scheduler.requests) > 9_900, "they are not queued")
        before = server.engine.scheduler.state.next_step_id
        answer = server.post("/v1/completions", {"prompt": [9], "max_tokens": 3, "priority": 0})
        assert answer.status_code == 200
        spent = server.engine.scheduler.state.next_step_id - before
        assert spent < 1000, "it waited for those ahead of it, which take some 250,000 steps"
        assert server.get("/health").status_code == 200
        one_more = server.post("/v1/completions", {"prompt": prompts, "max_tokens": 5, "priority": 20})
        assert one_more.status_code == 429
        for connection in alive:
            slam(connection)
        server.until_idle()


def test_a_key_has_so_many_requests_at_a_time_and_no_more() -> None:
    keys = [("a-long-key-of-one", Caller("one", "one", max_concurrent=2)), ("a-long-key-of-two", Caller("two", "two"))]
    with running(keys=keys, step_s=0.005) as server:

        async def main() -> list[int]:
            async with server.async_client("a-long-key-of-one") as client:
                wishes = [client.completions.create(model="dry run", prompt=[n + 1], max_tokens=40) for n in range(5)]
                ends: list[Any] = await asyncio.gather(*wishes, return_exceptions=True)
                return [getattr(end, "status_code", 200) for end in ends]

        statuses = asyncio.run(main())
        assert sorted(statuses) == [200, 200, 429, 429, 429]
        assert asyncio.run(main()).count(200) == 2, "requests that have ended still count"
        headers = {"Authorization": "Bearer a-long-key-of-one"}
        for body in ({"prompt": "a", "n": 3}, {"prompt": ["a", "b", "c"]}):  # each answer counts
            refused = server.post("/v1/completions", body, headers=headers)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "too_many_answers"
        assert server.client("a-long-key-of-two").completions.create(model="dry run", prompt="a", max_tokens=2)


def test_waiting_requests_are_counted_until_their_first_seat_or_their_end() -> None:
    now_s = [0.0]
    counts = WaitingCounts(lambda: now_s[0])
    names = [RequestId(f"r{n}") for n in range(4)]
    counts.enter("flex", names, limit=4)
    with pytest.raises(ApiError) as refused:
        counts.enter("flex", [RequestId("late")], limit=4)
    assert refused.value.headers["Retry-After"] == "5"  # nothing is known yet of how fast it goes
    counts.enter("default", [RequestId("late")], limit=1)
    for place, name in enumerate(names[:2]):
        now_s[0] = 10.0 * place
        counts(None, [Admitted(name, 0.0, 0, False, False)])
    assert counts.count("flex") == 2
    counts(None, [Admitted(names[0], 0.0, 0, False, True)])  # a resume is no first seat
    assert counts.count("flex") == 2
    with pytest.raises(ApiError) as refused:
        counts.enter("flex", names[:2], limit=3)
    assert refused.value.headers["Retry-After"] == "10"  # one seat in ten seconds, half of two waiting
    with pytest.raises(ApiError) as refused:
        counts.enter("flex", names, limit=3)
    assert refused.value.status == 400  # no time is the right one for so many
    counts(None, [Finished(names[2], 0.0, FinishReason.ABORT, None, 0, 0, 0)])
    counts.leave(names)
    assert counts.count("flex") == 0
    assert counts.count("default") == 1


def test_more_http_requests_than_are_taken_at_a_time_get_a_503_in_openais_shape() -> None:
    with running(limits={"max_http_requests": 1}, step_s=0.005) as server:
        connection = open_request(server, {"prompt": [1], "max_tokens": 4000})
        wait_until(lambda: len(states(server)) == 1, "it is not served")
        refused = server.get("/v1/models")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_requests"
        assert refused.headers["Retry-After"]
        slam(connection)
        server.until_idle()
        wait_until(lambda: server.get("/v1/models").status_code == 200, "requests that have ended still count")
