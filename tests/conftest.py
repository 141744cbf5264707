"""Hypothesis as everybody here runs it: repeatable, and never failing on time."""

import os

# Before torch loads: on busy cores libgomp's default spinning makes a step of 20 ms take half a second.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# No test learns from another, or from the user's own runs: nothing can be kept in a directory below a device.
os.environ["GIVEWAY_CACHE_DIR"] = "/dev/null/giveway"

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give long tests a longer leash: a busy machine must not fail them."""
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1500))
