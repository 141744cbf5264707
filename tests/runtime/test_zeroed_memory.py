"""Memory of zeros: alignment, huge pages, touching beside writers, lifetime."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from giveway.runtime.zeroed_memory import BackgroundTouch, ZeroedMemory

MIB = 1 << 20
HUGE = 2 * MIB
HAS_SMAPS = Path("/proc/self/smaps").exists()
HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists()


def field_of(memory: ZeroedMemory, name: str) -> str:
    """What the system says of the mapping in which this memory begins."""
    address, is_inside = memory.array.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            is_inside = low <= address < high
        elif is_inside and first == f"{name}:":
            return rest.strip()
    raise AssertionError(f"the memory is in no mapping with a field {name}")


@pytest.mark.parametrize("num_bytes", [0, 1, 4097, HUGE - 1, HUGE, 5 * MIB + 3])
def test_it_has_the_size_asked_for_begins_with_a_huge_page_and_is_zero(num_bytes: int) -> None:
    memory = ZeroedMemory(num_bytes)
    assert memory.num_bytes == len(memory.array) == num_bytes
    assert memory.array.ctypes.data % HUGE == 0
    assert not memory.array.any()
    memory.array[:] = 255
    assert int(memory.array.sum()) == 255 * num_bytes


@pytest.mark.skipif(not (HAS_SMAPS and HAS_HUGE_PAGES), reason="needs a system with transparent huge pages")
def test_huge_pages_are_asked_for_where_one_fits() -> None:
    assert "hg" in field_of(ZeroedMemory(2 * HUGE), "VmFlags").split()
    assert "hg" not in field_of(ZeroedMemory(HUGE - 1), "VmFlags").split()


def test_touching_changes_nothing_and_comes_to_an_end() -> None:
    memories = [ZeroedMemory(5 * MIB + 3), ZeroedMemory(0), ZeroedMemory(3 * MIB)]
    memories[0].array[-3:] = 7
    touch = BackgroundTouch(memories)
    memories[2].array[::4096] = 9
    touch.wait()
    assert touch.num_pending_bytes == 0
    assert int(memories[0].array.sum()) == 3 * 7
    assert int(memories[2].array.sum()) == 9 * len(memories[2].array[::4096])
    touch.stop()
    touch.stop()


class Madvise:
    """Stands in for the system call: answers, and lets the test stop the thread in between."""

    def __init__(self, answers: list[int]) -> None:
        self.answers = answers
        self.calls: list[tuple[int, int, int]] = []
        self.may_go_on = threading.Event()
        self.is_called = threading.Event()

    def __call__(self, address: int, size: int, advice: int) -> int:
        self.is_called.set()
        self.may_go_on.wait()
        self.calls.append((address, size, advice))
        return self.answers.pop(0)


def stand_in(monkeypatch: pytest.MonkeyPatch, *answers: int) -> Madvise:
    madvise = Madvise(list(answers))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(madvise=madvise))
    return madvise


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such call")


@linux_only
def test_pages_are_touched_upwards_one_huge_page_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    madvise = stand_in(monkeypatch, 0, 0, 0)
    memories = [ZeroedMemory(3 * MIB), ZeroedMemory(5)]
    touch = BackgroundTouch(memories)
    assert touch.num_pending_bytes == 3 * MIB + 5
    madvise.may_go_on.set()
    touch.wait()
    first, second = (memory.array.ctypes.data for memory in memories)
    assert madvise.calls == [(first, HUGE, 23), (first + HUGE, MIB, 23), (second, 5, 23)]
    assert touch.num_pending_bytes == 0


@linux_only
def test_a_system_that_refuses_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Goal: an older system, or too little memory; nothing is pending then, and pages come where they are written.
    madvise = stand_in(monkeypatch, -1)
    madvise.may_go_on.set()
    touch = BackgroundTouch([ZeroedMemory(3 * MIB), ZeroedMemory(5)])
    touch.wait()
    assert len(madvise.calls) == 1
    assert touch.num_pending_bytes == 0


@linux_only
def test_stopping_waits_for_the_page_under_way_and_no_further_one(monkeypatch: pytest.MonkeyPatch) -> None:
    madvise = stand_in(monkeypatch, 0, 0, 0)
    touch = BackgroundTouch([ZeroedMemory(5 * MIB)])
    madvise.is_called.wait()
    stopping = threading.Thread(target=touch.stop)
    stopping.start()
    while not touch._is_stopped:
        time.sleep(0)
    assert stopping.is_alive()
    madvise.may_go_on.set()
    stopping.join()
    assert len(madvise.calls) == 1


@linux_only
def test_stopping_from_the_thread_itself_does_not_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    # Goal: a garbage collection runs in any thread, and what it collects may be the owner of this one.
    found: list[Any] = []

    def stops(address: int, size: int, advice: int) -> int:
        while not found:
            time.sleep(0)
        found[0].stop()
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(madvise=stops))
    found.append(BackgroundTouch([ZeroedMemory(5 * MIB)]))
    found[0].wait()
    assert found[0].num_pending_bytes == 0


def test_memory_is_given_back_when_nobody_views_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    # Goal: touching holds it no longer than it runs, and a view of a view is enough to keep it.
    mappings: list[weakref.ref[mmap.mmap]] = []

    class Watched(mmap.mmap):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            mappings.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Watched)
    memory = ZeroedMemory(3 * MIB)
    touch = BackgroundTouch([memory])
    part = memory.array[7:9][:1]
    touch.wait()
    del memory
    gc.collect()
    part[0] = 1
    assert mappings[0]() is not None
    del part
    gc.collect()
    assert mappings[0]() is None
