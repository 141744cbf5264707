"""The input of `giveway run`: a file of requests, one JSON object a line, of which nothing is trusted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from hashlib import blake2b
from itertools import count
from typing import Any, BinaryIO

from giveway.core.errors import InvalidRequestError
from giveway.core.sampling import SamplingParams
from giveway.core.strict_json import parse_json
from giveway.engine.response_format import parse_response_format

# Log-probabilities are not written, so nobody may ask for them in vain. The form of a text is asked for as in the
# OpenAI API, by response_format.
_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams)) - {
    "logprobs",
    "prompt_logprobs",
    "structured_output",
}
_OWN_FIELDS = frozenset({"prompt", "messages", "id", "custom_id", "cache_salt", "response_format"})
_PIECE_BYTES = 1 << 20

Digest = int
"""64 bits of the hash of a line: tells whether an answer belongs to this line."""


@dataclass(frozen=True, slots=True)
class InputLine:
    """One line as it stands in the file, without white space around it."""

    number: int  # from 1
    digest: Digest
    content: bytes | None  # None: longer than the limit


@dataclass(frozen=True, slots=True)
class LineRequest:
    """What a line asks for."""

    prompt: str | None  # exactly one of prompt and messages is given
    messages: tuple[Mapping[str, Any], ...] | None
    sampling: Mapping[str, Any]  # fields of SamplingParams
    priority: int | None
    cache_salt: Any  # of whatever type: the engine checks it; None: none


def read_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[InputLine]:
    """Yield the lines of a file that are not blank; no more than one line, or the limit, is in memory at a time."""
    for number in count(1):
        piece = file.readline(max_line_bytes + 1)
        if not piece:
            return
        is_long = len(piece) > max_line_bytes and not piece.endswith(b"\n")
        content = piece.strip()
        hasher = blake2b(content, digest_size=8)
        while is_long and piece and not piece.endswith(b"\n"):
            piece = file.readline(_PIECE_BYTES)
            hasher.update(piece)
        if content or is_long:
            yield InputLine(number, int.from_bytes(hasher.digest()), None if is_long else content)


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a line. Raises InvalidRequestError."""
    try:
        value = parse_json(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the line is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise InvalidRequestError("the line is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequestError(f"the line is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the line holds {_shorten(value)}; an object with prompt or messages is needed")
    return value


def custom_id_of(values: Mapping[str, Any]) -> str | int | None:
    """Return the caller's own name of a request, from `id` or `custom_id`. Raises InvalidRequestError."""
    value = values.get("id", values.get("custom_id"))
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidRequestError(f"id is {_shorten(value)}: a lone surrogate, which the output cannot carry")
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
        return value
    raise InvalidRequestError(f"id is {_shorten(value)}; it must be a text or a whole number")


def parse_request(values: Mapping[str, Any], priority_field: str) -> LineRequest:
    """Return what the object of a line asks for. Raises InvalidRequestError that names the field."""
    for name in values:
        if name not in _SAMPLING_FIELDS | _OWN_FIELDS | {priority_field}:
            near = get_close_matches(name, _SAMPLING_FIELDS | _OWN_FIELDS | {priority_field}, n=1)
            raise InvalidRequestError(
                f"unknown field {_shorten(name)}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
    prompt, messages = values.get("prompt"), values.get("messages")
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("exactly one of prompt and messages is needed")
    if prompt is not None and not isinstance(prompt, str):
        raise InvalidRequestError(f"prompt is {_shorten(prompt)}; it must be a text")
    if messages is not None and not (isinstance(messages, list) and all(isinstance(each, dict) for each in messages)):
        raise InvalidRequestError(f"messages is {_shorten(messages)}; it must be a list of objects")
    priority = values.get(priority_field)
    if priority is not None and (isinstance(priority, bool) or not isinstance(priority, int)):
        raise InvalidRequestError(f"{priority_field} is {_shorten(priority)}; it must be a whole number")
    conversation = None if messages is None else tuple(messages)
    return LineRequest(prompt, conversation, _sampling(values), priority, values.get("cache_salt"))


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: values[name] for name in _SAMPLING_FIELDS if values.get(name) is not None}
    for name in ("stop_token_ids", "bad_words"):
        if not isinstance(given.get(name, []), list):
            raise InvalidRequestError(f"{name} is {_shorten(given[name])}; it must be a list")
    if not isinstance(given.get("stop", []), list | str):
        raise InvalidRequestError(f"stop is {_shorten(given['stop'])}; it must be a text or a list of texts")
    if "logit_bias" in given:
        given["logit_bias"] = _logit_bias(given["logit_bias"])
    form = parse_response_format(values.get("response_format"))
    return given if form is None else {**given, "structured_output": form}


def _logit_bias(value: object) -> dict[int, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"logit_bias is {_shorten(value)}; it must be an object of token id: number")
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError as error:
        raise InvalidRequestError(f"logit_bias: a token id must be a whole number: {error}") from error


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
