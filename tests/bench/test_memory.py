"""Blocks and contiguous reservations are counted alike, and the result is the same every time."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from giveway.bench import memory
from giveway.bench.contiguous_pool import ContiguousPool
from giveway.bench.memory import CONFIG, NUM_SLOTS, bench_memory, make_workload, run_blocks, run_contiguous
from giveway.cli.__main__ import main
from giveway.core.errors import InvariantError

NUM_REQUESTS = 60  # enough to fill the pool in every layout


def test_a_range_goes_into_the_first_hole_that_is_large_enough() -> None:
    pool = ContiguousPool(10)
    assert [pool.take(count) for count in (3, 2, 4)] == [0, 3, 5]
    pool.release(0)
    pool.release(5)
    assert pool.take(4) == 5  # the hole of 3 at the front is too small
    assert pool.take(3) == 0
    assert (pool.num_taken, pool.take(2), pool.take(1)) == (9, None, 9)


def test_room_in_pieces_is_no_room() -> None:
    # Goal: external fragmentation is what the contiguous layouts are charged with; it must exist.
    pool = ContiguousPool(6)
    starts = [pool.take(1) for _ in range(6)]
    for start in starts[::2]:
        assert start is not None
        pool.release(start)
    assert pool.num_taken == 3
    assert pool.take(2) is None
    with pytest.raises(InvariantError, match="no range begins at slot 4"):
        pool.release(4)


@pytest.mark.parametrize("seed", range(5))
def test_ranges_never_overlap_and_the_first_fitting_hole_is_never_missed(seed: int) -> None:
    # Goal: the pool against a map of single slots.
    rng, pool, owners = random.Random(seed), ContiguousPool(40), [-1] * 40
    live: list[int] = []
    for number in range(300):
        if live and rng.random() < 0.45:
            start = live.pop(rng.randrange(len(live)))
            owner = owners[start]
            pool.release(start)
            owners = [-1 if held == owner else held for held in owners]
        else:
            count = rng.randint(1, 12)
            fitting = (start for start in range(41 - count) if set(owners[start : start + count]) == {-1})
            expected = next(fitting, None)
            assert pool.take(count) == expected
            if expected is not None:
                owners[expected : expected + count] = [number] * count
                live.append(expected)
        assert pool.num_taken == sum(held != -1 for held in owners)


def test_requests_fit_the_model_and_many_end_before_their_limit() -> None:
    arrivals = make_workload(3, 200)
    assert arrivals == make_workload(3, 200)
    assert arrivals != make_workload(4, 200)
    steps = [arrival.step for arrival in arrivals]
    assert steps == sorted(steps)
    for arrival in arrivals:
        assert 1 <= arrival.num_output <= arrival.spec.max_new_tokens
        assert arrival.spec.max_slots < CONFIG.max_model_len
    assert 0.5 < sum(arrival.is_early for arrival in arrivals) / 200 < 1


def test_every_layout_computes_every_token_of_every_request() -> None:
    # Goal: the same work in all layouts, or their occupancy could not be compared. A lone request of p prompt and n
    # output tokens takes n steps, the first of which computes the prompt.
    arrivals = make_workload(1, 1)
    usages = [run_contiguous(arrivals, lambda spec: spec.max_slots), run_blocks(arrivals)]
    assert [usage.num_steps for usage in usages] == [arrivals[0].num_output] * 2
    assert [usage.stored for usage in usages] == [[], []]  # nobody waited


def test_reservations_of_the_same_size_fill_the_pool_and_hold_back_what_is_never_stored() -> None:
    usage = run_contiguous(make_workload(1, NUM_REQUESTS), lambda _: CONFIG.max_model_len)
    assert set(usage.owned) == {NUM_SLOTS}
    assert set(usage.running) == {NUM_SLOTS // CONFIG.max_model_len}
    assert usage.not_owned == 0
    assert usage.of_pool == pytest.approx(usage.utilisation)


def test_blocks_hold_more_than_reservations_do_and_more_requests_run() -> None:
    rows = bench_memory(num_workloads=1, num_requests=NUM_REQUESTS).rows
    longest, limited, blocks = rows
    assert [row["layout"] for row in rows] == [
        "contiguous, max_model_len",
        "contiguous, prompt + max_tokens",
        "blocks of 16",
    ]
    for row in rows:
        assert 0 < row["of_pool"] <= row["utilisation"] <= 1
        assert 0 <= row["not_owned"] < 1
        assert row["low"] <= row["utilisation"] <= row["high"]
    for column in ("utilisation", "of_pool", "running"):
        assert longest[column] < limited[column] < blocks[column]
    assert rows == bench_memory(num_workloads=1, num_requests=NUM_REQUESTS).rows


def test_the_command_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "bench_memory", lambda **_: bench_memory(num_workloads=1, num_requests=NUM_REQUESTS))
    target = tmp_path / "memory.json"
    assert main(["bench", "memory", "--quick", "--json", str(target)]) == 0
    content = json.loads(target.read_text())
    assert set(content) == {"machine", "settings", "rows"}
    assert "utilisation" in capsys.readouterr().out
