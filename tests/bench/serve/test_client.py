"""One request over a real connection: known delays are found, and every way to fail has its name."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from giveway.bench.serve.bodies import BodyMaker, Wishes
from giveway.bench.serve.client import Target, check_headers, connect, first_model, wait_until_ready
from giveway.bench.serve.driver import Driver
from giveway.bench.serve.records import Outcome, RequestRecord
from giveway.bench.serve.workload import PlannedRequest
from giveway.core.errors import TargetServerError
from tests.bench.serve.fake_server import MODEL, FakeServer, Script

NO_HEADERS: dict[str, str] = {}


def request(*, output: int = 4, is_chat: bool = False, is_streamed: bool = True) -> PlannedRequest:
    maker = BodyMaker(MODEL, is_chat=is_chat, ignores_eos=True)
    body = maker.make("one two three" if is_chat else [1, 2, 3], Wishes(output, is_streamed=is_streamed))
    return PlannedRequest("a", "name-7", None, 3, output, is_streamed, body)


def ask(
    url: str, *requests: PlannedRequest, silence_s: float = 60.0, endpoint: str = "/v1/completions"
) -> list[RequestRecord]:
    """Send requests one after another."""

    async def work() -> list[RequestRecord]:
        target = Target(url, endpoint, NO_HEADERS, silence_s=silence_s)
        async with connect(target, time.perf_counter) as client:
            return await Driver(client, time.perf_counter).warm_up(iter(requests))

    return asyncio.run(work())


def answer(script: Script, asked: PlannedRequest | None = None, *, silence_s: float = 60.0) -> RequestRecord:
    with FakeServer(lambda number, body: script) as server:
        (record,) = ask(server.url, asked or request(), silence_s=silence_s)
        return record


@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
def test_known_delays_are_found_and_never_made_shorter(is_chat: bool) -> None:
    # Goal: 50 ms to the first token and 10 ms between two. A busy machine makes them longer, nothing makes them shorter
    # (but for the clocks of two threads, which wake up a little early).
    endpoint = "/v1/chat/completions" if is_chat else "/v1/completions"
    with FakeServer(lambda number, body: Script(first_s=0.05, gap_s=0.01)) as server:
        (record,) = ask(server.url, request(output=12, is_chat=is_chat), endpoint=endpoint)
    assert record.outcome is Outcome.COMPLETED
    assert record.ttft_s is not None
    assert record.tpot_s is not None
    assert record.ttft_s >= 0.049
    assert record.e2e_s >= record.ttft_s + 11 * record.tpot_s - 1e-6 >= 0.049 + 11 * 0.009
    assert len(record.token_times_s) == 12
    assert sum(record.itls_s) == pytest.approx(11 * record.tpot_s)
    assert list(record.token_times_s) == sorted(record.token_times_s)
    assert (record.num_prompt_tokens, record.num_output_tokens, record.usage_output_tokens) == (3, 12, 12)


def test_several_tokens_an_event_are_counted_by_usage() -> None:
    record = answer(Script(tokens_per_event=5), request(output=20))
    assert (len(record.token_times_s), record.num_seen_tokens, record.num_output_tokens) == (4, 4, 20)


def test_a_server_without_usage_or_done_is_understood() -> None:
    record = answer(Script(has_usage=False, has_done=False))
    assert record.outcome is Outcome.COMPLETED
    assert (record.usage_output_tokens, record.num_output_tokens) == (None, 4)


@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
def test_an_answer_in_one_piece_has_its_first_token_at_its_end(is_chat: bool) -> None:
    record = answer(Script(first_s=0.02), request(output=6, is_chat=is_chat, is_streamed=False))
    assert record.outcome is Outcome.COMPLETED
    assert record.ttft_s == record.e2e_s
    assert record.e2e_s >= 0.019
    assert (record.tpot_s, record.num_output_tokens) == (None, 6)


def test_the_request_says_who_it_is() -> None:
    with FakeServer() as server:
        ask(server.url, request())
        assert server.seen[0].headers["x-request-id"] == "name-7"
        assert server.seen[0].headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("script", "failure", "detail"),
    [
        (Script(status=503), "http 503", "no 503 today"),
        (Script(status=400), "http 400", "no 400 today"),
        (Script(breaks_after=2), "broken stream", ""),
        (Script(has_done=False, has_finish_reason=False), "broken stream", "ended without a finish reason"),
        (Script(error_after=2), "error in the stream", "the model fell over"),
        (Script(error_after=0), "error in the stream", "the model fell over"),
        (Script(num_tokens=0), "empty answer", "without a token"),
        (Script(raw=(b"data: {nonsense\n\n",)), "broken stream", "not JSON: {nonsense"),
        (Script(raw=(b"\x00\xff" * 1000,)), "broken stream", "without a finish reason"),
        (Script(raw=(b"<html>wrong door</html>",)), "broken stream", "without a finish reason"),
        (Script(raw=(b"event: error\ndata: boom\n\n",)), "error in the stream", "boom"),
        (Script(raw=(b'data: {"choices": 3}\n\n',)), "broken stream", "choices is no list"),
        (Script(raw=()), "broken stream", "without a finish reason"),
    ],
)
def test_every_way_to_fail_has_its_name_and_a_detail(script: Script, failure: str, detail: str) -> None:
    record = answer(script)
    assert (record.outcome, record.failure) == (Outcome.FAILED, failure)
    assert detail in record.detail


def test_events_in_odd_but_legal_form_are_understood() -> None:
    # Goal: comments, carriage returns, data over two lines, pieces cut anywhere, and text behind [DONE].
    first = b': ping\r\n\r\ndata: {"choices":\r\ndata: [{"text": "a", "finish_reason": null}]}\r\n\r\n'
    second = b'data:{"choices":[{"text":"b","finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
    whole = first + second + b"\n\ndata: [DONE]\n\ndata: {nonsense\n\n"
    for size in (1, 7, 50):
        pieces = tuple(whole[begin : begin + size] for begin in range(0, len(whole), size))
        record = answer(Script(raw=pieces))
        assert (record.outcome, record.num_output_tokens, record.num_seen_tokens) == (Outcome.COMPLETED, 2, 2)


def test_a_server_that_falls_silent_has_failed_after_the_time_allowed() -> None:
    record = answer(Script(hangs=True), silence_s=0.2)
    assert record.failure == "timeout"
    assert record.detail == "nothing came for 0.2 s"
    assert record.num_output_tokens == 1


@pytest.fixture
def closed_port() -> Iterator[str]:
    """An address at which nobody listens, and which nobody else gets meanwhile."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{reserved.getsockname()[1]}"


