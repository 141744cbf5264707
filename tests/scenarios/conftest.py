"""Every scenario is played twice: what goes wrong without a prefix cache must not go wrong with it, and vice versa."""

from __future__ import annotations

import pytest

from tests.world import World


@pytest.fixture(autouse=True, params=[False, True], ids=["no prefix cache", "prefix cache"])
def _prefix_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "default_prefix_caching", request.param)
