"""Where time comes from: an argument everywhere, so that tests and simulations bring their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds that never goes back."""

    def now(self) -> float:
        """Return the time (s)."""


class MonotonicClock:
    """The machine's own."""

    def now(self) -> float:
        """Return the time since some fixed moment (s)."""
        return time.monotonic()


class StepClock:
    """A clock that moves by a fixed amount whenever it is read: repeatable times for dry runs and tests."""

    def __init__(self, tick_s: float = 0.001) -> None:
        self._tick_s = tick_s
        self._now_s = 0.0

    def now(self) -> float:
        """Return the time, one tick later than before (s)."""
        self._now_s += self._tick_s
        return self._now_s
