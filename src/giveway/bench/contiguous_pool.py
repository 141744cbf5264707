"""KV memory without blocks: every request reserves one contiguous range, where the first hole is large enough."""

from __future__ import annotations

from giveway.core.errors import InvariantError


class ContiguousPool:
    """Slots 0 .. size-1, handed out in ranges. Nothing is ever moved, so holes stay until their neighbours go."""

    def __init__(self, size: int) -> None:
        self.size = size  # slots
        self._taken: list[tuple[int, int]] = []  # [start, stop) of each range, ascending

    @property
    def num_taken(self) -> int:
        """Slots that belong to somebody."""
        return sum(stop - start for start, stop in self._taken)

    def take(self, count: int) -> int | None:
        """Reserve `count` slots in the first hole that is large enough. Returns the first slot; None: no such hole."""
        hole = 0
        for place, (start, stop) in enumerate(self._taken):
            if start - hole >= count:
                self._taken.insert(place, (hole, hole + count))
                return hole
            hole = stop
        if self.size - hole < count:
            return None
        self._taken.append((hole, hole + count))
        return hole

    def release(self, start: int) -> None:
        """Give the range that begins at `start` back. Raises InvariantError when there is none."""
        for place, taken in enumerate(self._taken):
            if taken[0] == start:
                del self._taken[place]
                return
        raise InvariantError(f"no range begins at slot {start}")
