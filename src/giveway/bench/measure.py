"""How figures are taken here: alternating, medians with spread, on a machine described by its public kind."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from giveway.processor import processor_model


@dataclass(frozen=True, slots=True)
class Sample:
    """Median and spread of repeated measurements, in their unit."""

    median: float
    low: float
    high: float

    @property
    def spread_pct(self) -> float:
        """Half the distance between lowest and highest, in percent of the median."""
        return 100 * (self.high - self.low) / 2 / self.median if self.median else 0.0


def sample(values: Sequence[float]) -> Sample:
    """Sum up repeated measurements; at least one."""
    return Sample(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a benchmark, for people and for --json."""

    title: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Return what --json writes."""
        return {"machine": describe_machine(), "settings": self.settings, "rows": self.rows}


def describe_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Return the public kind of this machine: CPU model, cores, versions. Nothing that names the machine itself."""
    return {
        "cpu": processor_model(cpuinfo),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "giveway": _version("giveway"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
