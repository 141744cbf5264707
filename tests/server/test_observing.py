"""What is told about requests over HTTP: /metrics after a known workload, /v1/requests in every state."""

from __future__ import annotations

import threading
from typing import Any

from giveway.core.request import RequestState
from giveway.server.access import Caller
from tests.server.running import Running, running, wait_until
from tests.server.test_clients_that_go_away import open_request, slam, states

KEYS = [("a-long-key-of-one", Caller("one", "one")), ("a-long-key-of-two", Caller("two", "two"))]


def metrics_of(server: Running) -> dict[str, float]:
    """Every sample of GiveWay's own by its name and labels, as they are written."""
    lines = [each for each in server.get("/metrics").text.splitlines() if each and not each.startswith("#")]
    found = {}
    for each in lines:
        name, _, value = each.rpartition(" ")
        if name.startswith(("vllm:", "giveway:")) and "_created" not in name:
            assert name not in found, "a series is told twice"
            found[name] = float(value)
    return found


def total(samples: dict[str, float], name: str, **labels: str) -> float:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = [
        value for key, value in samples.items() if key.partition("{")[0] == name and all(each in key for each in wanted)
    ]
    assert found, f"no series {name}"
    return sum(found)


def test_counts_are_0_at_the_start_and_right_after_a_known_workload() -> None:
    with running(num_kv_blocks=64) as server:
        before = metrics_of(server)
        assert not any(value for name, value in before.items() if name.partition("{")[0].endswith("_total"))
        for priority, num in ((0, 2), (10, 3), (17, 1), (25, 2), (99, 1)):
            body = {"prompt": [priority + 1, 1, 2], "max_tokens": 4, "ignore_eos": True, "priority": priority}
            for n in range(num):
                assert server.post("/v1/completions", body | {"stream": bool(n % 2)}).status_code == 200
        assert server.post("/v1/completions", {"prompt": [1], "max_tokens": -1}).status_code == 400
        assert server.get("/v1/requests/nobody").status_code == 404
        assert server.get("/wp-admin/12345").status_code == 404
        server.until_idle()
        after = metrics_of(server)
        expected = {"priority": 2, "default": 4, "flex": 2, "batch": 1}
        for name, number in expected.items():
            labels = {"priority_class": name}
            assert total(after, "giveway:requests_accepted_total", **labels) == number
            assert total(after, "vllm:request_success_total", finished_reason="length", **labels) == number
            assert total(after, "vllm:generation_tokens_total", **labels) == 4 * number
            assert total(after, "vllm:prompt_tokens_total", **labels) == 3 * number
            assert total(after, "vllm:time_to_first_token_seconds_count", **labels) == number
            assert total(after, "vllm:num_requests_running", **labels) == 0
        chat = {"route": "/v1/completions"}
        assert total(after, "giveway:http_responses_total", status="200", **chat) == 9
        assert total(after, "giveway:http_responses_total", status="400", **chat) == 1
        assert total(after, "giveway:http_responses_total", status="404", route="/v1/requests/{request_id}") == 1
        assert total(after, "giveway:requests_rejected_total", reason="invalid") == 1
        assert after.keys() == before.keys(), "what a client sends makes a series"
        assert not any("wp-admin" in name or '"99"' in name or '"17"' in name for name in after)


def test_a_request_is_told_in_every_state_by_both_of_its_names_and_to_its_owner_alone() -> None:
    settings: dict[str, Any] = {
        "max_num_seqs": 1,
        "num_kv_blocks": 300,
        "preemption_mode": "swap",
        "step_s": 0.005,
        "partial_preemption": False,
    }
    one, two = ({"Authorization": f"Bearer {key}"} for key, _ in KEYS)
    with running(keys=KEYS, swap_space=64 << 20, **settings) as server:

        def told(name: str) -> Any:
            response = server.get(f"/v1/requests/{name}", headers=one)
            assert response.status_code == 200, response.text
            assert server.get(f"/v1/requests/{name}", headers=two).status_code == 404
            assert server.get(f"/v1/requests/{name}").status_code == 401
            return response.json()

        def ask(name: str, priority: int, num_tokens: int) -> threading.Thread:
            body = {"prompt": [1, priority + 1], "max_tokens": num_tokens, "priority": priority, "ignore_eos": True}
            headers = {**one, "X-Request-Id": name}
            thread = threading.Thread(target=server.post, args=("/v1/completions", body), kwargs={"headers": headers})
            thread.start()
            return thread

        threads = [ask("low", 20, 300)]
        wait_until(lambda: states(server) == [RequestState.RUNNING], "it is not served")
        running_now = told("low")
        assert running_now["state"] == "running"
        assert running_now["alias"] == "low"
        assert running_now["answers"][0]["queue_position"] is None
        assert told(running_now["id"])["id"] == running_now["id"]

        threads += [ask("lower", 30, 5)]
        wait_until(lambda: len(states(server)) == 2, "it does not wait")
        wait_until(lambda: told("lower")["answers"][0].get("waits_for") is not None, "no reason is told")
        waiting = told("lower")
        assert waiting["state"] == "waiting"
        assert waiting["answers"][0]["queue_position"] == 0
        assert waiting["answers"][0]["waits_for"]["meaning"] in waiting["explanation"]
        assert "Class batch (30)." in waiting["explanation"]

        threads += [ask("urgent", 0, 200)]
        wait_until(lambda: RequestState.SWAPPED in states(server), "nobody gave way")
        swapped = told("low")
        assert swapped["state"] == "swapped"
        (loss,) = swapped["answers"][0]["preemptions"]
        assert loss["beneficiary_class"] == {"number": 0, "name": "priority"}
        assert "gave way once" in swapped["explanation"]
        assert told("lower")["answers"][0]["queue_position"] == 1, "the one that gave way is ahead of it"

        for thread in threads:
            thread.join()
        ended = told("low")
        assert ended["state"] == "finished"
        assert ended["answers"][0]["finish_reason"] == "length"
        assert ended["answers"][0]["output_tokens"] == 300
        assert ended["answers"][0]["num_preemptions"] == {"swap": 1}
        assert "It ended (length) after 300 tokens." in ended["explanation"]
        server.until_idle()


def test_a_client_that_went_away_is_told_as_such() -> None:
    with running(num_kv_blocks=300, step_s=0.005) as server:
        connection = open_request(server, {"prompt": [1], "max_tokens": 4000, "priority": 20})
        wait_until(lambda: states(server) == [RequestState.RUNNING], "it is not served")
        slam(connection)
        server.until_idle()
        gone = {"priority_class": "flex"}
        wait_until(
            lambda: total(metrics_of(server), "giveway:client_disconnects_total", **gone) == 1, "nobody counted it"
        )
        assert total(metrics_of(server), "vllm:request_success_total", finished_reason="abort", **gone) == 1
