"""What clients send by mistake or on purpose: each gets a clear answer, and the next request is served."""

from __future__ import annotations

import itertools
import json
import socket
import urllib.error
import urllib.request
from typing import Any

import httpx2 as httpx
import pytest

from tests.server.running import Running, events_of, running

CHAT: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
PLAIN: Any = {"prompt": "hi", "max_tokens": 3}


def error_of(response: Any) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def still_works(server: Running) -> None:
    assert server.post("/v1/completions", PLAIN).status_code == 200


@pytest.mark.parametrize(
    ("max_tokens", "echo", "logprobs", "stream"),
    list(itertools.product([0, 1, None, -1, "absent"], [False, True], [None, 0, 1], [False, True])),
)
def test_an_unusual_number_of_tokens_is_kept_to_or_refused(
    tiny: Running, max_tokens: Any, echo: bool, logprobs: int | None, stream: bool
) -> None:
    # Goal: 0 gives the prompt alone, or is refused; 1 gives exactly one; no token of our own leaks out.
    body: dict[str, Any] = {"prompt": "hello", "echo": echo, "stream": stream, "temperature": 0, "ignore_eos": True}
    if max_tokens != "absent":
        body["max_tokens"] = max_tokens
    if logprobs is not None:
        body["logprobs"] = logprobs
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = tiny.post("/v1/completions", body)
    if max_tokens == -1 or (max_tokens == 0 and not echo):
        assert response.status_code == 400
        assert error_of(response)["param"] == "max_tokens"
        return
    assert response.status_code == 200
    expected = 16 if max_tokens in (None, "absent") else max_tokens
    if stream:
        events = events_of(response)
        choices = [event["choices"][0] for event in events if event["choices"]]
        text = "".join(choice["text"] for choice in choices)
        scored = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        usage = events[-1]["usage"]
    else:
        (choice,) = response.json()["choices"]
        text, usage, reasons = choice["text"], response.json()["usage"], [choice["finish_reason"]]
        scored = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
    assert reasons == ["length"]
    assert usage["completion_tokens"] == expected
    assert usage["prompt_tokens"] == 5
    assert text.startswith("hello") == echo
    if expected == 0:
        assert text == "hello"
    if logprobs is not None:
        assert len(scored) == expected + (5 if echo else 0)


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["fine", ""], [[1, 2], []]], ids=repr)
def test_an_empty_prompt_is_refused_and_harms_nobody(dry: Running, prompt: Any) -> None:
    response = dry.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})
    assert response.status_code == 400
    error_of(response)
    still_works(dry)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": 3.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"priority": "high"}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"top_k": -2}, "top_k"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"model": 5}, "model"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"best_of": 3}, "best_of"),
    ],
    ids=repr,
)
def test_a_known_field_of_a_wrong_kind_is_a_400_that_names_it(dry: Running, change: dict[str, Any], param: str) -> None:
    response = dry.post("/v1/completions", PLAIN | change)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"] or "").split(".")[0] == param
    assert error["type"] == "invalid_request_error"
    still_works(dry)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages.0.content"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages.0",
        ),
    ],
    ids=repr,
)
def test_a_wrong_message_is_a_400_that_names_its_place(dry: Running, messages: Any, param: str) -> None:
    response = dry.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    assert response.status_code == 400
    assert str(error_of(response)["param"]).startswith(param)
    still_works(dry)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"functions": []}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
    ids=repr,
)
def test_a_wrong_field_of_a_chat_request_is_named_as_the_client_spelled_it(
    dry: Running, change: dict[str, Any], param: str
) -> None:
    response = dry.post("/v1/chat/completions", {"messages": CHAT["messages"], **change})
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def test_an_unknown_field_is_ignored_and_the_client_is_told(dry: Running) -> None:
    response = dry.post("/v1/completions", PLAIN | {"frobnicate": 1, "stream_opts": {}, "gr\u00fc\u00dfe\n": 2})
    assert response.status_code == 200
    warning = response.headers["X-GiveWay-Warning"]
    assert "frobnicate" in warning
    assert "stream_opts" in warning
    assert "\n" not in warning
    nested = CHAT | {"messages": [{"role": "user", "content": "hi", "mood": "good"}]}
    assert "messages.0.mood" in dry.post("/v1/chat/completions", nested).headers["X-GiveWay-Warning"]
    assert "X-GiveWay-Warning" not in dry.post("/v1/completions", PLAIN).headers


