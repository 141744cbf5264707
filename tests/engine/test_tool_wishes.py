"""`tools`, `tool_choice` and `response_format` as they come from a stranger."""

from __future__ import annotations

from typing import Any

import pytest

from giveway.core.errors import InvalidRequestError
from giveway.core.sampling import MAX_GRAMMAR_BYTES, StructuredOutput
from giveway.engine.response_format import parse_response_format
from giveway.engine.tool_calls import Tool, ToolFormat, check_tools, constraint_for_tools, special_marker_of
from giveway.engine.tool_calls.wishes import MAX_TOOLS
from giveway.runtime.tokenizer.byte_tokenizer import ByteTokenizer


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_tools_are_read() -> None:
    tools = check_tools(
        [function(name="get-weather_1", description="Weather.", parameters=SCHEMA, strict=True), function()]
    )
    assert tools[0] == Tool("get-weather_1", "Weather.", SCHEMA)
    assert tools[1].parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert check_tools(None) == check_tools([]) == ()


WRONG_TOOLS: list[tuple[Any, str]] = [
    ("x", "tools must be a list"),
    ({}, "tools must be a list"),
    ([1], "tools.0 must be an object"),
    ([{"type": "web"}], "tools.0.type is 'web'"),
    ([{"type": "function"}], "tools.0.function must be an object"),
    ([function(), function(name="a b")], "tools.1.function.name is 'a b'"),
    ([function(name="a" * 65)], "tools.0.function.name"),
    ([function(name="f\n")], "tools.0.function.name"),
    ([function(name="é")], "tools.0.function.name"),
    ([function(name=3)], "tools.0.function.name"),
    ([function(), function()], "tools.1.function.name is 'f', which another tool has"),
    ([function(description=3)], "tools.0.function.description"),
    ([function(parameters="{}")], "tools.0.function.parameters"),
    ([function(strict="yes")], "tools.0.function.strict"),
    ([function(name=f"f{i}") for i in range(MAX_TOOLS + 1)], "tools has 129 entries; at most 128"),
]


@pytest.mark.parametrize(("value", "message"), WRONG_TOOLS)
def test_wrong_tools_are_refused_with_the_name_of_the_field(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message.replace(".", r"\.")):
        check_tools(value)


@pytest.mark.parametrize(
    ("choice", "is_named", "message"),
    [
        ("any", False, "tool_choice is 'any'; it must be"),
        ("g", True, r"tool_choice\.function\.name is 'g', which is none of the tools"),
    ],
)
def test_a_wrong_choice_is_refused(choice: str, is_named: bool, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        constraint_for_tools(ToolFormat.HERMES, [function()], choice, is_named=is_named)


def test_a_call_cannot_be_required_without_tools() -> None:
    with pytest.raises(InvalidRequestError, match="has no tools"):
        constraint_for_tools(ToolFormat.HERMES, None, "required")


def test_only_a_choice_that_forces_a_call_gives_a_grammar() -> None:
    # Goal: a function may be called "none".
    for choice in ("none", "auto"):
        assert constraint_for_tools(ToolFormat.HERMES, [function(name="none")], choice) is None
    assert constraint_for_tools(ToolFormat.HERMES, [function(name="none")], "none", is_named=True) is not None
    assert constraint_for_tools(ToolFormat.HERMES, [function()], "required") is not None


def test_schemas_that_are_too_long_together_are_refused() -> None:
    tools = [function(name=f"f{i}", parameters={"title": "x" * 2000}) for i in range(100)]
    with pytest.raises(InvalidRequestError, match=r"^tools: their schemas are too long"):
        constraint_for_tools(ToolFormat.HERMES, tools, "required")


def test_a_marker_that_is_no_control_token_is_ordinary_text() -> None:
    assert special_marker_of(ToolFormat.HERMES, ByteTokenizer()) is None


def test_response_formats_are_read() -> None:
    for value in (None, {"type": "text"}):
        assert parse_response_format(value) is None
    assert parse_response_format({"type": "json_object"}) == StructuredOutput(json_object=True)
    given = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    assert parse_response_format(given) == StructuredOutput(json_schema=SCHEMA)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("json_object", "response_format must be an object"),
        ({}, r"response_format\.type is 'None'"),
        ({"type": "xml"}, r"response_format\.type is 'xml'"),
        ({"type": "json_schema"}, r"response_format\.json_schema must be an object"),
        ({"type": "json_schema", "json_schema": {}}, r"response_format\.json_schema\.schema must be an object"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, r"response_format\.json_schema\.strict"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"title": "x" * MAX_GRAMMAR_BYTES}}},
            r"^response_format\.json_schema\.schema has 65\d\d\d bytes; at most 65536",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {"title": "\ud800"}}},
            r"^response_format\.json_schema\.schema has a lone surrogate",
        ),
    ],
)
def test_wrong_response_formats_are_refused_with_the_name_of_the_field(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse_response_format(value)
