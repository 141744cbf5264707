"""Server-sent events out of a stream of bytes, however these are cut.

Source: the HTML standard, section 9.2.6 "Interpreting an event stream".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_EVENT_BYTES = 16 << 20  # an event with more is no answer of a language model

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLongError(ValueError):
    """The server sends without ever ending an event."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event."""

    kind: str  # of its `event:` line; "message" without one
    data: str


class EventParser:
    """Keeps what is not complete yet. Comments, `id:` and `retry:` have no meaning here and are passed over."""

    def __init__(self) -> None:
        self._partial: list[bytes] = []  # pieces of a line whose end has not come
        self._data: list[str] = []
        self._kind = ""
        self._num_bytes = 0  # of the event under way
        self._skips_newline = False  # the latest byte was a carriage return, so a newline would belong to it
        self._is_at_start = True

    def feed(self, piece: bytes) -> list[ServerEvent]:
        """Take bytes, return the events that they complete. Raises EventTooLongError."""
        if self._skips_newline and piece:
            piece = piece.removeprefix(b"\n")
            self._skips_newline = False
        if not piece:
            return []
        self._num_bytes += len(piece)
        first, *others = _LINE_END.split(piece)
        self._partial.append(first)
        events = []
        for rest in others:
            event = self._take_line(b"".join(self._partial))
            if event is not None:
                events.append(event)
            self._partial = [rest]
        self._skips_newline = piece.endswith(b"\r")
        if self._num_bytes > MAX_EVENT_BYTES:
            raise EventTooLongError(f"more than {MAX_EVENT_BYTES} bytes without the end of an event")
        return events

    def finish(self) -> list[ServerEvent]:
        """Return the event whose empty line the server has left out at the end of its stream, if any."""
        self._take_line(b"".join(self._partial))
        self._partial = []
        event = self._take_line(b"")
        return [] if event is None else [event]

    def _take_line(self, line: bytes) -> ServerEvent | None:
        if self._is_at_start:
            line = line.removeprefix(_BYTE_ORDER_MARK)
            self._is_at_start = False
        if not line:
            return self._dispatch()
        name, _, value = line.decode(errors="replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._kind = value
        return None

    def _dispatch(self) -> ServerEvent | None:
        kind, self._kind = self._kind or "message", ""
        data, self._data = self._data, []
        self._num_bytes = 0
        return ServerEvent(kind, "\n".join(data)) if data else None
