"""Keys take turns: however much one hands in, another's few lines are soon through."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from giveway.core.errors import ConfigError
from giveway.server.batch_jobs.ids import IdMaker
from giveway.server.batch_jobs.jobs import BatchJobs
from giveway.server.batch_jobs.records import (
    UNFINISHED,
    BatchLine,
    BatchRecord,
    BatchStatus,
    FilePurpose,
    LineAnswer,
    LinePosition,
    NewBatch,
    TokenUsage,
)
from giveway.server.batch_jobs.store import BatchStore
from giveway.server.batch_jobs.turns import LineQueue, Turns
from tests.server.batch_jobs.sample_lines import CHAT, answer_of, jsonl, request_line

IDS = IdMaker(lambda: 0.0, None)


def queue_of(owner: str, num_lines: int) -> LineQueue:
    """Return a queue of the newest batch of this owner with its first lines at hand."""
    usage, source, window = TokenUsage(), IDS.new_file_id(), "24h"
    # fmt: off
    batch = BatchRecord(
        IDS.new_batch_id(), owner, CHAT, source, window, None, None, BatchStatus.IN_PROGRESS, 0, 86400, 0, None, None,
        None, None, None, None, None, None, (), num_lines, 0, 0, None, usage,
    )
    # fmt: on
    queue = LineQueue(batch)
    queue.add(LinePosition(number, 0, 1, f"{owner}-{number}") for number in range(1, num_lines + 1))
    return queue


def turns_of(max_under_way: int) -> Turns:
    return Turns(max_under_way, first_pause_s=1.0, longest_pause_s=8.0)


def start_all(turns: Turns, now_s: float = 0.0) -> list[str]:
    """Start what may start; returns custom ids."""
    started = []
    while (queue := turns.choose(now_s)) is not None:
        if queue.needs_reading:
            queue.add(())
            continue
        started.append(turns.start(queue).custom_id)
    return started


def test_owners_alternate_line_by_line() -> None:
    turns = turns_of(6)
    for owner in ("a", "b", "c"):
        turns.add(queue_of(owner, 5))
    assert start_all(turns) == ["a-1", "b-1", "c-1", "a-2", "b-2", "c-2"]
    assert turns.choose(0.0) is None  # full
    turns.end("b")
    assert start_all(turns) == ["b-3"]  # whoever has the least is next


def test_a_newcomer_gets_every_place_that_becomes_free_until_it_has_its_share() -> None:
    turns = turns_of(4)
    turns.add(queue_of("many", 1000))
    start_all(turns)
    turns.add(queue_of("few", 10))
    started = []
    for _ in range(3):
        turns.end("many")
        started += start_all(turns)
    assert started == ["few-1", "few-2", "many-5"]


def test_with_one_place_owners_take_strict_turns() -> None:
    turns = turns_of(1)
    turns.add(queue_of("a", 3))
    turns.add(queue_of("b", 3))
    started = []
    for owner in "ababab":
        started += start_all(turns)
        turns.end(owner)
    assert started == ["a-1", "b-1", "a-2", "b-2", "a-3", "b-3"]


def test_an_owners_batches_run_in_order_of_creation_and_lines_in_order_of_the_file() -> None:
    turns = turns_of(100)
    first, second = queue_of("a", 2), queue_of("a", 2)
    turns.add(second)
    turns.add(first)  # checked later than the second, and yet first
    assert turns.choose(0.0) is first
    one, two = turns.start(first), turns.start(first)
    first.put_back(two)
    first.put_back(one)
    assert turns.start(first) == one


def test_an_owner_who_is_told_to_wait_waits_twice_as_long_each_time_and_holds_up_nobody_else() -> None:
    turns = turns_of(8)
    turns.add(queue_of("a", 100))
    assert len(start_all(turns)) == 8
    turns.pause("a", 0.0)
    turns.pause("a", 0.0)  # the second line told the same counts once
    for _ in range(8):
        turns.end("a")
    assert turns.choose(0.5) is None
    assert turns.shortest_pause_s(0.5) == 0.5
    turns.add(queue_of("b", 2))
    assert start_all(turns, 0.5) == ["b-1", "b-2"]
    assert len(start_all(turns, 1.0)) == 1  # after the pause one line tries, not all
    turns.pause("a", 1.0)
    turns.end("a")
    assert turns.shortest_pause_s(1.0) == 2.0
    assert len(start_all(turns, 3.0)) == 1
    turns.resume("a")
    assert len(start_all(turns, 3.0)) == 5


def add_batch(store: BatchStore, owner: str, num_lines: int) -> NewBatch:
    with store.files.begin_upload(owner) as upload:
        upload.write(jsonl(*(request_line(f"{owner}-{n}") for n in range(num_lines))))
        source = upload.keep(FilePurpose.BATCH, "in.jsonl", None)
    return NewBatch(CHAT, source.id, "24h", 86400, None, None)


def test_ten_lines_are_through_before_forty_of_ten_thousand_others(tmp_path: Path) -> None:
    # Goal: the figure of the promise, end to end; the engine answers in the order in which it got the lines.
    order: list[str] = []
    newest_first: list[asyncio.Event] = []

    async def in_order(line: BatchLine) -> LineAnswer:
        ready = asyncio.Event()
        newest_first.append(ready)
        await ready.wait()
        order.append(line.custom_id)
        return answer_of(line)

    async def main() -> None:
        with BatchStore(tmp_path) as store:
            async with BatchJobs(store, in_order, max_outstanding=8) as jobs:
                await jobs.create("a", add_batch(store, "a", 10_000))
                while len(newest_first) < 8:
                    await asyncio.sleep(0.001)
                await jobs.create("b", add_batch(store, "b", 10))
                while jobs.counts().num_lines_waiting < 10_000:  # b's lines are checked and wait as well
                    await asyncio.sleep(0.001)
                while sum(name.startswith("b") for name in order) < 10:
                    if newest_first:
                        newest_first.pop(0).set()
                    await asyncio.sleep(0.001)

    asyncio.run(main())
    assert sum(name.startswith("a") for name in order) <= 40
    assert [name for name in order if name.startswith("b")] == [f"b-{n}" for n in range(10)]


def test_there_are_never_more_lines_in_the_engine_than_allowed(tmp_path: Path) -> None:
    num_now, most = 0, 0
    is_full = asyncio.Event()

    async def count(line: BatchLine) -> LineAnswer:
        nonlocal num_now, most
        num_now += 1
        most = max(most, num_now)
        if num_now == 5:
            is_full.set()
        await is_full.wait()  # the first five wait for each other, or for a sixth
        await asyncio.sleep(0.001)
        num_now -= 1
        return answer_of(line)

    async def main() -> None:
        with BatchStore(tmp_path) as store:
            async with BatchJobs(store, count, max_outstanding=5) as jobs:
                batches = [await jobs.create(owner, add_batch(store, owner, 40)) for owner in ("a", "b", "c")]
                while any(store.batches.get(batch.owner, batch.id).status in UNFINISHED for batch in batches):
                    await asyncio.sleep(0.005)

    asyncio.run(main())
    assert most == 5


def test_at_least_one_line_must_be_allowed(tmp_path: Path) -> None:
    async def nothing(line: BatchLine) -> LineAnswer:
        return answer_of(line)

    with BatchStore(tmp_path) as store, pytest.raises(ConfigError, match="max_outstanding is 0"):
        BatchJobs(store, nothing, max_outstanding=0)
