"""What of a JSON schema is refused before it is compiled: keywords that would be passed over in silence, and excess.

The compiler refuses most of what it cannot keep by itself. It ignores unknown words, as the specification says, so a
misspelt keyword would restrict nothing; and the time that it takes for patterns that must hold together doubles with
each of them, whatever its limits are. Both are found here, in time proportional to the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from giveway.core.errors import InvalidRequestError

MAX_JOINT_PATTERNS = 8  # different ones, in a schema in which some must hold together; each more doubles the time
MAX_PATTERN_PROPERTIES = 32  # the compiler compares each with each

_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS_OF_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMAS = frozenset({"items", "additionalProperties"})
_LIMITS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"}
    | {"minItems", "maxItems", "minProperties", "maxProperties"}
)
_VALUES = frozenset({"type", "enum", "const", "pattern", "format", "required", "$ref"})
_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$schema", "$id", "$anchor", "$comment"}
)
_KNOWN = _MAPS_OF_SCHEMAS | _LISTS_OF_SCHEMAS | _SCHEMAS | _LIMITS | _VALUES | _NOTES
# Beside any other restriction of the same value, each of these makes patterns hold together.
_JOINING = frozenset({"$ref", "anyOf", "oneOf"})
_NO_RESTRICTION = _NOTES | {"$defs", "definitions"}


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for a schema that would not be kept word by word, or would take too long to compile."""
    patterns: set[str] = set()
    num_pattern_properties = 0
    is_joined = False
    for place, node in _schemas(schema):
        _check_words(place, node)
        patterns.update(value for name in ("pattern", "format") if isinstance(value := node.get(name), str))
        own = node.get("patternProperties", {})
        patterns.update(own)
        num_pattern_properties += len(own)
        restrictions = node.keys() - _NO_RESTRICTION
        is_joined = is_joined or "allOf" in node or (len(restrictions) > 1 and not _JOINING.isdisjoint(restrictions))
    if is_joined and len(patterns) > MAX_JOINT_PATTERNS:
        raise _refusal(
            f"the JSON schema has {len(patterns)} different patterns and formats; at most {MAX_JOINT_PATTERNS} are "
            "allowed in a schema with allOf, or with $ref, anyOf or oneOf beside other keywords"
        )
    if num_pattern_properties > MAX_PATTERN_PROPERTIES:
        raise _refusal(
            f"the JSON schema has {num_pattern_properties} patternProperties; at most {MAX_PATTERN_PROPERTIES}"
        )


def _schemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every schema inside a schema with its place, such as `$.properties.age`; the outer one before the inner."""
    waiting: list[tuple[str, Any]] = [("$", schema)]
    while waiting:
        place, node = waiting.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise _refusal(f"JSON schema at {place}: an object, true or false is needed, not {_kind(node)}")
        yield place, node
        for name in _MAPS_OF_SCHEMAS & node.keys():
            waiting += [(f"{place}.{name}.{key}", value) for key, value in _typed(node, place, name, dict).items()]
        for name in _LISTS_OF_SCHEMAS & node.keys():
            waiting += [(f"{place}.{name}.{i}", value) for i, value in enumerate(_typed(node, place, name, list))]
        waiting += [(f"{place}.{name}", node[name]) for name in _SCHEMAS & node.keys()]


def _check_words(place: str, node: Mapping[str, Any]) -> None:
    for name, value in node.items():
        if name not in _KNOWN and (name == "x-guidance" or not name.startswith("x-")):
            raise _refusal(f"JSON schema at {place}: the keyword {name[:60]!r} is not supported")
        if name in _LIMITS and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise _refusal(f"JSON schema at {place}: {name} must be a number, not {_kind(value)}")
        if name in _MAPS_OF_SCHEMAS:
            _typed(node, place, name, dict)


def _typed(node: Mapping[str, Any], place: str, name: str, wanted: type) -> Any:
    value = node[name]
    if not isinstance(value, wanted):
        raise _refusal(f"JSON schema at {place}: {name} must be {_KINDS[wanted]}, not {_kind(value)}")
    return value


_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "a number")


def _refusal(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"response_format: {what}"[:500])
