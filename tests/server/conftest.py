"""Servers that many tests share. Each test leaves them idle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.running import Running, running


@pytest.fixture(scope="session")
def tiny_server() -> Iterator[Running]:
    """The tiny model: real texts, real probabilities, small and fast."""
    with running(device="cpu", model="tiny", num_kv_blocks=64, swap_space=1 << 20) as server:
        yield server


@pytest.fixture
def tiny(tiny_server: Running) -> Iterator[Running]:
    yield tiny_server
    tiny_server.until_idle()


@pytest.fixture(scope="session")
def dry_server() -> Iterator[Running]:
    """The dry run: no model, every KV slot checked."""
    with running(num_kv_blocks=64) as server:
        yield server


@pytest.fixture
def dry(dry_server: Running) -> Iterator[Running]:
    yield dry_server
    dry_server.until_idle()
