"""Settings outside their ranges are refused once, at construction, with the remedy."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from giveway.core.config import (
    CacheConfig,
    SchedulerConfig,
    SchedulingPolicy,
    VictimOrder,
    blocks_for,
    clamp_class,
)
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
        ({"priority_aging_s": 0.0}, "priority_aging_s is 0.0; it must be above 0 and below 1e9 seconds"),
        ({"priority_aging_s": float("nan")}, "priority_aging_s is nan"),
        ({"target_step_s": -1.0}, "target_step_s is -1.0"),
        ({"target_step_s": float("inf")}, "target_step_s is inf"),
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
        ({"num_device_blocks": 1, "num_disk_blocks": -1}, "num_disk_blocks is -1; 0 turns this tier off"),
        ({"num_device_blocks": 1, "block_size": 0}, "block_size is 0"),
        ({"num_device_blocks": 1, "cache_lead_s": -1.0}, "cache_lead_s is -1.0"),
        ({"num_device_blocks": 1, "cache_lead_s": float("nan")}, "cache_lead_s is nan"),
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


def test_without_further_words_prefixes_are_shared_tails_are_given_up_and_there_is_no_disk() -> None:
    cache, scheduler = CacheConfig(8), SchedulerConfig()
    assert cache.enable_prefix_caching
    assert (cache.num_host_blocks, cache.num_disk_blocks) == (0, 0)
    assert scheduler.allow_tails
    assert (scheduler.priority_aging_s, scheduler.target_step_s) == (None, None)


@pytest.mark.parametrize(
    ("policy", "given", "chosen"),
    [
        (SchedulingPolicy.PRIORITY, None, VictimOrder.CHEAPEST),
        (SchedulingPolicy.FCFS, None, VictimOrder.NEWEST),
        (SchedulingPolicy.FCFS, VictimOrder.LEAST_WORK, VictimOrder.LEAST_WORK),
        (SchedulingPolicy.PRIORITY, VictimOrder.NEWEST, VictimOrder.NEWEST),
    ],
)
def test_the_victim_order_follows_the_policy_unless_it_is_chosen(
    policy: SchedulingPolicy, given: VictimOrder | None, chosen: VictimOrder
) -> None:
    assert SchedulerConfig(policy=policy, victim_order=given).chosen_victim_order is chosen
