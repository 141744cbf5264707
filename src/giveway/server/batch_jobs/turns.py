"""Whose line is next: owners take turns, and within an owner the oldest batch goes first."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from giveway.server.batch_jobs.ids import BatchId
from giveway.server.batch_jobs.records import BatchRecord, LinePosition


class LineQueue:
    """The lines of one batch that have no answer: a few of them at hand, the rest in the database."""

    def __init__(self, batch: BatchRecord) -> None:
        self.batch = batch
        self.num_left = batch.num_lines - batch.num_completed - batch.num_failed  # without an answer on the disk
        self.last_read = 0  # number of the last line that was fetched from the database
        self.is_read_up = self.num_left == 0  # nothing is left there
        self._at_hand: list[tuple[int, LinePosition]] = []  # a heap: lines that were put back go first again

    @property
    def has_more(self) -> bool:
        """Whether a line is at hand, or may be in the database."""
        return bool(self._at_hand) or not self.is_read_up

    @property
    def needs_reading(self) -> bool:
        """Whether lines must be fetched from the database before one can be taken."""
        return not self._at_hand and not self.is_read_up

    def add(self, lines: Iterable[LinePosition]) -> None:
        """Take in what was read from the database behind `last_read`; nothing at all means that it is read up."""
        self.is_read_up = True
        for line in lines:
            self.is_read_up = False
            self.last_read = line.number
            heapq.heappush(self._at_hand, (line.number, line))

    def take(self) -> LinePosition:
        """Take out the next line at hand."""
        return heapq.heappop(self._at_hand)[1]

    def put_back(self, line: LinePosition) -> None:
        """Return a line that was taken and not answered."""
        heapq.heappush(self._at_hand, (line.number, line))


class _Owner:
    """One key: its batches, and how much of the engine it has."""

    __slots__ = ("last_turn", "num_failures", "num_under_way", "paused_until_s", "queues")

    def __init__(self) -> None:
        self.queues: deque[LineQueue] = deque()
        self.num_under_way = 0
        self.last_turn = 0
        self.num_failures = 0  # "try again later" in a row
        self.paused_until_s = 0.0


class Turns:
    """Chooses lines so that owners have equal shares of the engine. Not for several threads.

    The owner with the fewest lines under way is next, and of several the one whose last turn is longest ago. A newcomer
    so gets every place that becomes free until it has its share, however many lines stand in front of it.
    """

    def __init__(self, max_under_way: int, *, first_pause_s: float, longest_pause_s: float) -> None:
        """max_under_way: lines in the engine at a time. The pauses: of an owner who is told to try again later."""
        self._max_under_way = max_under_way
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._owners: dict[str, _Owner] = {}
        self._num_turns = 0
        self.num_under_way = 0

    def add(self, queue: LineQueue) -> None:
        """Let a batch take part, behind the owner's older ones."""
        owner = self._owners.setdefault(queue.batch.owner, _Owner())
        position = sum(other.batch.id < queue.batch.id for other in owner.queues)
        owner.queues.insert(position, queue)

    def remove(self, batch_id: BatchId, owner: str) -> None:
        """Let a batch take no further part."""
        found = self._owners.get(owner)
        if found is not None:
            found.queues = deque(queue for queue in found.queues if queue.batch.id != batch_id)
            self._forget_if_idle(owner)

    def choose(self, now_s: float) -> LineQueue | None:
        """Return the queue whose line is next; None: nobody's, for now."""
        if self.num_under_way >= self._max_under_way:
            return None
        best: tuple[int, int] | None = None
        chosen: LineQueue | None = None
        for owner in self._owners.values():
            key = (owner.num_under_way, owner.last_turn)
            if (best is None or key < best) and _may_go(owner, now_s):
                queue = next((queue for queue in owner.queues if queue.has_more), None)
                if queue is not None:
                    best, chosen = key, queue
        return chosen

    def start(self, queue: LineQueue) -> LinePosition:
        """Take the next line of a chosen queue: it is under way now."""
        owner = self._owners[queue.batch.owner]
        self._num_turns += 1
        owner.last_turn = self._num_turns
        owner.num_under_way += 1
        self.num_under_way += 1
        return queue.take()

    def end(self, name: str) -> None:
        """A line of this owner is not under way any more, whatever became of it."""
        owner = self._owners[name]
        owner.num_under_way -= 1
        self.num_under_way -= 1
        self._forget_if_idle(name)

    def pause(self, name: str, now_s: float) -> None:
        """The engine has no room for this owner: its lines wait, twice as long each time.

        Afterwards it has one line under way at a time, until one is answered.
        """
        owner = self._owners[name]
        if owner.paused_until_s <= now_s:  # else several lines were told the same at once
            wait_s = min(self._first_pause_s * 2 ** min(owner.num_failures, 30), self._longest_pause_s)
            owner.num_failures += 1
            owner.paused_until_s = now_s + wait_s

    def shortest_pause_s(self, now_s: float) -> float | None:
        """Return after how long the next paused owner may go on; None: nobody is paused."""
        waits = (owner.paused_until_s - now_s for owner in self._owners.values())
        return min((wait_s for wait_s in waits if wait_s > 0), default=None)

    def resume(self, name: str) -> None:
        """A line of this owner was answered."""
        if name in self._owners:
            self._owners[name].num_failures = 0

    def _forget_if_idle(self, name: str) -> None:
        owner = self._owners[name]
        if not owner.queues and not owner.num_under_way:
            del self._owners[name]


def _may_go(owner: _Owner, now_s: float) -> bool:
    return owner.paused_until_s <= now_s and not (owner.num_failures and owner.num_under_way)
