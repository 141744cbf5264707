"""Wishes of a request: what is out of range is refused by name, value and range."""

from __future__ import annotations

from typing import Any

import pytest

from giveway.core.errors import InvalidRequestError
from giveway.core.sampling import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_REGEX_BYTES,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SamplingParams,
    StructuredOutput,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", (0, -1, 1.5, True, "3")),
        ("temperature", (-0.1, 100.5, NAN, INF, "warm", False)),
        ("top_p", (0.0, 1.1, -1.0, NAN)),
        ("n", (0, -1, MAX_N + 1, 1.5, True, "2")),
        ("top_k", (-2, 1.0)),
        ("min_p", (-0.1, 1.1, NAN)),
        ("seed", (-(2**63) - 1, 2**64, 0.5)),
        ("repetition_penalty", (0.0, -1.0, 101.0)),
        ("presence_penalty", (-2.1, 2.1)),
        ("frequency_penalty", (-2.1, 2.1, NAN)),
        ("min_tokens", (-1, 0.5)),
        ("logprobs", (-1, MAX_LOGPROBS + 1, True)),
        ("prompt_logprobs", (-1, MAX_LOGPROBS + 1)),
        (
            "stop",
            (
                "x" * (MAX_STOP_STRING_CHARS + 1),
                "",
                ("a", ""),
                ("a", 3),
                tuple("x" for _ in range(MAX_STOP_STRINGS + 1)),
            ),
        ),
        ("bad_words", (("",), tuple("x" for _ in range(MAX_BAD_WORDS + 1)))),
        ("stop_token_ids", ((-1,), ("7",), tuple(range(MAX_STOP_TOKENS + 1)))),
        ("logit_bias", ({5: 101.0}, {-1: 0.0}, {5: NAN}, dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0))),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError, match=field):
            SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", (None, 1, 10**9)),
        ("temperature", (None, 0, 0.0, 100)),
        ("top_p", (None, 0.01, 1)),
        ("n", (None, 1, MAX_N)),
        ("top_k", (-1, 0, 1)),
        ("min_p", (0, 1)),
        ("seed", (None, -(2**63), 2**64 - 1)),
        ("repetition_penalty", (0.01, 100)),
        ("presence_penalty", (-2, 2)),
        ("logprobs", (None, 0, MAX_LOGPROBS)),
        ("stop", ((), "a", ["a", "b"])),
        ("logit_bias", ({}, {5: -100.0, 6: 100})),
    ],
)
def test_the_ends_of_every_range_are_allowed(field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        SamplingParams(**{field: value})


def test_more_tokens_asked_for_at_least_than_at_most_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens is 5, above max_tokens 4"):
        SamplingParams(max_tokens=4, min_tokens=5)
    assert SamplingParams(min_tokens=5).max_tokens is None


def test_what_the_caller_keeps_cannot_change_the_wishes_later() -> None:
    # Goal: the value can be shared freely between threads and steps.
    stop, bias = ["a"], {3: 1.0}
    params = SamplingParams(stop=stop, logit_bias=bias)  # type: ignore[arg-type]
    stop.append("b")
    bias[4] = 1.0
    assert params.stop == ("a",)
    assert dict(params.logit_bias) == {3: 1.0}
    with pytest.raises(TypeError):
        params.logit_bias[5] = 1.0  # type: ignore[index]
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]


def test_the_form_of_a_text_is_one_of_five() -> None:
    assert StructuredOutput(json_object=True).json_schema is None
    assert (
        StructuredOutput(json_schema={"type": "string", "title": "é"}).json_schema == '{"type": "string", "title": "é"}'
    )
    assert StructuredOutput(json_schema='{"a": 1}') == StructuredOutput(json_schema={"a": 1})
    made: Any = ["a", "b"]
    assert StructuredOutput(choice=made).choice == ("a", "b")
    assert len({StructuredOutput(regex="a"), StructuredOutput(regex="a"), StructuredOutput(grammar="a")}) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of .* not none"),
        ({"json_object": True, "regex": "a"}, "not regex and json_object"),
        ({"json_object": 1}, "json_object must be true or false"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": "[1]"}, "json_schema must be a JSON object, not list"),
        ({"json_schema": '{"a": NaN}'}, "NaN is not a number"),
        ({"json_schema": {"a": NAN}}, "json_schema is not JSON"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema is not JSON"),
        ({"json_schema": {"a": "\ud800"}}, "lone surrogate"),
        ({"json_schema": "[" * 50_000}, "nested too deeply"),
        ({"json_schema": " " * (MAX_GRAMMAR_BYTES + 1)}, "json_schema has 65537 bytes; at most 65536"),
        ({"regex": "é" * MAX_REGEX_BYTES}, "regex has 32768 bytes; at most 16384"),
        ({"regex": 3}, "regex must be a text, not int"),
        ({"grammar": "x" * (MAX_GRAMMAR_BYTES + 1)}, "grammar has 65537 bytes"),
        ({"choice": ()}, "choice is empty"),
        ({"choice": "yes"}, "choice must be a list of texts, not str"),
        ({"choice": ("a", "")}, "choice must hold non-empty strings"),
        ({"choice": ("a", 3)}, "choice must hold non-empty strings"),
        ({"choice": ("a",) * (MAX_CHOICES + 1)}, "choice has 4097 entries"),
        ({"choice": ("a" * MAX_GRAMMAR_BYTES, "b")}, "choice has 65537 bytes"),
    ],
)
def test_a_wrong_form_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StructuredOutput(**fields)


def test_a_form_must_be_a_structured_output() -> None:
    wrong: Any = {"json_object": True}
    with pytest.raises(InvalidRequestError, match="structured_output must be a StructuredOutput, not dict"):
        SamplingParams(structured_output=wrong)
