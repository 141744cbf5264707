"""Pools of KV blocks: copies, runs, bounds, the blank block."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch

from giveway.core.errors import ConfigError, DeviceFaultError
from giveway.core.ids import DeviceBlockId, HostBlockId
from giveway.runtime.backend import MemoryPool
from giveway.runtime.block_shape import BlockShape
from giveway.runtime.torch import kv_storage
from giveway.runtime.torch.kv_storage import KVStorage, available_bytes

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
        raise OSError(12, "no such piece")

    monkeypatch.setattr("mmap.mmap", no_memory)
    with pytest.raises(ConfigError, match=r"device pool .* no such piece. Lower --kv-cache-memory-bytes"):
        make_storage()


def test_a_failed_allocation_of_pytorch_is_a_configuration_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # Goal: the pool of a GPU, and host memory that CUDA would not register.
    def no_memory(*arguments: object, **options: object) -> None:
        raise RuntimeError("no such piece")

    monkeypatch.setattr("torch.empty", no_memory)
    with pytest.raises(ConfigError, match=r"host pool .* no such piece. Lower --swap-space"):
        kv_storage._blocks_of_zeros("host", (9, *SHAPE.dimensions), torch.float32, torch.device("cpu"))


def test_memory_that_torch_has_cached_on_the_gpu_counts_as_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (500, 9000))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 70)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 30)
    assert available_bytes(torch.device("cuda")) == 540


ALL_BITS = bytes(place * 7 % 256 for place in range(SHAPE.num_elements * 4))  # among them NaNs with a payload


def test_a_block_is_read_and_written_byte_by_byte() -> None:
    # Goal: no number is looked at, so that a NaN keeps its bits; and the neighbours stay as they are.
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        storage = make_storage(device)
        assert storage.block_bytes == len(ALL_BITS)
        for pool in MemoryPool:
            storage.write_block(pool, 3, memoryview(ALL_BITS))
            found = storage.read_block(pool, 3)
            assert (found.format, found.c_contiguous, found.readonly) == ("B", True, True)
            assert found == ALL_BITS
            assert not any(storage.read_block(pool, 2))
            assert not any(storage.read_block(pool, 4))
        storage.copy_out(out((3, 0)))
        assert storage.read_block(MemoryPool.HOST, 0) == ALL_BITS
        storage.copy_within([(DeviceBlockId(3), DeviceBlockId(11))])
        assert storage.read_block(MemoryPool.DEVICE, 11) == ALL_BITS


@pytest.mark.parametrize(
    "content",
    [memoryview(ALL_BITS)[:-1], memoryview(ALL_BITS + b"x"), memoryview(b""), memoryview(ALL_BITS * 2)[::2]],
    ids=["too short", "too long", "empty", "in pieces"],
)
def test_content_that_is_no_block_is_refused_and_nothing_is_written(content: memoryview) -> None:
    storage = make_storage()
    with pytest.raises(DeviceFaultError, match=r"block has 1,536 in one piece; nothing was written"):
        storage.write_block(MemoryPool.HOST, 0, content)
    assert not any(storage.read_block(MemoryPool.HOST, 0))


@pytest.mark.parametrize(("pool", "block"), [("device", -1), ("device", 12), ("host", -1), ("host", 9)])
def test_a_block_out_of_bounds_is_neither_read_nor_written(pool: str, block: int) -> None:
    # Goal: 12 is the blank block, which nobody may reach.
    storage = make_storage()
    there = f"block {block} of the {pool} pool: that pool has blocks 0 to"
    with pytest.raises(DeviceFaultError, match=there):
        storage.read_block(MemoryPool(pool), block)
    with pytest.raises(DeviceFaultError, match=there):
        storage.write_block(MemoryPool(pool), block, memoryview(ALL_BITS))
    assert content(storage, storage.blank_block) == {0.0}
    with pytest.raises(DeviceFaultError, match="has no blocks"):
        make_storage(num_host_blocks=0).read_block(MemoryPool.HOST, 0)


def within(*pairs: tuple[int, int]) -> list[tuple[DeviceBlockId, DeviceBlockId]]:
    return [(DeviceBlockId(source), DeviceBlockId(target)) for source, target in pairs]


@pytest.mark.parametrize("device", DEVICES)
def test_copies_inside_the_device_pool_happen_one_after_another(device: str) -> None:
    # Goal: one source for several targets, a chain, a block onto itself; neighbours that overlap are no exception.
    rng = random.Random(5)
    storage = make_storage(device)
    expected = fill(storage)
    for pairs in (
        within((0, 1), (1, 2), (2, 3)),
        within((7, 4), (7, 5), (6, 6)),
        *(within(*((rng.randrange(12), rng.randrange(12)) for _ in range(6))) for _ in range(20)),
    ):
        storage.copy_within(pairs)
        for source, target in pairs:
            expected[target] = expected[source]
        for block, value in expected.items():
            assert content(storage, block) == {value}
    storage.copy_within([])


@pytest.mark.parametrize("wrong", [(0, 12), (12, 0), (-1, 0), (0, -1)])
def test_a_copy_inside_the_device_pool_out_of_bounds_is_refused_before_anything_is_written(
    wrong: tuple[int, int],
) -> None:
    storage = make_storage()
    fill(storage)
    with pytest.raises(DeviceFaultError, match="blocks 0 to 11; nothing was copied"):
        storage.copy_within(within((3, 4), wrong))
    assert content(storage, 4) == {5.0}
    assert content(storage, storage.blank_block) == {0.0}
