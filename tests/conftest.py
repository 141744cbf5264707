"""Hypothesis as everybody here runs it: repeatable, and never failing on time."""

import os

# Before torch loads: on busy cores libgomp's default spinning makes a step of 20 ms take half a second.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "everyday",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("everyday")
