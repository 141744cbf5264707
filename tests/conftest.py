"""Hypothesis as everybody here runs it: repeatable, and never failing on time."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "everyday",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("everyday")
