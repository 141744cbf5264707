"""The compiled kernels on every instruction set that runs here; where they are not installed, nothing is tested."""

from __future__ import annotations

import pytest

try:
    from giveway_kernels import instruction_sets
except ImportError:
    SETS = [
        pytest.param("", marks=pytest.mark.skip(reason="giveway-kernels is not installed: `make kernels` builds it"))
    ]
else:
    SETS = [pytest.param(name) for name, why_not in instruction_sets() if not why_not]


@pytest.fixture(params=SETS)
def isa(request: pytest.FixtureRequest) -> str:
    """Name of an instruction set that runs here: a test that takes it runs once on each."""
    name: str = request.param
    return name


@pytest.fixture(params=["f32", "bf16"])
def compute(request: pytest.FixtureRequest) -> str:
    """What activations and weights are rounded to before they are multiplied."""
    name: str = request.param
    return name