BROKEN_BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"5",
    b'{"prompt": "a", "max_tokens": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "\\ud800", "max_tokens": 2}',
    b'{"model": "\\ud800", "prompt": "a"}',
    b'{"prompt": "a", "stop": "\\udfff", "max_tokens": -5}',
    b'{"prompt": "a", "\\ud83d": 1, "max_tokens": "x"}',
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": ' + b"[" * 100_000,
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"metadata": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b', "prompt": "a"}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5_000 + b"}",
    b'{"prompt": "a", "max_tokens": ' + b"9" * 30 + b"}",
    b'{"prompt": "a", "seed": 18446744073709551616}',
    b'{"prompt": [18446744073709551616]}',
    b'{"prompt": [-1]}',
    b'{"prompt": "a", "logit_bias": {"99999999999999999999999": 1}}',
    b'{"prompt": "a", "stop_token_ids": [99999999999999999999]}',
    b'{"prompt": "a", "prompt": 5}',
]


@pytest.mark.parametrize("body", BROKEN_BODIES, ids=lambda body: repr(body[:40]))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_broken_body_is_a_client_error_in_openais_shape(dry: Running, path: str, body: bytes) -> None:
    response = dry.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400, 404) if path == "/tokenize" else (400, 404), response.text
    if response.status_code != 200:  # fields of other endpoints are unknown to this one
        error_of(response)
    still_works(dry)


def test_a_body_that_is_not_json_is_told_so(dry: Running) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/octet-stream"):
        response = dry.post("/v1/completions", content=json.dumps(PLAIN).encode(), headers={"Content-Type": kind})
        assert response.status_code == 415, kind
        assert "application/json" in error_of(response)["message"]


def test_an_unknown_address_and_a_wrong_method_have_openais_shape_too(dry: Running) -> None:
    assert dry.get("/v1/nothing").status_code == 404
    assert error_of(dry.get("/v1/nothing"))["code"] == "unknown_url"
    assert dry.get("/v1/completions").status_code == 405
    error_of(dry.get("/v1/completions"))


def test_a_prompt_larger_than_everything_is_refused_with_the_numbers_and_the_next_one_is_served(dry: Running) -> None:
    # Goal: what can never fit must not wait for ever in front of everybody.
    limit = dry.built.scheduler_config.max_model_len
    response = dry.post("/v1/completions", {"prompt": [1] * limit, "max_tokens": 1})
    assert response.status_code == 400
    assert str(limit) in error_of(response)["message"]
    assert dry.post("/v1/completions", {"prompt": [1] * (limit - 1), "max_tokens": 1}).status_code == 200
    response = dry.post("/v1/completions", {"prompt": [1] * 10, "max_tokens": limit})
    assert response.status_code == 400
    assert str(limit - 10) in error_of(response)["message"]
    still_works(dry)


def test_too_many_prompts_in_one_request_are_refused() -> None:
    with running(limits={"max_prompts": 3}) as server:
        assert server.post("/v1/completions", {"prompt": ["a"] * 4}).status_code == 400
        assert server.post("/v1/completions", {"prompt": ["a"] * 3}).status_code == 200


