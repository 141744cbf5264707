"""The public kind of the processor: what machines of one model share, and nothing that names this one."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path


def processor_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name of the processor; its architecture where the system does not say."""
    with suppress(OSError), cpuinfo.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine()
