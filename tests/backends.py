"""The backends that tests of every backend run on."""

from __future__ import annotations

from typing import Any

import pytest

from giveway.options import EngineOptions
from giveway.runtime import native, torch
from giveway.runtime.backend import Backend
from giveway.runtime.weights.checkpoint import Checkpoint

needs_kernels = pytest.mark.skipif(not native.is_installed(), reason="the package giveway-kernels is not installed")

NAMES = [pytest.param("torch"), pytest.param("native", marks=needs_kernels)]

# What computes by default is tried every day, the other backend on the long round: it takes several times as long.
_not_every_day = [pytest.mark.long] if native.is_installed() else []

# Everything that an answer may not depend on is tried on each of these.
OPTIONS = [
    pytest.param(EngineOptions(device="cpu", backend="torch"), id="torch", marks=_not_every_day),
    pytest.param(EngineOptions(device="cpu", backend="native", dtype="float32"), id="native", marks=needs_kernels),
    # Two threads by number: the default is one where tests run beside each other.
    pytest.param(
        EngineOptions(device="cpu", backend="native", dtype="bfloat16", num_threads=2),
        id="native-bf16",
        marks=needs_kernels,
    ),
]


def load_backend(name: str, checkpoint: Checkpoint, **settings: Any) -> Backend:
    """Load a checkpoint into the backend of that name."""
    return (
        native.load_backend(checkpoint, **settings) if name == "native" else torch.load_backend(checkpoint, **settings)
    )
