"""Streams: whole characters, signs of life, and readers who are too slow."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from giveway.core.request import NEWCOMER_STATES, RequestState
from tests.server.running import Running, events_of, running, wait_until
from tests.server.test_clients_that_go_away import open_request, slam, states


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        piece = connection.recv(1 << 16)
        assert piece, "the stream is broken off"
        received += piece
    return received


def test_a_stream_whose_request_has_given_way_shows_signs_of_life_and_goes_on() -> None:
    with running(max_num_seqs=1, num_kv_blocks=300, step_s=0.002, limits={"keep_alive_s": 0.05}) as server:
        # Long enough that it is still under way when the urgent one comes, also on a busy machine.
        body: dict[str, Any] = {"prompt": [1], "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        expected = server.post("/v1/completions", body).json()["choices"][0]["text"]
        background = open_request(server, {**body, "priority": 9, "stream": True})
        wait_until(lambda: RequestState.RUNNING in states(server), "it is not served")
        urgent = server.post("/v1/completions", {"prompt": [2], "max_tokens": 300, "priority": 0, "ignore_eos": True})
        assert urgent.status_code == 200
        received = read_all(background).decode()
        background.close()
        assert ": keep-alive" in received
        events = [
            json.loads(part[6:]) for part in received.replace("\r\n", "\n").split("\n") if part.startswith("data: {")
        ]
        assert "".join(event["choices"][0]["text"] for event in events) == expected


def test_a_stream_has_whole_characters_only(tiny: Running) -> None:
    # Goal: a character of several tokens comes as a whole, in one chunk.
    text = "\u4e16\u754c"
    biased = {str(byte): -100 for byte in range(256) if byte not in text.encode()}
    body = {"prompt": text, "max_tokens": 40, "logit_bias": biased, "seed": 3, "stream": True, "ignore_eos": True}
    pieces = [event["choices"][0]["text"] for event in events_of(tiny.post("/v1/completions", body))]
    whole = tiny.post("/v1/completions", {**body, "stream": False}).json()["choices"][0]["text"]
    assert "".join(pieces) == whole
    # Bytes that are no character at all are U+FFFD in both; a good character is never cut in two.
    assert whole.count("\ufffd") == "".join(pieces).count("\ufffd")


def test_a_reader_who_is_too_slow_makes_his_request_give_way_and_gets_every_token_in_the_end() -> None:
    wish: dict[str, Any] = {"prompt": [1], "max_tokens": 600, "temperature": 0, "ignore_eos": True, "logprobs": 20}
    with running(num_kv_blocks=300, limits={"max_unread": 100}, send_buffer_bytes=1 << 14) as server:
        expected = server.post("/v1/completions", wish).json()["choices"][0]
        host, port = server.url.removeprefix("http://").split(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        content = json.dumps({**wish, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        wait_until(lambda: server.engine.scheduler.state.held, "nobody is held")
        wait_until(lambda: not server.engine.has_work, "the engine spins over a request that is held")
        assert set(states(server)) <= NEWCOMER_STATES
        assert server.engine.scheduler.state.kv.device.num_owned == 0, "it keeps room on the device"
        other = server.post("/v1/completions", {"prompt": [9], "max_tokens": 5})  # others are served meanwhile
        assert other.status_code == 200
        received = read_all(connection).decode()
        connection.close()
        text, scores = "", list[float]()
        for part in received.split("\r\n"):
            if part.startswith("data: {"):
                for line in part.split("\n\n"):
                    if line.startswith("data: {"):
                        choice = json.loads(line[6:])["choices"][0]
                        text += choice["text"]
                        scores += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
        assert text == expected["text"]
        assert scores == expected["logprobs"]["token_logprobs"]
        server.until_idle()


def test_a_slow_reader_who_leaves_while_he_is_held_frees_everything() -> None:
    with running(num_kv_blocks=300, limits={"max_unread": 4}, send_buffer_bytes=1 << 14) as server:
        body = {"prompt": [1], "max_tokens": 4000, "stream": True, "ignore_eos": True, "logprobs": 20}
        connection = open_request(server, body)
        wait_until(lambda: server.engine.scheduler.state.held, "nobody is held")
        slam(connection)
        server.until_idle()
        assert not server.engine.scheduler.state.held


def test_an_error_in_the_middle_of_a_stream_is_told_in_the_stream(dry: Running) -> None:
    with running(step_s=0.005) as server:
        connection = open_request(server, {"prompt": [1], "max_tokens": 3000, "stream": True})
        wait_until(lambda: RequestState.RUNNING in states(server), "it is not served")
        time.sleep(0.05)
        for name in list(server.engine.scheduler.requests):
            server.engine.abort(name)
        received = read_all(connection).decode()
        connection.close()
        assert '"code":"shutting_down"' in received
        assert received.rstrip().endswith("0")
        assert "data: [DONE]" in received
