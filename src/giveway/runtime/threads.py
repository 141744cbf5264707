"""How many threads a backend computes with, and how they wait for each other. Needs no tensor library."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from giveway.core.errors import ConfigError

# As many as the kernels take (native/src/checks.h). A process that asks for more threads than the system gives it ends
# at once, without a word from us.
_MOST_THREADS = 1024

# OpenMP's threads wait for each other by spinning, by default for milliseconds. When another process wants the cores,
# the thread that is waited for does not run meanwhile: a step of 20 ms was seen to take 500. Ten thousand turns, some
# tens of microseconds, are as fast on a quiet machine and harmless on a busy one.
_SPIN_TURNS = "10000"


def limit_spinning() -> None:
    """Keep OpenMP's threads from spinning long for each other; call before torch or the native kernels are imported.

    Sets the environment variable GOMP_SPINCOUNT unless it, or OMP_WAIT_POLICY, is set.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_TURNS)


def check_num_threads(num_threads: int | None) -> None:
    """Raise ConfigError for a number of threads that no backend can have; None: for the number in OMP_NUM_THREADS."""
    name, wanted = "num_threads", num_threads
    if wanted is None:
        name, wanted = "OMP_NUM_THREADS", _wanted_by_environment()
    if wanted is not None and not 1 <= wanted <= _MOST_THREADS:
        raise ConfigError(f"{name} is {wanted}; it must be from 1 to {_MOST_THREADS}")


def _wanted_by_environment() -> int | None:
    """Return OMP_NUM_THREADS; None where it is not set, or no number above 0: OpenMP passes over it then."""
    with suppress(KeyError, ValueError):
        if (wanted := int(os.environ["OMP_NUM_THREADS"].split(",")[0])) > 0:
            return wanted
    return None


def default_num_threads(system: Path = Path("/sys")) -> int:
    """Return OMP_NUM_THREADS where it is set, else the physical cores that this process and its container may use.

    Two threads on one core share its multiply-add units, so a second one adds waiting and no speed. Raises ConfigError
    when OMP_NUM_THREADS is more than any backend can have.
    """
    check_num_threads(None)
    if (wanted := _wanted_by_environment()) is not None:
        return wanted
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = set()
    for processor in usable:
        siblings = system / f"devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        with suppress(OSError):
            cores.add(siblings.read_text().strip())
    num_cores = len(cores) or len(usable)
    return max(1, min(num_cores, _cores_of_container(system) or num_cores))


def _cores_of_container(system: Path) -> int | None:
    """Whole cores that the time limit of a container is worth; None: there is no limit."""
    with suppress(OSError, ValueError):
        quota, period = (system / "fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    return None
