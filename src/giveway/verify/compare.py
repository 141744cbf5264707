"""Comparing an answer with that of the undisturbed run: everything a caller can see, floats by their bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from giveway.core.plan import TokenLogprobs
from giveway.engine.outputs import RequestOutput

_NOTHING = "nothing"  # one of the two answers has no such entry


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where an answer is not the undisturbed one."""

    request: str
    what: str  # for people: "output token", "text", ...
    position: int | None  # token, or character of the text; None: the whole differs
    undisturbed: str
    found: str

    def describe(self) -> str:
        """Return one line for people."""
        place = "" if self.position is None else f" {self.position}"
        return f"{self.request}, {self.what}{place}: {self.undisturbed} undisturbed, {self.found} here"

    def as_json(self) -> dict[str, Any]:
        """Return what goes into the JSON file."""
        return {
            "request": self.request,
            "what": self.what,
            "position": self.position,
            "undisturbed": self.undisturbed,
            "found": self.found,
        }


def first_difference(request: str, undisturbed: RequestOutput, found: RequestOutput) -> Difference | None:
    """Compare two answers of one request: prompt log-probabilities, then token by token, then text and end."""
    columns: list[tuple[str, Sequence[object], Sequence[object]]] = [
        (
            "log-probability of prompt token",
            [_bits(entry) for entry in undisturbed.prompt_logprobs or ()],
            [_bits(entry) for entry in found.prompt_logprobs or ()],
        ),
        ("output token", _steps_of(undisturbed), _steps_of(found)),
        ("character of the text", undisturbed.text, found.text),
    ]
    for what, left, right in columns:
        for position, (one, other) in enumerate(zip_longest(left, right, fillvalue=_NOTHING)):
            if one != other:
                return Difference(request, what, position, str(one), str(other))
    for what in ("finish_reason", "stop", "error"):
        one, other = (getattr(answer, what) for answer in (undisturbed, found))
        if one != other:
            return Difference(request, what.replace("_", " "), None, str(one), str(other))
    return None


def _steps_of(answer: RequestOutput) -> list[str]:
    """Each output token with its log-probabilities, if it has any."""
    if answer.logprobs is None:
        return [str(token) for token in answer.token_ids]
    entries = [_bits(entry) for entry in answer.logprobs]
    return [f"{token} ({entry})" for token, entry in zip_longest(answer.token_ids, entries, fillvalue=_NOTHING)]


def _bits(entry: TokenLogprobs | None) -> str:
    """Log-probabilities as text that is equal exactly if all their bits are: `repr` of a float can be read back."""
    if entry is None:
        return _NOTHING
    top = ", ".join(f"{token} {logprob!r}" for token, logprob in entry.top)
    return f"log-probability {entry.logprob!r}, rank {entry.rank}" + (f", best {top}" if top else "")
