"""Hypothesis as everybody here runs it: repeatable, and never failing on time."""

import os

# Before torch loads: on busy cores libgomp's default spinning makes a step of 20 ms take half a second.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Before torch loads, too. Each process of pytest-xdist computes with its share of the cores: a second thread for which
# there is no core makes the first one wait. Tests of several threads ask for them by number.
if num_processes := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(num_processes))))

# No test learns from another, or from the user's own runs: nothing can be kept in a directory below a device.
os.environ["GIVEWAY_CACHE_DIR"] = "/dev/null/giveway"

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "everyday",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("everyday")


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Let a process of pytest-xdist report what a test of malformed text logged: half a character cannot be sent."""
    return _sendable((yield))


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _sendable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_sendable(part) for part in value)
    return value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give long tests a longer leash: a busy machine must not fail them."""
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1500))
