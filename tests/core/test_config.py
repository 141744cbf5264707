"""Settings outside their ranges are refused once, at construction, with the remedy."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from giveway.core.config import CacheConfig, SchedulerConfig, blocks_for, clamp_class
from giveway.core.errors import ConfigError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_guest_looks": 0}, "max_guest_looks is 0"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "some seats would get no token"),
        ({"copy_timeout_s": 0.0}, "copy_timeout_s is 0"),
        ({"copy_timeout_s": float("nan")}, "copy_timeout_s is nan"),
    ],
)
def test_a_scheduler_setting_out_of_range_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_device_blocks": 0}, "Raise --kv-cache-memory-bytes or --num-kv-blocks"),
        ({"num_device_blocks": 1, "num_host_blocks": -1}, "num_host_blocks is -1"),
        ({"num_device_blocks": 1, "block_size": 0}, "block_size is 0"),
    ],
)
def test_a_pool_size_out_of_range_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**wrong)


def test_the_smallest_settings_of_all_are_allowed() -> None:
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=2, max_guest_looks=1)
    assert config.max_num_seqs == 1
    assert CacheConfig(1, block_size=1).num_device_slots == 1


def test_settings_do_not_change_after_construction() -> None:
    with pytest.raises(FrozenInstanceError):
        SchedulerConfig().max_num_seqs = 3  # type: ignore[misc]


@pytest.mark.parametrize(("given", "stands_for"), [(-7, 0), (0, 0), (55, 55), (100, 100), (101, 100)])
def test_a_clients_integer_is_brought_into_the_range_of_classes(given: int, stands_for: int) -> None:
    assert clamp_class(given) == stands_for


def test_blocks_are_counted_up() -> None:
    assert [blocks_for(slots, 4) for slots in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
