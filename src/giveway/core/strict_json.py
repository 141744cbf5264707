"""JSON as its standard has it: Python's reader would also take NaN and Infinity, which nobody else reads."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, or RecursionError for one that is nested too deeply."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")
