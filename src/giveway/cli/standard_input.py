"""Standard input as bytes that must be UTF-8, whatever the locale would make of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from giveway.core.errors import InvalidRequestError

_NAME = "standard input"


def read_stdin(max_bytes: int) -> str:
    """Return all of standard input. Raises InvalidRequestError if it is not UTF-8, or longer than the limit."""
    data = sys.stdin.buffer.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise InvalidRequestError(f"{_NAME} holds more than {max_bytes} bytes")
    return _decode(data, 0)


def stdin_lines() -> Iterator[str]:
    """Yield the lines of standard input as they come. Raises InvalidRequestError at one that is not UTF-8."""
    start = 0
    for line in sys.stdin.buffer:
        yield _decode(line, start)
        start += len(line)


def _decode(data: bytes, start: int) -> str:
    """start: place of `data` in the whole input. Bytes are counted from 0, as hex viewers do."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{_NAME} is not UTF-8 (byte {start + error.start})") from error


def check_utf8(text: str, what: str) -> None:
    """Refuse a text that came from bytes which are not UTF-8: Python keeps such bytes of an argument as surrogates.

    what: how the error calls it. Raises InvalidRequestError.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = len(text[: error.start].encode())
        raise InvalidRequestError(f"{what} is not UTF-8 (byte {place})") from error
