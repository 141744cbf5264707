"""Telling the control tokens that a chat template writes from the same characters in somebody's message.

A control string such as `<|im_end|>` inside a message is *broken*: a mark is put behind its first character before the
template sees it. A tokenizer looks for control strings in the raw text, where the mark is in their way, and takes the
marks out in its normalizer, before it splits anything else. So a broken control string becomes the ordinary pieces of
its characters, and everything around it is tokenized as if the mark had never been there.

The mark is U+FDD0 U+FDD2, and a U+FDD0 of the message's own is written U+FDD0 U+FDD1, so both can be undone without
doubt. All three are noncharacters, which Unicode reserves for use inside a program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

LEAD = "\ufdd0"
MARK = "\ufdd0\ufdd2"
ESCAPED_LEAD = "\ufdd0\ufdd1"


def unmark(text: str) -> str:
    """Undo every mark and escape."""
    return text.replace(MARK, "").replace(ESCAPED_LEAD, LEAD)


@dataclass(frozen=True, slots=True)
class ControlStrings:
    """The strings that a tokenizer turns into one token of meaning, in two classes.

    special: control tokens proper. markup: whole tokens such as `<tool_call>` that show in the output but steer the
    model all the same. Strings of one character cannot be broken and are left out of both.
    """

    special: frozenset[str]
    markup: frozenset[str]

    @staticmethod
    def of(special: Iterable[str], others: Iterable[str]) -> ControlStrings:
        """Sort a vocabulary's added tokens: of the others, those in angle brackets are markup."""
        return ControlStrings(
            frozenset(text for text in special if len(text) > 1),
            frozenset(text for text in others if len(text) > 2 and text[0] == "<" and text[-1] == ">"),
        )

    def breaker(self, *, keep_markup: bool = False) -> ControlBreaker:
        """Return what breaks these strings; keep_markup: markup stays whole."""
        targets = self.special if keep_markup else self.special | self.markup
        return ControlBreaker(targets, kept=self.markup - self.special if keep_markup else frozenset())


class ControlBreaker:
    """Puts marks into control strings."""

    def __init__(self, targets: frozenset[str], *, kept: frozenset[str]) -> None:
        longest_first = "|".join(map(re.escape, sorted(targets, key=lambda text: (-len(text), text))))
        # A lookahead, so that occurrences which overlap are all found: each is broken behind its own first character.
        self._occurrence = re.compile(f"(?={longest_first}).", re.DOTALL) if targets else None
        self._matches = re.compile(longest_first) if targets else None
        firsts = "".join(sorted({re.escape(text[0]) for text in targets}))
        guard = "(?!" + "|".join(map(re.escape, sorted(kept))) + ")" if kept else ""
        self._first = re.compile(f"{guard}[{firsts}]") if targets else None

    def is_suspicious(self, text: str) -> bool:
        """Whether the text holds a character with which a control string begins, or the mark's own."""
        return LEAD in text or (self._first is not None and self._first.search(text) is not None)

    def holds_control(self, text: str) -> bool:
        """Whether the text spells out a control string."""
        return self._matches is not None and self._matches.search(text) is not None

    def break_controls(self, text: str) -> str:
        """Mark every control string that stands in the text."""
        return self._mark(self._occurrence, text)

    def break_beginnings(self, text: str) -> str:
        """Mark every character that could begin a control string, whatever follows: nothing can be pieced together."""
        return self._mark(self._first, text)

    def controls(self, text: str) -> list[str]:
        """Every control string that stands unbroken in a text, left to right, the longest at each place."""
        return self._matches.findall(text) if self._matches is not None else []

    @staticmethod
    def _mark(pattern: re.Pattern[str] | None, text: str) -> str:
        text = text.replace(LEAD, ESCAPED_LEAD)
        return pattern.sub(lambda match: match.group() + MARK, text) if pattern is not None else text
