"""The field `tools` of a request: read defensively, refused with the name of the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from giveway.core.errors import InvalidRequestError

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]  # JSON schema of the object of its arguments


def check_tools(value: object) -> tuple[Tool, ...]:
    """Return the functions of a `tools` list; None is an empty list. Raises InvalidRequestError, naming the field."""
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequestError(f"tools must be a list, not {type(value).__name__}")
    if len(value) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(value)} entries; at most {MAX_TOOLS} are allowed")
    tools = [_tool(f"tools.{index}", entry) for index, entry in enumerate(value)]
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise InvalidRequestError(f"tools.{index}.function.name is {tool.name!r}, which another tool has already")
        seen.add(tool.name)
    return tuple(tools)


def _tool(place: str, entry: object) -> Tool:
    if not isinstance(entry, Mapping):
        raise InvalidRequestError(f"{place} must be an object, not {type(entry).__name__}")
    if entry.get("type") != "function":
        raise InvalidRequestError(f"{place}.type is {str(entry.get('type'))[:60]!r}; it must be 'function'")
    function = entry.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{place}.function must be an object, not {type(function).__name__}")
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{place}.function.name is {str(name)[:80]!r}; it must be 1 to 64 of the characters a-z A-Z 0-9 _ -"
        )
    if not isinstance(description, str | None):
        raise InvalidRequestError(f"{place}.function.description must be a text, not {type(description).__name__}")
    if not isinstance(parameters, Mapping | None):
        raise InvalidRequestError(f"{place}.function.parameters must be an object, not {type(parameters).__name__}")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidRequestError(f"{place}.function.strict must be true or false")
    return Tool(name, description, parameters or _NO_PARAMETERS)