def raw(server: Running, content: bytes, *, finish: bool = False) -> bytes:
    """Send bytes as they are; return what comes back until the connection is closed."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(content)
        if finish:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        return received


def test_a_client_that_sends_all_of_a_body_that_is_too_large_before_it_listens_gets_the_answer() -> None:
    # Goal: a connection that is closed on a client that is still sending takes the answer away with it.
    body = b'{"prompt": "' + b"a" * 6_000_000 + b'"}'
    with running(limits={"max_body_bytes": 1000}) as server:
        for _ in range(5):
            request = urllib.request.Request(f"{server.url}/v1/completions", data=body, method="POST")
            request.add_header("Content-Type", "application/json")
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request, timeout=60)
            assert caught.value.code == 413
            caught.value.close()
        still_works(server)


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("guided_json", {"type": "object"}, "use structured_outputs.json"),
        ("guided_choice", ["a"], "use structured_outputs.choice"),
        ("allowed_token_ids", [1, 2], "is not supported"),
        ("continue_final_message", True, "is not supported"),
    ],
)
def test_a_field_of_other_servers_that_would_change_the_answer_is_not_passed_over(
    tiny: Running, field: str, value: Any, hint: str
) -> None:
    for path, body in (("/v1/completions", PLAIN), ("/v1/chat/completions", CHAT)):
        error = error_of(tiny.post(path, {**body, field: value}))
        assert error["param"] == field
        assert hint in error["message"]
        assert tiny.post(path, {**body, field: None}).status_code == 200


def test_a_request_can_be_named_in_its_body(tiny: Running) -> None:
    assert tiny.post("/v1/completions", {**PLAIN, "request_id": "my-own.name:1"}).status_code == 200
    assert tiny.get("/v1/requests/my-own.name:1").json()["alias"] == "my-own.name:1"
    for wrong in ("", "a b", "a/b", "x" * 129):
        error = error_of(tiny.post("/v1/completions", {**PLAIN, "request_id": wrong}))
        assert error["param"] == "request_id"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [10_000_000]}, "stop_token_ids"),
        ({"logit_bias": {"10000000": 1.0}}, "logit_bias"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"prompt": [10_000_000]}, "prompt"),
    ],
)
def test_what_the_engine_refuses_names_the_field_and_no_request_that_the_client_never_saw(
    tiny: Running, fields: dict[str, Any], param: str
) -> None:
    error = error_of(tiny.post("/v1/completions", {**PLAIN, **fields}))
    assert error["param"] == param
    assert "cmpl-" not in error["message"]


def test_a_body_over_the_limit_is_refused_also_without_a_length() -> None:
    with running(limits={"max_body_bytes": 1000}) as server:
        assert server.post("/v1/completions", {"prompt": "a" * 2000}).status_code == 413
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        said = raw(server, head + b"Content-Length: 99999999999\r\nConnection: close\r\n\r\n{")
        assert said.startswith(b"HTTP/1.1 413")
        chunk = b"400\r\n" + b" " * 0x400 + b"\r\n"
        said = raw(server, head + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + 3 * chunk + b"0\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 413")
        still_works(server)


def test_a_body_that_does_not_come_is_given_up() -> None:
    with running(limits={"body_timeout_s": 0.2}) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        said = raw(server, head + b"Content-Length: 50\r\nConnection: close\r\n\r\n{")
        assert said.startswith(b"HTTP/1.1 408")
        still_works(server)


def test_a_request_that_takes_longer_than_it_may_is_ended_and_frees_everything() -> None:
    with running(limits={"request_timeout_s": 0.3}, step_s=0.01) as server:
        response = server.post("/v1/completions", {"prompt": "a", "max_tokens": 4000})
        assert response.status_code == 504
        assert error_of(response)["code"] == "timeout"
        streamed = server.post("/v1/completions", {"prompt": "a", "max_tokens": 4000, "stream": True})
        assert streamed.status_code == 200
        assert events_of(streamed)[-1]["error"]["code"] == "timeout"
        server.until_idle()


def test_a_request_has_the_name_that_its_client_gave_it_if_that_is_harmless(dry: Running) -> None:
    named = dry.post("/v1/completions", PLAIN, headers={"X-Request-Id": "my-request_7"})
    assert named.headers["X-Request-Id"] == "my-request_7"
    for wrong in ("a" * 200, "a b", "<script>", "a\tb"):
        made = dry.post("/v1/completions", PLAIN, headers={"X-Request-Id": wrong}).headers["X-Request-Id"]
        assert made != wrong
        assert len(made) == 32
    assert len(dry.get("/nothing").headers["X-Request-Id"]) == 32


def test_a_head_that_is_too_large_is_refused_and_the_connection_closed(dry: Running) -> None:
    lines = b"".join(b"X-Header-%d: %s\r\n" % (number, b"a" * 1000) for number in range(200))
    try:
        said = raw(dry, b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n" + lines + b"\r\n")
    except ConnectionError:  # the rest of the head was never read, so the answer may be lost with the connection
        said = b""
    assert said.startswith(b"HTTP/1.1 400") or not said
    still_works(dry)


def test_a_text_that_cannot_fit_is_refused_before_its_tokens_are_counted(dry: Running) -> None:
    # Goal: minutes of tokenizing are not to be had for one request.
    text = "word " * 200_000
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        response = dry.post(path, body)
        assert response.status_code == 400
        assert error_of(response)["code"] == "context_length_exceeded"
        assert error_of(response)["param"] in body
        assert "at least" in error_of(response)["message"]


def test_health_answers_head_too_and_an_address_with_a_slash_at_its_end_is_unknown(dry: Running) -> None:
    assert httpx.head(f"{dry.url}/health").status_code == 200
    assert dry.get("/v1/models/").status_code == 404
