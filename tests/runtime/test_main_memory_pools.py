"""Pools of KV blocks in main memory, which need no tensor library: runs, threads, room, views."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from giveway.core.errors import ConfigError, DeviceFaultError
from giveway.core.ids import DeviceBlockId, HostBlockId
from giveway.runtime.backend import MemoryPool
from giveway.runtime.block_copies import NumpyCopier, joined_runs, pieces_of
from giveway.runtime.block_shape import BlockShape
from giveway.runtime.main_memory_pools import MainMemoryPools

BLOCK_BYTES = 1536
ALL_BITS = bytes(place * 7 % 256 for place in range(BLOCK_BYTES))


def make_pools(
    *, num_device_blocks: int = 12, num_host_blocks: int = 9, block_bytes: int = BLOCK_BYTES
) -> MainMemoryPools:
    return MainMemoryPools(
        num_device_blocks=num_device_blocks,
        num_host_blocks=num_host_blocks,
        block_bytes=block_bytes,
        copier=NumpyCopier(),
        num_blank_blocks=1,
    )


def out(*pairs: tuple[int, int]) -> list[tuple[DeviceBlockId, HostBlockId]]:
    return [(DeviceBlockId(device), HostBlockId(host)) for device, host in pairs]


def back(*pairs: tuple[int, int]) -> list[tuple[HostBlockId, DeviceBlockId]]:
    return [(HostBlockId(host), DeviceBlockId(device)) for host, device in pairs]


def numbered(pools: MainMemoryPools) -> None:
    """Give every device block its own number in all of its bytes."""
    pools.device_rows[:-1] = np.arange(pools.num_device_blocks, dtype=np.uint8)[:, None] + 1


def test_a_shape_has_as_many_elements_as_its_dimensions() -> None:
    shape = BlockShape(num_layers=3, block_size=4, num_kv_heads=2, head_size=8)
    assert shape.dimensions == (3, 2, 4, 2, 8)
    assert shape.num_elements == 3 * 2 * 4 * 2 * 8


def test_neighbouring_pairs_are_joined_into_one_copy() -> None:
    pairs = [(3, 0), (4, 1), (5, 2), (7, 3), (8, 4), (9, 6), (2, 7)]
    assert list(joined_runs(pairs)) == [(3, 0, 3), (7, 3, 2), (9, 6, 1), (2, 7, 1)]
    assert list(joined_runs([])) == []
    # Downhill neighbours are not a run: a copy goes upwards on both sides.
    assert list(joined_runs([(5, 5), (4, 4)])) == [(5, 5, 1), (4, 4, 1)]


def test_a_long_run_is_cut_into_pieces_for_two_threads() -> None:
    # Goal: 1 MiB a piece, and a larger block is a piece of its own.
    pairs = [(block, block + 5) for block in range(7)]
    third = (1 << 20) // 3
    assert list(pieces_of(pairs, third)) == [(0, 5, 3), (3, 8, 3), (6, 11, 1)]
    assert list(pieces_of(pairs[:2], 2 << 20)) == [(0, 5, 1), (1, 6, 1)]
    assert list(pieces_of([], third)) == []


def test_pools_begin_as_zeros_at_a_multiple_of_a_huge_page_with_one_block_to_spare() -> None:
    pools = make_pools()
    assert pools.device_rows.shape == (13, BLOCK_BYTES)
    assert pools.host_rows.shape == (9, BLOCK_BYTES)
    assert pools.num_bytes == (13 + 9) * BLOCK_BYTES
    for rows in (pools.device_rows, pools.host_rows):
        assert not rows.any()
        assert rows.ctypes.data % (2 << 20) == 0
    pools.close()


def test_random_copies_agree_with_a_dictionary() -> None:
    rng = random.Random(3)
    pools = make_pools()
    numbered(pools)
    on_device = {block: block + 1 for block in range(12)}
    on_host = dict.fromkeys(range(9), 0)
    for _ in range(60):
        count = rng.randint(1, 6)
        devices, hosts = rng.sample(range(12), count), rng.sample(range(9), count)
        if rng.random() < 0.5:  # in order, so that runs are joined
            devices.sort()
            hosts.sort()
        pairs = list(zip(devices, hosts, strict=True))
        if rng.random() < 0.5:
            pools.copy_out(out(*pairs))
            on_host |= {host: on_device[device] for device, host in pairs}
        else:
            pools.copy_in(back(*((host, device) for device, host in pairs)))
            on_device |= {device: on_host[host] for device, host in pairs}
        source, target = rng.randrange(12), rng.randrange(12)
        pools.copy_within([(DeviceBlockId(source), DeviceBlockId(target))])
        on_device[target] = on_device[source]
        assert [set(row) for row in pools.device_rows[:-1].tolist()] == [{on_device[block]} for block in range(12)]
        assert [set(row) for row in pools.host_rows.tolist()] == [{on_host[block]} for block in range(9)]
        assert not pools.device_rows[-1].any()


def test_a_large_copy_is_shared_with_a_second_thread_and_every_byte_arrives() -> None:
    # Goal: 512 scattered blocks of 32 KiB, more than the limit from which a second thread helps.
    pools = make_pools(num_device_blocks=600, num_host_blocks=600, block_bytes=32 << 10)
    numbers = pools.device_rows[:-1].view(np.int32)
    numbers[:] = np.arange(600)[:, None]
    order = random.Random(1).sample(range(600), 600)
    pairs = list(zip(order[:512], range(512), strict=True))
    pools.copy_out(out(*pairs))
    assert (pools.host_rows.view(np.int32)[:512] == np.array(order[:512])[:, None]).all()
    numbers[:] = 0
    pools.copy_in(back(*((host, device) for device, host in pairs)))
    assert (numbers[order[:512]] == np.array(order[:512])[:, None]).all()
    pools.copy_out([])
    pools.close()
    pools.close()


def test_a_large_copy_does_not_wait_for_a_second_thread_that_has_not_begun() -> None:
    # Goal: on busy cores the second thread may come late; here it comes only after the copy has returned.
    source, target = (np.full((200, 32 << 10), value, np.uint8) for value in (2, 0))
    may_begin = threading.Event()
    copier = NumpyCopier()
    copier._second_thread = ThreadPoolExecutor(1)
    copier._second_thread.submit(may_begin.wait)
    copier.copy([(block, block) for block in range(200)], source, target)
    assert (target == 2).all()
    may_begin.set()
    copier.close()


def test_touching_leaves_what_was_written_meanwhile_and_the_rest_zeros() -> None:
    # Goal: the thread that maps pages runs beside requests that write; 24 MiB in blocks of 96 KiB.
    pools = make_pools(num_device_blocks=200, num_host_blocks=50, block_bytes=96 << 10)
    device, host = pools.device_rows, pools.host_rows
    device[::3] = 2
    host[::3] = 3
    pools.wait_until_touched()
    assert pools.num_pending_bytes == 0
    for rows, value in ((device, 2), (host, 3)):
        assert (rows[::3] == value).all()
        assert not rows[1::3].any()
        assert not rows[2::3].any()
    pools.close()


def test_two_pools_that_fit_only_one_at_a_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Goal: pages are taken later, so the second pool must not count on what the first one is going to take.
    monkeypatch.setattr("giveway.runtime.memory.available_bytes", lambda: (13 + 8) * BLOCK_BYTES)
    with pytest.raises(ConfigError, match=r"the host pool of 9 KV blocks .* available on cpu: at most 8 blocks fit"):
        make_pools(num_device_blocks=12, num_host_blocks=9)
    make_pools(num_device_blocks=12, num_host_blocks=8).close()
    monkeypatch.setattr("giveway.runtime.memory.available_bytes", lambda: None)  # the system does not say
    make_pools(num_device_blocks=12, num_host_blocks=9).close()


def test_a_block_is_read_where_it_lies_and_outlives_the_pools() -> None:
    # Goal: no copy; and a view that somebody still holds after close() points at memory.
    pools = make_pools()
    view = pools.read_block(MemoryPool.HOST, 8)
    assert (view.format, view.c_contiguous, view.readonly) == ("B", True, True)
    pools.write_block(MemoryPool.HOST, 8, memoryview(ALL_BITS))
    assert view == ALL_BITS
    pools.close()
    assert view == ALL_BITS


def test_a_block_is_written_from_one_piece_of_any_format() -> None:
    pools = make_pools()
    pools.write_block(MemoryPool.DEVICE, 0, memoryview(bytearray(ALL_BITS)).cast("H"))
    pools.write_block(MemoryPool.HOST, 1, pools.read_block(MemoryPool.DEVICE, 0))
    assert pools.read_block(MemoryPool.HOST, 1) == ALL_BITS


def test_closed_pools_have_no_blocks() -> None:
    pools = make_pools()
    pools.close()
    assert pools.num_bytes == 0
    for use in (lambda: pools.copy_out(out((0, 0))), lambda: pools.read_block(MemoryPool.DEVICE, 0)):
        with pytest.raises(DeviceFaultError, match="has no blocks"):
            use()
