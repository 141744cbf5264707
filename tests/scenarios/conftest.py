"""Every scenario is played twice: what goes wrong without a prefix cache must not go wrong with it, and vice versa.

A module whose tests count copies one by one, or choose for themselves, says so: PREFIX_CACHE = (False,).
"""

from __future__ import annotations

import pytest

from tests.world import World


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    modes = getattr(metafunc.module, "PREFIX_CACHE", (False, True))
    names = ["prefix cache" if mode else "no prefix cache" for mode in modes]
    metafunc.parametrize("_prefix_cache", modes, ids=names, indirect=True)


@pytest.fixture(autouse=True)
def _prefix_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "default_prefix_caching", request.param)
