"""JSON schemas that are refused before they are compiled, and those that are not."""

from __future__ import annotations

from typing import Any

import pytest

from giveway.core.errors import InvalidRequestError
from giveway.runtime.schema_check import MAX_JOINT_PATTERNS, MAX_PATTERN_PROPERTIES, check_schema

GOOD: list[dict[str, Any]] = [
    {},
    {"type": "object", "properties": {"properties": {"type": "string"}, "not": True}, "additionalProperties": False},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "x-order": 3, "items": {"enum": [1]}},
    {"$defs": {"a": {"pattern": "a"}}, "$ref": "#/$defs/a", "description": "d"},
    {"prefixItems": [{"minimum": 0.5}, {"const": {"not": 1}}], "default": {"if": 1}, "examples": [{"else": 1}]},
    {"properties": {f"p{i}": {"pattern": f"^{i}$"} for i in range(100)}},  # each for a value of its own
]


@pytest.mark.parametrize("schema", GOOD)
def test_a_schema_of_known_keywords_passes(schema: dict[str, Any]) -> None:
    check_schema(schema)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"requird": ["a"]}, r"at \$: the keyword 'requird' is not supported"),
    (
        {"properties": {"a": {"items": {"uniqueItems": True}}}},
        r"at \$\.properties\.a\.items: the keyword 'uniqueItems'",
    ),
    ({"anyOf": [{}, {"contentEncoding": "base64"}]}, r"at \$\.anyOf\.1: the keyword 'contentEncoding'"),
    ({"$defs": {"a": {"nullable": True}}}, r"at \$\.\$defs\.a: the keyword 'nullable'"),
    ({"x-guidance": {"lenient": True}}, "the keyword 'x-guidance'"),
    ({"minimum": 1, "exclusiveMinimum": True}, "exclusiveMinimum must be a number, not true or false"),
    ({"maxLength": "3"}, "maxLength must be a number, not a text"),
    ({"items": [{}]}, r"at \$\.items: an object, true or false is needed, not a list"),
    ({"properties": []}, "properties must be an object, not a list"),
    ({"allOf": {}}, "allOf must be a list, not an object"),
    ({"properties": {"a": None}}, r"at \$\.properties\.a: an object, true or false is needed, not null"),
]


@pytest.mark.parametrize(("schema", "message"), BAD)
def test_what_would_be_passed_over_in_silence_is_refused_with_its_place(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match="^response_format: JSON schema .*" + message):
        check_schema(schema)


def patterns(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"a{i}"} for i in range(count)]


@pytest.mark.parametrize(
    "joined",
    [
        lambda count: {"allOf": patterns(count)},
        lambda count: {"properties": {"a": {"anyOf": patterns(count - 1), "pattern": "b"}}},
        lambda count: {"$ref": "#/$defs/a", "format": "date", "$defs": {"a": {"anyOf": patterns(count - 1)}}},
        lambda count: {"allOf": [{"patternProperties": {f"^{i}": {} for i in range(count)}}]},
    ],
)
def test_many_patterns_that_hold_together_are_refused(joined: Any) -> None:
    # Goal: the time to compile them doubles with each; twenty would take hours.
    check_schema(joined(MAX_JOINT_PATTERNS))
    with pytest.raises(InvalidRequestError, match="9 different patterns and formats; at most 8"):
        check_schema(joined(MAX_JOINT_PATTERNS + 1))


def test_many_patterns_of_property_names_are_refused() -> None:
    check_schema({"patternProperties": {f"^{i}$": {} for i in range(MAX_PATTERN_PROPERTIES)}})
    with pytest.raises(InvalidRequestError, match="33 patternProperties; at most 32"):
        check_schema({"patternProperties": {f"^{i}$": {} for i in range(MAX_PATTERN_PROPERTIES + 1)}})
