"""Urgency over HTTP: the numbers and tiers of requests reach the scheduler, and nobody gets above his key's ceiling."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from giveway.core.events import Preempted, StepEvent, TokenEmitted
from giveway.core.plan import StepPlan
from giveway.server.access import Caller
from giveway.server.classes import PriorityClasses
from tests.server.running import Running, running, wait_until


class Journal:
    """What the engine did, by request."""

    def __init__(self, server: Running) -> None:
        self.preempted: list[str] = []
        self.priorities: dict[str, int] = {}
        self.first_token_order: list[int] = []
        self.num_tokens = 0
        self._engine = server.engine
        server.engine.add_listener(self)

    def __call__(self, plan: StepPlan | None, events: Any) -> None:
        event: StepEvent
        for event in events:
            spec = self._engine.spec_of(event.request_id)
            if spec is not None:
                self.priorities[event.request_id] = spec.priority
            if isinstance(event, Preempted):
                self.preempted.append(event.request_id)
            if isinstance(event, TokenEmitted):
                self.num_tokens += 1
                if event.output_index == 0:
                    self.first_token_order.append(self.priorities[event.request_id])


def in_background(server: Running, bodies: list[dict[str, Any]]) -> Callable[[], list[Any]]:
    """Send requests at once, each in a thread of its own; the result waits for all answers."""
    answers: list[Any] = [None] * len(bodies)

    def send(place: int) -> None:
        answers[place] = server.post("/v1/completions", bodies[place])

    threads = [threading.Thread(target=send, args=(place,)) for place in range(len(bodies))]
    for thread in threads:
        thread.start()

    def join() -> list[Any]:
        for thread in threads:
            thread.join()
        return answers

    return join


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_ten_seats_of_background_work_make_place_for_one_urgent_request_and_every_text_stays_as_it_was() -> None:
    # Goal: the urgent one runs at once, all sixteen finish, and the fifteen say what they say in a calm server.
    bodies = [{"prompt": [n, 1, 2], "max_tokens": 60, "priority": 10, "temperature": 0} for n in range(1, 16)]
    urgent = {"prompt": [99, 98], "max_tokens": 5, "priority": 0, "temperature": 0}
    with running(max_num_seqs=10, num_kv_blocks=200) as calm:
        expected = [text_of(calm.post("/v1/completions", body)) for body in (*bodies, urgent)]
    with running(max_num_seqs=10, num_kv_blocks=200, step_s=0.01) as server:
        journal = Journal(server)
        join = in_background(server, bodies)
        wait_until(lambda: len(server.engine.scheduler.state.residents) == 10, "the seats are not taken")
        before = server.engine.scheduler.state.next_step_id
        answer = server.post("/v1/completions", urgent)
        steps = server.engine.scheduler.state.next_step_id - before
        assert text_of(answer) == expected[-1]
        assert journal.preempted, "nobody gave way for it"
        assert all(journal.priorities[name] == 10 for name in journal.preempted)
        assert steps < 60, "it waited for background work to end"
        assert [text_of(each) for each in join()] == expected[:-1]
        server.until_idle()


def test_four_requests_that_fit_alone_and_not_together_all_finish_and_only_the_impossible_one_fails() -> None:
    with running(num_kv_blocks=8, swap_space=0) as server:
        bodies = [{"prompt": [n] * 16, "max_tokens": 60, "temperature": 0} for n in range(1, 5)]
        alone = [text_of(server.post("/v1/completions", body)) for body in bodies]
        journal = Journal(server)
        join = in_background(server, bodies)
        impossible = server.post("/v1/completions", {"prompt": [5] * 100, "max_tokens": 100})
        assert impossible.status_code == 400
        assert "can never fit" in impossible.json()["error"]["message"]
        assert [text_of(answer) for answer in join()] == alone
        assert journal.num_tokens == 4 * 60
        server.until_idle()


@pytest.mark.parametrize(
    ("body", "priority", "tier"),
    [
        ({}, 10, "default"),
        ({"priority": 0}, 0, "priority"),
        ({"priority": 7}, 7, "priority"),
        ({"priority": -3}, 0, "priority"),
        ({"priority": 20}, 20, "flex"),
        ({"priority": 1000}, 100, "flex"),
        ({"service_tier": "priority"}, 0, "priority"),
        ({"service_tier": "default"}, 10, "default"),
        ({"service_tier": "auto"}, 10, "default"),
        ({"service_tier": "flex"}, 20, "flex"),
        ({"service_tier": "flex", "priority": 3}, 3, "priority"),
        ({"service_tier": None, "priority": None}, 10, "default"),
    ],
    ids=repr,
)
def test_numbers_and_tiers_reach_the_scheduler_and_the_answer_tells_the_tier(
    dry: Running, body: dict[str, Any], priority: int, tier: str
) -> None:
    journal = Journal(dry)
    answer = dry.post("/v1/completions", {"prompt": "a", "max_tokens": 2, **body})
    assert answer.json()["service_tier"] == tier
    assert journal.priorities[answer.json()["id"]] == priority
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **body}
    answer = dry.post("/v1/chat/completions", chat)
    assert answer.json()["service_tier"] == tier
    assert journal.priorities[answer.json()["id"]] == priority


KEYS = [
    ("key-of-the-chat-team", Caller("chat", "chat", default_priority=0)),
    ("key-of-the-batch-team", Caller("bulk", "bulk", default_priority=25, ceiling=20)),
]


@pytest.mark.parametrize(
    ("key", "body", "priority"),
    [
        (0, {}, 0),
        (0, {"priority": 50}, 50),
        (1, {}, 25),
        (1, {"priority": 0}, 20),
        (1, {"priority": 30}, 30),
        (1, {"service_tier": "priority"}, 20),
        (1, {"service_tier": "auto"}, 25),
        (1, {"service_tier": "flex"}, 20),
    ],
)
def test_nobody_gets_above_the_ceiling_of_his_key(key: int, body: dict[str, Any], priority: int) -> None:
    with running(keys=KEYS) as server:
        journal = Journal(server)
        headers = {"Authorization": f"Bearer {KEYS[key][0]}"}
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, **body}, headers=headers)
        assert journal.priorities[answer.json()["id"]] == priority
        assert answer.json()["service_tier"] == {0: "priority", 20: "flex", 25: "flex"}.get(priority, "flex")
        is_lowered = key == 1 and (body.get("priority") == 0 or body.get("service_tier") == "priority")
        assert ("ceiling" in answer.headers.get("X-GiveWay-Warning", "")) == is_lowered


def test_a_class_that_the_operator_named_is_a_tier() -> None:
    entries = (("priority", 0), ("interactive", 5), ("default", 10), ("flex", 20), ("batch", 30))
    with running(server={"classes": PriorityClasses(entries)}) as server:
        journal = Journal(server)
        wish = {"prompt": "a", "max_tokens": 2}
        answer = server.post("/v1/completions", {**wish, "service_tier": "interactive"}).json()
        assert journal.priorities[answer["id"]] == 5
        assert answer["service_tier"] == "interactive"
        refused = server.post("/v1/completions", {**wish, "service_tier": "batch"})
        assert refused.status_code == 400
        assert "interactive" in refused.json()["error"]["message"]


def test_a_waiting_urgent_request_takes_a_seat_from_running_background_work() -> None:
    # Goal: no priority inversion where seats, not memory, are what is short.
    with running(max_num_seqs=2, num_kv_blocks=200, step_s=0.005) as server:
        journal = Journal(server)
        join = in_background(
            server, [{"prompt": [n], "max_tokens": 500, "priority": 5, "temperature": 0} for n in (1, 2)]
        )
        wait_until(lambda: len(server.engine.scheduler.state.residents) == 2, "the seats are not taken")
        wait_until(lambda: journal.num_tokens > 4, "nothing is made")
        done_before = journal.num_tokens
        assert text_of(server.post("/v1/completions", {"prompt": [3], "max_tokens": 3, "priority": 0}))
        assert journal.num_tokens < done_before + 200, "it waited for the others to end"
        assert len(journal.preempted) == 1
        assert [len(text_of(answer)) > 0 for answer in join()] == [True, True]


def test_equals_do_not_displace_each_other() -> None:
    with running(max_num_seqs=1, num_kv_blocks=200, step_s=0.002) as server:
        journal = Journal(server)
        join = in_background(server, [{"prompt": [n], "max_tokens": 30, "priority": 5} for n in (1, 2, 3)])
        assert all(text_of(answer) for answer in join())
        assert not journal.preempted
