"""How much memory there is, by the system and by a container's limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from giveway.runtime import memory

FILES = {
    "/proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 500 kB\n",
    "/sys/fs/cgroup/memory.max": "400000\n",
    "/sys/fs/cgroup/memory.current": "300000\n",
    "/sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 50000\n",
}


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """The files of a system, which a test may change."""
    files = dict(FILES)

    def place(name: str) -> Path:
        path = tmp_path / name.replace("/", "-")
        path.unlink(missing_ok=True)
        if name in files:
            path.write_text(files[name])
        return path

    monkeypatch.setattr(memory, "Path", place)
    return files


def test_the_least_of_system_and_container_is_available(system: dict[str, str]) -> None:
    assert memory.available_bytes() == 400_000 - 300_000 + 50_000
    system["/proc/meminfo"] = "MemAvailable: 100 kB\n"
    assert memory.available_bytes() == 100 * 1024


def test_a_container_without_a_limit_leaves_what_the_system_has(system: dict[str, str]) -> None:
    system["/sys/fs/cgroup/memory.max"] = "max\n"
    assert memory.available_bytes() == 500 * 1024
    for name in [name for name in system if "cgroup" in name]:
        del system[name]
    assert memory.available_bytes() == 500 * 1024


def test_a_container_above_its_limit_has_nothing(system: dict[str, str]) -> None:
    system["/sys/fs/cgroup/memory.current"] = "500000\n"
    assert memory.available_bytes() == 0


def test_a_system_that_does_not_say_is_told_apart_from_one_without_memory(system: dict[str, str]) -> None:
    system.clear()
    assert memory.available_bytes() is None
