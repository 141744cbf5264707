"""The exported file keeps the rules of the format: time goes forward, slices of a track never overlap."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from giveway.core.config import PreemptionChoice
from tests.engine.test_trace import live, random_world
from tests.engine.traced_world import TracedWorld


def events_of(world: TracedWorld) -> list[dict[str, Any]]:
    world.run_until_idle()
    world.writer.close()
    content = json.loads(json.dumps(world.read().as_chrome_trace()))
    assert set(content) == {"traceEvents", "displayTimeUnit"}
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def check_format(events: list[dict[str, Any]]) -> None:
    last = 0
    ends: dict[int, int] = defaultdict(int)
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    for event in events:
        assert event["ph"] in "XiCM"
        assert isinstance(event["ts"], int)
        assert event["ts"] >= last
        last = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert event["ts"] >= ends[event["tid"]], "slices overlap"
            ends[event["tid"]] = event["ts"] + event["dur"]
            assert event["tid"] in named
        if event["ph"] == "i":
            assert event["s"] == "t"
            assert event["tid"] in named
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())


def test_the_format_is_kept_whatever_happened(tmp_path: Path) -> None:
    for seed in range(10, 16):
        rng = random.Random(seed)
        world = random_world(tmp_path / "trace.jsonl", rng)
        live(world, rng, 80)
        check_format(events_of(world))


def test_a_swapped_request_goes_through_its_phases_without_a_gap(tmp_path: Path) -> None:
    world = TracedWorld(tmp_path / "t", device_blocks=6, host_blocks=6, mode=PreemptionChoice.AUTO)
    world.submit("slow", priority=20, prompt_tokens=12, max_tokens=8)
    world.steps(2)
    world.submit("urgent", priority=0, prompt_tokens=12, max_tokens=4)
    events = events_of(world)
    check_format(events)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["slow (class 20)", "urgent (class 0)"]
    slices = [event for event in events if event["ph"] == "X" and names[event["tid"]].startswith("slow")]
    assert [each["name"] for each in slices] == [
        "prefill",
        "decode",
        "swapping out (host)",
        "swapped out (host)",
        "swapping in (host)",
        "decode",
    ]
    for earlier, later in pairwise(slices):
        assert earlier["ts"] + earlier["dur"] == later["ts"]
    assert slices[3]["args"] == {"no_device_blocks": 3}
    (mark,) = [event for event in events if event["name"] == "gives way: swap to host"]
    assert mark["args"]["beneficiary"] == "urgent"
    assert mark["args"]["swap to disk (ms)"] == "not possible"
    host = [event["args"]["owned"] for event in events if event["name"] == "host pool (blocks)"]
    assert host == [0, 4, 0]


def test_a_request_that_is_unfinished_where_the_trace_ends_has_a_slice_up_to_there(tmp_path: Path) -> None:
    world = TracedWorld(tmp_path / "t", device_blocks=6)
    world.submit("a", max_tokens=8)
    world.steps(3)
    world.writer.close()
    events = world.read().as_chrome_trace()["traceEvents"]
    check_format(events)
    assert [(event["name"], event["dur"]) for event in events if event["ph"] == "X"] == [
        ("prefill", 1_000_000),
        ("decode", 2_000_000),
    ]
