"""Clients that close their connection, streaming or not, in any state: everything they held is free at once."""

from __future__ import annotations

import json
import random
import socket
from typing import Any

import pytest

from giveway.core.request import RequestState
from tests.server.running import Running, running, wait_until


def open_request(server: Running, body: dict[str, Any]) -> socket.socket:
    """Send a request and leave the answer unread."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def slam(connection: socket.socket) -> None:
    """Close a connection in one of the ways in which clients do."""
    if random.random() < 0.5:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # reset instead of close
    connection.close()


def states(server: Running) -> list[RequestState]:
    return [request.state for request in list(server.engine.scheduler.requests.values())]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_leaves_while_it_waits_is_not_served_later(stream: bool) -> None:
    with running(max_num_seqs=1, num_kv_blocks=300, step_s=0.005) as server:
        first = open_request(server, {"prompt": [1], "max_tokens": 4000, "stream": stream})
        wait_until(lambda: RequestState.RUNNING in states(server), "the first one is not served")
        waiting = [open_request(server, {"prompt": [n], "max_tokens": 50, "stream": stream}) for n in range(2, 12)]
        wait_until(lambda: len(states(server)) == 11, "they are not queued")
        for connection in waiting:
            slam(connection)
        wait_until(lambda: len(states(server)) == 1, "requests of clients that are gone are kept")
        slam(first)
        server.until_idle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_leaves_in_the_middle_of_its_prefill_frees_its_blocks(stream: bool) -> None:
    with running(max_num_batched_tokens=64, num_kv_blocks=300, step_s=0.02) as server:
        connection = open_request(server, {"prompt": [7] * 4000, "max_tokens": 9, "stream": stream})
        wait_until(lambda: server.engine.scheduler.state.kv.device.num_owned > 0, "nothing is computed")
        assert all(not request.output_token_ids for request in list(server.engine.scheduler.requests.values()))
        slam(connection)
        server.until_idle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_client_that_leaves_while_its_request_has_given_way_frees_what_was_parked(mode: str, stream: bool) -> None:
    with running(max_num_seqs=1, num_kv_blocks=300, step_s=0.005, preemption_mode=mode) as server:
        background = open_request(server, {"prompt": [1], "max_tokens": 3000, "priority": 9, "stream": stream})
        wait_until(lambda: RequestState.RUNNING in states(server), "it is not served")
        urgent = open_request(server, {"prompt": [2], "max_tokens": 3000, "priority": 0})
        wait_until(lambda: set(states(server)) & {RequestState.SWAPPED, RequestState.PREEMPTED}, "nobody gave way")
        slam(background)
        wait_until(lambda: len(states(server)) == 1, "the request of a client that is gone is kept")
        slam(urgent)
        server.until_idle()


def test_three_hundred_clients_leave_in_all_states_and_the_next_one_is_served_as_usual(dry: Running) -> None:
    # Goal: no leak, no stall, and no harm to a stream that goes on all the while.
    calm = dry.post("/v1/completions", {"prompt": [42], "max_tokens": 400, "temperature": 0}).json()
    rng = random.Random(7)
    with running(max_num_seqs=6, num_kv_blocks=64, max_num_batched_tokens=64, step_s=0.001) as server:
        with server.client() as client:
            stream = client.completions.create(
                model="dry run", prompt=[42], max_tokens=400, temperature=0, stream=True, extra_body={"priority": 0}
            )
            text = next(stream).choices[0].text
            alive: list[socket.socket] = []
            for number in range(300):
                body = {
                    "prompt": [number % 200 + 1] * rng.choice([1, 30, 300]),
                    "max_tokens": rng.choice([1, 50, 300]),
                    "priority": rng.choice([0, 5, 10, 30]),
                    "stream": rng.random() < 0.5,
                    "n": rng.choice([1, 1, 2]),
                }
                alive.append(open_request(server, body))
                if len(alive) > 12:
                    slam(alive.pop(rng.randrange(len(alive))))
                if number % 10 == 0:
                    text += next(stream).choices[0].text
            for connection in alive:
                slam(connection)
            text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == calm["choices"][0]["text"]
        server.until_idle()
        answer = server.post("/v1/completions", {"prompt": [42], "max_tokens": 10, "temperature": 0})
        assert (
            answer.json()["choices"][0]["text"]
            == calm["choices"][0]["text"][: len(answer.json()["choices"][0]["text"])]
        )
        server.until_idle()


def test_clients_that_leave_at_the_very_moment_of_news_leave_nothing_behind() -> None:
    # Goal: news and the end of a connection meet in every order; a request that goes on regardless would take minutes.
    rng = random.Random(3)
    prompts = [[n + 1] for n in range(60)]
    with running(max_num_seqs=8, num_kv_blocks=2100, step_s=0.001, check_invariants=False) as server:
        for _ in range(150):
            connection = open_request(server, {"prompt": prompts, "max_tokens": 4000, "stream": True})
            for _ in range(rng.randrange(4)):
                connection.recv(1 << 16)
            slam(connection)
        server.until_idle()
