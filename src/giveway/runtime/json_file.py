"""JSON files of a model directory, read without trusting their size, depth or shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from giveway.core.errors import ModelFileError, ModelNotFoundError

MAX_JSON_BYTES = 128 << 20  # the largest tokenizer.json known is about 35 MB


def parse_json_object(text: bytes | str, *, source: Path | str) -> dict[str, Any]:
    """Parse one JSON object; anything else, a repeated key included, raises ModelFileError naming `source`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ModelFileError(f"{source}: the JSON key {twice!r} appears twice in one object")
        return members

    try:
        parsed = json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ModelFileError(f"{source}: the JSON is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, or an integer of more digits than Python parses
        raise ModelFileError(f"{source}: not valid JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise ModelFileError(f"{source}: a JSON object is needed, found {type(parsed).__name__}")
    return parsed


def read_json_object(path: Path) -> dict[str, Any]:
    """Read and parse a JSON file.

    Raises ModelNotFoundError if it cannot be opened, ModelFileError if it is larger than MAX_JSON_BYTES or malformed.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelFileError(f"{path}: {size} bytes; a JSON file of a model has {MAX_JSON_BYTES} at most")
        text = path.read_bytes()
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {path}: {error.strerror}") from error
    return parse_json_object(text, source=path)


def read_json_object_if_present(path: Path) -> dict[str, Any]:
    """Like read_json_object, but a file that does not exist reads as an empty object."""
    return read_json_object(path) if path.exists() else {}
