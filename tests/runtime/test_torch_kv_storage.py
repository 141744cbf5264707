"""Pools of KV blocks: copies, runs, bounds, the blank block."""

from __future__ import annotations

import random

import pytest
import torch

from giveway.core.errors import ConfigError, DeviceFaultError
from giveway.core.ids import DeviceBlockId, HostBlockId
from giveway.runtime.torch.kv_storage import BlockShape, KVStorage, joined_runs

SHAPE = BlockShape(num_layers=3, block_size=4, num_kv_heads=2, head_size=8)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


def make_storage(device: str = "cpu", *, num_device_blocks: int = 12, num_host_blocks: int = 9) -> KVStorage:
    return KVStorage(
        SHAPE,
        num_device_blocks=num_device_blocks,
        num_host_blocks=num_host_blocks,
        dtype=torch.float32,
        device=torch.device(device),
    )


def fill(storage: KVStorage) -> dict[int, float]:
    """Give every device block a value of its own, in all layers."""
    for layer in range(SHAPE.num_layers):
        for which in (0, 1):
            values = torch.arange(storage.num_device_blocks, dtype=torch.float32) + 1
            storage.blocks(layer, which)[:-1] = values.to(storage.device).view(-1, 1, 1, 1)
    return {block: block + 1.0 for block in range(storage.num_device_blocks)}


def content(storage: KVStorage, block: int) -> set[float]:
    layers = [storage.blocks(layer, which)[block] for layer in range(SHAPE.num_layers) for which in (0, 1)]
    return set(torch.stack(layers).flatten().tolist())


def out(*pairs: tuple[int, int]) -> list[tuple[DeviceBlockId, HostBlockId]]:
    return [(DeviceBlockId(device), HostBlockId(host)) for device, host in pairs]


def back(*pairs: tuple[int, int]) -> list[tuple[HostBlockId, DeviceBlockId]]:
    return [(HostBlockId(host), DeviceBlockId(device)) for host, device in pairs]


@pytest.mark.parametrize("device", DEVICES)
def test_random_copies_agree_with_a_dictionary(device: str) -> None:
    # Goal: whatever the order and the runs, every block ends with the value that a plain model says.
    rng = random.Random(3)
    storage = make_storage(device)
    on_device = fill(storage)
    on_host = dict.fromkeys(range(storage.num_host_blocks), 0.0)
    for _ in range(40):
        count = rng.randint(1, 6)
        devices = rng.sample(range(storage.num_device_blocks), count)
        hosts = rng.sample(range(storage.num_host_blocks), count)
        if rng.random() < 0.5:  # in order, so that runs are joined
            devices.sort()
            hosts.sort()
        if rng.random() < 0.5:
            storage.copy_out(out(*zip(devices, hosts, strict=True)))
            on_host |= {host: on_device[block] for block, host in zip(devices, hosts, strict=True)}
        else:
            storage.copy_in(back(*zip(hosts, devices, strict=True)))
            on_device |= {block: on_host[host] for block, host in zip(devices, hosts, strict=True)}
        for block, value in on_device.items():
            assert content(storage, block) == {value}
        assert content(storage, storage.blank_block) == {0.0}


def test_neighbouring_pairs_are_joined_into_one_copy() -> None:
    pairs = [(3, 0), (4, 1), (5, 2), (7, 3), (8, 4), (9, 6), (2, 7)]
    assert list(joined_runs(pairs)) == [(3, 0, 3), (7, 3, 2), (9, 6, 1), (2, 7, 1)]
    assert list(joined_runs([])) == []
    # Downhill neighbours are not a run: a copy goes upwards on both sides.
    assert list(joined_runs([(5, 5), (4, 4)])) == [(5, 5, 1), (4, 4, 1)]


@pytest.mark.parametrize(
    "pairs",
    [[(0, 0), (12, 1)], [(0, 0), (1, 9)], [(-1, 0)], [(0, -1)]],
    ids=["device block beyond", "host block beyond", "negative device block", "negative host block"],
)
def test_a_copy_out_of_bounds_is_refused_before_anything_is_written(pairs: list[tuple[int, int]]) -> None:
    # Goal: the blank block (12 here) can never be copied over or out, and a bad pair spoils no good one.
    storage = make_storage()
    fill(storage)
    with pytest.raises(DeviceFaultError, match="nothing was copied"):
        storage.copy_out(out(*pairs))
    with pytest.raises(DeviceFaultError, match="nothing was copied"):
        storage.copy_in(back(*((host, device) for device, host in pairs)))
    assert content(storage, 0) == {1.0}
    storage.copy_in(back((0, 1)))
    assert content(storage, 1) == {0.0}  # the host block was never written


def test_a_slot_is_found_where_it_is_written() -> None:
    # Goal: token_rows (writing), head_rows (reading) and blocks (the documented layout) name the same memory.
    storage = make_storage()
    layer, which, block, offset = 2, 1, 5, 3
    row = block * SHAPE.num_layers * 2 * SHAPE.block_size + offset
    values = torch.arange(16.0)
    storage.token_rows(layer, which).index_copy_(0, torch.tensor([row]), values.view(1, -1))
    assert torch.equal(storage.blocks(layer, which)[block, offset].flatten(), values)
    heads = torch.tensor([row * SHAPE.num_kv_heads, row * SHAPE.num_kv_heads + 1])
    assert torch.equal(storage.head_rows(layer, which)[heads].flatten(), values)
    total = sum(storage.blocks(each, part).abs().sum() for each in range(SHAPE.num_layers) for part in (0, 1))
    assert float(total) == float(values.sum())


def test_pools_too_large_for_the_memory_are_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"the device pool of \d+ KV blocks needs .* MiB .* at most \d+ blocks fit"):
        make_storage(num_device_blocks=10**9)
    with pytest.raises(ConfigError, match=r"the host pool .* Lower the number of host blocks"):
        make_storage(num_host_blocks=10**9)


def test_a_pool_without_host_blocks_is_fine() -> None:
    storage = make_storage(num_host_blocks=0)
    storage.copy_out([])
    with pytest.raises(DeviceFaultError, match="has no blocks"):
        storage.copy_out(out((0, 0)))


@needs_cuda
def test_the_host_pool_is_pinned_on_cuda() -> None:
    assert make_storage("cuda").host_is_pinned
