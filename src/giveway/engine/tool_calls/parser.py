"""Taking calls of tools out of a stream of text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from giveway.core.strict_json import parse_json
from giveway.engine.tool_calls.formats import ToolFormat


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model wrote."""

    id: str
    name: str
    arguments: str  # a JSON object as text


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of an answer gave."""

    content: str  # text outside of calls
    calls: tuple[ToolCall, ...] = ()


class _Place(Enum):
    """Where in the text the parser is."""

    START = "start"  # nothing but white space yet, or calls; of LLAMA only
    TEXT = "text"
    CALL = "call"  # behind a marker, or in JSON that may be a call
    END = "end"  # behind the JSON, before its end marker


# What matters for finding the end of a JSON value, outside of a string and inside.
_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'"|\\(?:.|\Z)', re.DOTALL)
_DEPTH_OF = {"{": 1, "[": 1, "}": -1, "]": -1}
_SPACE = " \t\r\n"


class ToolCallParser:
    """Takes calls out of text that comes in pieces; what it gives does not depend on where the pieces are cut.

    Nothing is lost: text that turns out to be no call is content, marker and all. What may be the beginning of a call
    is held back until that is known. No text is gone through twice, however often it seems to begin a call.
    """

    def __init__(self, tool_format: ToolFormat, new_id: Callable[[], str]) -> None:
        """Begin an answer. new_id: makes the id of each call."""
        self._format = tool_format
        self._new_id = new_id
        self._place = _Place.START if tool_format is ToolFormat.LLAMA else _Place.TEXT
        self._held = ""  # not yet given; begins with a marker, or what may be one, unless in START
        self._value_start = 0  # in CALL and END: where the JSON begins, or white space before it
        self._looked = 0  # in CALL: up to where brackets were counted; in END: where the JSON ends
        self._depth = 0
        self._in_string = False

    def push(self, text: str) -> Parsed:
        """Take in a piece; return what is certain now."""
        self._held += text
        return self._collect(is_last=False)

    def finish(self) -> Parsed:
        """End the answer; return all that was held back, a call whose end marker never came included."""
        parsed = self._collect(is_last=True)
        return Parsed(parsed.content + self._take(len(self._held)), parsed.calls)

    def _collect(self, *, is_last: bool) -> Parsed:
        content: list[str] = []
        calls: list[ToolCall] = []
        for found in self._advance(is_last=is_last):
            if isinstance(found, str):
                content.append(found)
            else:
                calls += found
        return Parsed("".join(content), tuple(calls))

    def _advance(self, *, is_last: bool) -> Iterator[str | list[ToolCall]]:
        """Yield content and calls for as long as what is held decides anything."""
        step = {
            _Place.START: self._at_start,
            _Place.TEXT: self._in_text,
            _Place.CALL: self._in_call,
            _Place.END: self._at_end,
        }
        while True:
            before = self._place, len(self._held)
            found = step[self._place](is_last)
            if found:
                yield found
            if not self._held or (self._place, len(self._held)) == before:
                return

    def _at_start(self, is_last: bool) -> str | list[ToolCall] | None:
        """Decide whether the answer begins with a call; white space, and semicolons between calls, decide nothing."""
        del is_last
        text = self._held.lstrip(_SPACE + ";")
        if text.startswith("{"):
            self._begin_call(len(self._held) - len(text))
        elif text and not self._format.marker.startswith(text):
            self._place = _Place.TEXT
        return None

    def _in_text(self, is_last: bool) -> str | list[ToolCall] | None:
        """Give everything up to a marker, or up to what may become one."""
        marker = self._format.marker
        place = self._held.find(marker)
        if place == 0:
            self._begin_call(len(marker))
            return None
        if place < 0:
            place = len(self._held) - (0 if is_last else _length_of_beginning(self._held, marker))
        return self._take(place)

    def _begin_call(self, value_start: int) -> None:
        self._place = _Place.CALL
        self._value_start = self._looked = value_start
        self._depth, self._in_string = 0, False

    def _in_call(self, is_last: bool) -> str | list[ToolCall] | None:
        """Find the end of the JSON."""
        del is_last
        if self._depth == 0:
            value = self._held[self._value_start :].lstrip(_SPACE)
            if not value:
                return None
            self._looked = len(self._held) - len(value)
            if value[0] not in "{[":
                return self._no_call(self._looked)
            self._value_start = self._looked
        while True:
            piece = (_INSIDE if self._in_string else _OUTSIDE).search(self._held, self._looked)
            if piece is None or piece[0] == "\\":  # a backslash waits for what it stands before
                self._looked = len(self._held) if piece is None else piece.start()
                return None
            self._looked = piece.end()
            if piece[0] == '"':
                self._in_string = not self._in_string
            self._depth += _DEPTH_OF.get(piece[0], 0)
            if self._depth == 0:
                self._place = _Place.END
                return None

    def _at_end(self, is_last: bool) -> str | list[ToolCall] | None:
        """Look for the end marker, then read the JSON."""
        end, taken = self._format.end_marker, self._looked
        if end:
            rest = self._held[self._looked :].lstrip(_SPACE)
            if rest.startswith(end):
                taken = len(self._held) - len(rest) + len(end)
            elif not end.startswith(rest):
                return self._no_call(self._looked)
            elif is_last:
                taken = len(self._held)  # the model stopped where nothing but the end could come
            else:
                return None
        calls = _calls_in(self._held[self._value_start : self._looked], self._new_id)
        if calls is None:
            return self._no_call(taken)
        self._take(taken)
        self._place = _Place.START if self._format is ToolFormat.LLAMA else _Place.TEXT
        return calls

    def _no_call(self, length: int) -> str:
        """Give what looked like a call as content, and go on behind it."""
        self._place = _Place.TEXT
        return self._take(length)

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


def _length_of_beginning(text: str, marker: str) -> int:
    """Characters at the end of a text that are a beginning of the marker, and not all of it."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def _calls_in(value: str, new_id: Callable[[], str]) -> list[ToolCall] | None:
    """Read a call, or a list of at least one; None: it is something else."""
    try:
        read: Any = parse_json(value)
        objects = read if isinstance(read, list) else [read]
        named = [_name_and_arguments(each) for each in objects]
    except (ValueError, RecursionError):
        return None
    return [ToolCall(new_id(), name, arguments) for name, arguments in named] or None


def _name_and_arguments(call: Any) -> tuple[str, str]:
    """Raise ValueError for what is no call."""
    if not isinstance(call, dict):
        raise ValueError("a call is an object")  # noqa: TRY004  # one error for all that is no call
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):  # some models write it as a text that holds JSON
        arguments = parse_json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | None):
        raise ValueError("a call has a name and an object of arguments")
    return name, json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
