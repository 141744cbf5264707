"""Names for classes: what an operator calls a range of integers. Clients send numbers; labels and tiers are names."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

from giveway.core.config import LEAST_URGENT_CLASS, MOST_URGENT_CLASS
from giveway.core.errors import ConfigError

MAX_CLASSES = 16  # each is a value of a label, so every further one adds series to most metrics

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}", re.ASCII)
_start_of = itemgetter(1)


@dataclass(frozen=True, slots=True)
class PriorityClasses:
    """Names in order of urgency, each with the first integer that it stands for.

    A name stands for all integers up to the next name's first one; integers below the first name's belong to it too.
    """

    entries: tuple[tuple[str, int], ...] = (("priority", 0), ("default", 10), ("flex", 20), ("batch", 30))

    def __post_init__(self) -> None:
        """Check names and order. Raises ConfigError."""
        if not 1 <= len(self.entries) <= MAX_CLASSES:
            raise ConfigError(f"{len(self.entries)} priority classes are named; 1 to {MAX_CLASSES} can be")
        for name, start in self.entries:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ConfigError(
                    f"priority class {name!r}: a name is a letter and up to 31 more of a-z, 0-9, '_' and '-'"
                )
            if isinstance(start, bool) or not isinstance(start, int):
                raise ConfigError(f"priority class {name!r} starts at {start!r}; a whole number is needed")
            if not MOST_URGENT_CLASS <= start <= LEAST_URGENT_CLASS:
                raise ConfigError(
                    f"priority class {name!r} starts at {start}; classes are {MOST_URGENT_CLASS} (most urgent) to "
                    f"{LEAST_URGENT_CLASS}"
                )
        if len(set(self.names)) < len(self.entries):
            raise ConfigError(f"a priority class is named twice: {', '.join(self.names)}")
        starts = [start for _, start in self.entries]
        if any(later <= start for start, later in pairwise(starts)):
            raise ConfigError(f"priority classes start at {starts}; each must start above the one before it")

    @classmethod
    def of(cls, starts: Mapping[str, int]) -> PriorityClasses:
        """Make classes from names with their first integers, the most urgent first. Raises ConfigError."""
        return cls(tuple(starts.items()))

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the most urgent first."""
        return tuple(name for name, _ in self.entries)

    def name_of(self, priority: int) -> str:
        """Return the name that an integer belongs to."""
        place = bisect_right(self.entries, priority, key=_start_of)
        return self.entries[max(place - 1, 0)][0]

    def start_of(self, name: str) -> int | None:
        """Return the first integer of a class. None: there is no such name."""
        return next((start for known, start in self.entries if known == name), None)
