"""What the JSON of an answer says, of whatever server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from giveway.bench.serve.answer_parts import MAX_DETAIL_CHARACTERS, AnswerPart, UnreadableAnswerError, Usage, read_part


def part(content: Any, *, is_error: bool = False) -> AnswerPart:
    return read_part(json.dumps(content), is_error=is_error)


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": None, **fields}]}


@pytest.mark.parametrize(
    ("content", "num_tokens"),
    [
        (choice(text="a"), 1),
        (choice(text="several words at once"), 1),
        (choice(text=""), 1),  # a token without text of its own, such as half a character
        (choice(text="", finish_reason="length"), 0),
        (choice(text="a", finish_reason="length"), 1),
        (choice(text="ab", token_ids=[5, 6, 7]), 3),
        (choice(text=None), 0),
        (choice(delta={"role": "assistant", "content": ""}), 0),
        (choice(delta={"role": "assistant", "content": None}), 0),
        (choice(delta={"role": "assistant", "content": "a"}), 1),
        (choice(delta={"content": "a"}), 1),
        (choice(delta={"content": ""}), 1),
        (choice(delta={"content": ""}, finish_reason="stop"), 0),
        (choice(delta={}, finish_reason="stop"), 0),
        (choice(delta={"reasoning_content": "hm"}), 1),
        (choice(delta={"reasoning": "hm"}), 1),
        (choice(delta={"tool_calls": [{"index": 0}]}), 1),
        (choice(delta=7), 0),
        ({"choices": []}, 0),
        ({"choices": [None, 3]}, 0),
        ({}, 0),
    ],
)
def test_tokens_are_seen_where_the_protocol_puts_them(content: Any, num_tokens: int) -> None:
    assert part(content).num_tokens == num_tokens


def test_usage_counts_wherever_it_stands_and_only_if_it_is_a_count() -> None:
    assert part({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}}).usage == Usage(7, 9)
    assert part(choice(text="a") | {"usage": None}).usage is None
    odd = {"prompt_tokens": True, "completion_tokens": -1}
    assert part({"usage": odd}).usage == Usage(None, None)
    assert part({"usage": {"prompt_tokens": 1.5, "completion_tokens": 10**30}}).usage == Usage(None, None)


def test_a_finish_reason_is_the_end() -> None:
    assert part(choice(text="", finish_reason="stop")).is_end
    assert not part(choice(text="")).is_end


@pytest.mark.parametrize(
    ("content", "is_error", "message"),
    [
        ({"error": {"message": "out of memory", "code": 500}}, False, "out of memory"),
        ({"error": "plain"}, False, "plain"),
        ({"error": {"code": 3}}, False, '{"code": 3}'),
        ({"object": "error", "message": "old form"}, False, "old form"),
        ({"message": "named by its event"}, True, "named by its event"),
    ],
)
def test_errors_are_found_in_every_form(content: Any, is_error: bool, message: str) -> None:
    assert part(content, is_error=is_error).error == message


def test_an_error_event_that_is_no_json_is_an_error_all_the_same() -> None:
    assert read_part("boom", is_error=True).error == "boom"


@pytest.mark.parametrize(
    "text", ["", "nonsense", "{", "[1, 2]", "3", '{"choices": 5}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}", b"\xff"]
)
def test_what_is_no_answer_is_refused(text: str | bytes) -> None:
    with pytest.raises(UnreadableAnswerError):
        read_part(text)


def test_a_servers_message_is_cut_and_cannot_steer_the_terminal() -> None:
    message = part({"error": {"message": "\x1b[31mred\x07\nnext " + "x" * 5000}}).error
    assert message is not None
    assert message.startswith("[31mred next xxx")
    assert len(message) == MAX_DETAIL_CHARACTERS
