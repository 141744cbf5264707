"""Pools of KV blocks: copies, runs, bounds, the blank block."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch

from giveway.core.errors import ConfigError, DeviceFaultError
from giveway.core.ids import DeviceBlockId, HostBlockId
from giveway.runtime.torch import kv_storage
from giveway.runtime.torch.kv_storage import BlockShape, KVStorage, available_bytes, joined_runs

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
    with pytest.raises(
        ConfigError, match=r"the device pool of \d+ KV blocks needs .* MiB .* at most \d+ blocks fit. Lower --kv"
    ):
        make_storage(num_device_blocks=10**9)
    with pytest.raises(ConfigError, match=r"the host pool .* Lower --swap-space"):
        make_storage(num_host_blocks=10**9)


def test_a_pool_without_host_blocks_is_fine() -> None:
    storage = make_storage(num_host_blocks=0)
    storage.copy_out([])
    with pytest.raises(DeviceFaultError, match="has no blocks"):
        storage.copy_out(out((0, 0)))


@needs_cuda
def test_the_host_pool_is_pinned_on_cuda() -> None:
    assert make_storage("cuda").host_is_pinned


@needs_cuda
def test_a_closed_host_pool_is_no_longer_registered() -> None:
    for _ in range(3):
        storage = make_storage("cuda", num_host_blocks=1000)
        pool = storage._host
        assert pool.is_pinned()
        storage.close()
        assert not pool.is_pinned()


class CudaRuntime:
    """Stands in for the CUDA runtime: what it was told, and the error that it answers with."""

    def __init__(self, failure: int = 0) -> None:
        self.failure = failure
        self.calls: list[tuple[object, ...]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append(("register", address, num_bytes, flags))
        return self.failure

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return self.failure


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    stand_in = CudaRuntime()
    monkeypatch.setattr("torch.cuda.cudart", lambda: stand_in)
    return stand_in


def test_the_host_pool_is_registered_as_large_as_it_is_and_unregistered_once(runtime: CudaRuntime) -> None:
    # Goal: PyTorch's own pinned memory takes a power of two; and memory still registered when freed is a trap.
    storage = make_storage(num_host_blocks=9)
    storage._pin_host_pool()
    address = storage._host.data_ptr()
    assert runtime.calls == [("register", address, 9 * SHAPE.num_elements * 4, 1)]
    storage.close()
    storage.close()
    assert runtime.calls[1:] == [("unregister", address)]
    assert (storage.num_device_bytes, storage.num_host_bytes) == (0, 0)
    with pytest.raises(DeviceFaultError, match="no blocks"):
        storage.copy_out(out((0, 0)))


def test_a_host_pool_that_nobody_closed_is_unregistered_before_it_is_freed(runtime: CudaRuntime) -> None:
    storage = make_storage()
    storage._pin_host_pool()
    del storage
    assert [call[0] for call in runtime.calls] == ["register", "unregister"]


def test_a_refused_registration_falls_back_to_pinned_memory_and_says_so_once(
    runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = make_storage(num_host_blocks=9)
    runtime.failure = 2
    whole = kv_storage._blocks_of_zeros
    asked: list[Any] = []

    def without_pinning(*arguments: Any, pin_memory: bool = False) -> torch.Tensor:
        asked.append((arguments[1], pin_memory))
        return whole(*arguments)

    monkeypatch.setattr(kv_storage, "_blocks_of_zeros", without_pinning)
    with caplog.at_level(logging.WARNING, logger="giveway"):
        storage._pin_host_pool()
        storage.close()
    assert asked == [((9, *SHAPE.dimensions), True)]
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        f"CUDA could not register the host pool of {9 * SHAPE.num_elements * 4} bytes (error 2)"
    ]
    assert [call[0] for call in runtime.calls] == ["register"]  # what was not registered is not unregistered


def test_an_allocation_that_fails_is_a_configuration_error_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*arguments: object, **options: object) -> None:
        raise RuntimeError("no such piece")

    monkeypatch.setattr("torch.empty", no_memory)
    with pytest.raises(ConfigError, match=r"device pool .* no such piece. Lower --kv-cache-memory-bytes"):
        make_storage()


def test_memory_that_torch_has_cached_on_the_gpu_counts_as_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (500, 9000))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 70)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 30)
    assert available_bytes(torch.device("cuda")) == 540


def test_a_large_copy_is_shared_with_a_second_thread_and_every_byte_arrives() -> None:
    # Goal: 512 scattered blocks of 32 KiB, more than the limit from which a second thread helps.
    shape = BlockShape(num_layers=4, block_size=16, num_kv_heads=4, head_size=16)
    storage = KVStorage(
        shape, num_device_blocks=600, num_host_blocks=600, dtype=torch.float32, device=torch.device("cpu")
    )
    device, host = storage.pools()
    device.copy_(torch.arange(600, dtype=torch.float32).view(-1, 1, 1, 1, 1, 1).expand_as(device))
    order = torch.randperm(600, generator=torch.Generator().manual_seed(1)).tolist()
    pairs = [(DeviceBlockId(block), HostBlockId(place)) for place, block in enumerate(order[:512])]
    storage.copy_out(pairs)
    assert all(bool((host[place] == block).all()) for block, place in pairs)
    device.zero_()
    storage.copy_in([(place, block) for block, place in pairs])
    assert all(bool((device[block] == block).all()) for block, _ in pairs)
    storage.copy_out([])
    storage.close()
    storage.close()