def test_nobody_there_is_a_connection_error(closed_port: str) -> None:
    (record,) = ask(closed_port, request())
    assert (record.outcome, record.failure) == (Outcome.FAILED, "connection")


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.mark.parametrize(
    ("sent", "failure"),
    [
        (b"", "connection"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "broken stream"),
        (b"HTTP/1.1 200 OK\r\nbroken header\r\n\r\n", "broken stream"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n", "broken stream"),
        (HEAD + b"Content-Length: 500\r\n\r\ndata: {}\n\n", "broken stream"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nnonsense", "broken stream"),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 8\r\n\r\nnot gzip", "broken stream"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n", "http 302"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "http 204"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 3\r\n\r\n[1]", "broken stream"),
    ],
)
def test_bytes_that_are_no_answer_fail_one_request_and_nothing_else(sent: bytes, failure: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer_once() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(sent)

        thread = threading.Thread(target=answer_once)
        thread.start()
        (record,) = ask(f"http://127.0.0.1:{listening.getsockname()[1]}", request())
        thread.join()
    assert (record.outcome, record.failure) == (Outcome.FAILED, failure)


def test_a_failed_request_harms_no_other_of_the_same_client() -> None:
    scripts = [Script(breaks_after=1), Script(status=500), Script(error_after=1), Script()]
    with FakeServer(lambda number, body: scripts[number]) as server:
        records = ask(server.url, *[request()] * 4)
    assert [record.outcome is Outcome.COMPLETED for record in records] == [False, False, False, True]


# Before the run


def target(url: str) -> Target:
    return Target(url, "/v1/completions", NO_HEADERS)


def test_a_server_that_starts_slowly_is_waited_for() -> None:
    with FakeServer(ready_after=2) as server:
        asyncio.run(wait_until_ready(target(server.url), timeout_s=60, now_s=time.perf_counter))
        assert server.num_probes == 3
        assert asyncio.run(first_model(target(server.url + "/v1"))) == MODEL


def test_a_server_that_never_comes_is_given_up(closed_port: str) -> None:
    moments = iter([0.0, 100.0])
    with pytest.raises(TargetServerError, match=r"is not ready after 5 s: .* --ready-check-timeout-sec"):
        asyncio.run(wait_until_ready(target(closed_port), timeout_s=5, now_s=lambda: next(moments)))
    with pytest.raises(TargetServerError, match="Name the model with --model"):
        asyncio.run(first_model(target(closed_port)))


def test_a_server_that_lists_no_model_is_told() -> None:
    with FakeServer(ready_after=99) as server, pytest.raises(TargetServerError, match=r"status 503: .*--model"):
        asyncio.run(first_model(target(server.url)))


def test_a_base_that_ends_in_v1_is_not_doubled() -> None:
    assert target("http://x:1/v1").url("/v1/models") == "http://x:1/v1/models"
    assert target("http://x:1/").url("/v1/models") == "http://x:1/v1/models"
    assert target("http://x:1/v1").url("/health") == "http://x:1/v1/health"


def test_a_header_that_http_cannot_carry_is_refused_without_showing_its_value() -> None:
    check_headers({"Authorization": "Bearer x y"})
    with pytest.raises(ValueError, match="header name 'a b'"):
        check_headers({"a b": "1"})
    with pytest.raises(ValueError, match="a character that cannot be sent") as caught:
        check_headers({"Authorization": "secret\r\nHost: other"})
    assert "secret" not in str(caught.value)


def test_bodies_arrive_as_json() -> None:
    with FakeServer() as server:
        ask(server.url, request(output=2))
        assert server.bodies == [json.loads(request(output=2).body)]
