"""The fused attention paths. What only a GPU can run is run with a stand-in for the kernel, to check its arguments."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from giveway.runtime.tiny import tiny_checkpoint
from giveway.runtime.torch import load_backend
from giveway.runtime.torch.attention import AttentionShape, Chunk
from giveway.runtime.torch.attention_fast import VarlenAttention, activate_flash_attention_3, choose_fast_attention
from giveway.runtime.torch.backend import TorchBackend
from tests.runtime.backend_driver import Driver, random_tokens


def stand_in_for_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    num_splits: int | None,
) -> Tensor:
    """What torch.nn.attention.varlen documents, one request after another, in plain operations."""
    assert {each.dtype for each in (cu_seq_q, cu_seq_k, seqused_k, block_table) if each is not None} == {torch.int32}
    assert enable_gqa
    results = []
    starts = cu_seq_q.tolist()
    for index, (first, last) in enumerate(pairwise(starts)):
        if block_table is not None:
            assert seqused_k is not None
            assert cu_seq_k is None
            assert num_splits == 1
            count = int(seqused_k[index])
            keys, values = (each[block_table[index].long()].flatten(0, 1)[:count] for each in (key, value))
        else:
            assert cu_seq_k is not None
            ends = cu_seq_k.tolist()
            keys, values = (each[ends[index] : ends[index + 1]] for each in (key, value))
        assert last - first <= max_q
        assert len(keys) <= max_k
        queries = query[first:last]
        group = queries.shape[1] // keys.shape[1]
        scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(group, 1)) * queries.shape[-1] ** -0.5
        # The last query sees the last key; the window's left side counts keys before the query's own.
        place = torch.arange(last - first)[:, None] + len(keys) - (last - first)
        seen = torch.arange(len(keys)) <= place
        if window_size[0] >= 0:
            seen &= torch.arange(len(keys)) >= place - window_size[0]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        results.append(torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1)))
    return torch.cat(results)


def varlen_backend(checkpoint: Any, *, reads_block_table: bool) -> TorchBackend:
    class WithVarlen(TorchBackend):
        def _choose_attention(self) -> VarlenAttention:
            config = self._config
            shape = AttentionShape(
                config.num_heads, config.num_kv_heads, config.head_size, config.sliding_window, tile_rows=()
            )
            return VarlenAttention(shape, reads_block_table=reads_block_table)

    return WithVarlen(checkpoint, exact=False)


@pytest.mark.parametrize("reads_block_table", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_the_gpu_path_hands_the_kernel_the_right_arguments(
    monkeypatch: pytest.MonkeyPatch, reads_block_table: bool, window: int | None
) -> None:
    # Goal: chunks, decodes, a window, blocks at random places; the mates are there so that offsets differ from zero.
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in_for_varlen)
    checkpoint = tiny_checkpoint(5, sliding_window=window)
    tokens = random_tokens(5, 60, 260)
    expected = Driver(load_backend(checkpoint)).logits_in_chunks(tokens, 60)
    driver = Driver(varlen_backend(checkpoint, reads_block_table=reads_block_table))
    assert "varlen_attn" in driver.backend.description
    mates = [driver.chunk(random_tokens(seed, 3, 260), 0, driver.table(3)) for seed in range(4)]
    for chunk_size in (60, 25, 1):
        logits = driver.logits_in_chunks(tokens, chunk_size, mates)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_with_a_block_table_no_key_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Goal: a list of all keys of the batch, hundreds of thousands, is not built where no kernel reads it.
    driver = Driver(varlen_backend(tiny_checkpoint(5), reads_block_table=True))
    storage = driver.backend._storage
    assert storage is not None
    shape = AttentionShape(4, 2, 16, None, tile_rows=())
    chunks = [Chunk(0, 1, 40, driver.table(41)), Chunk(1, 3, 0, driver.table(3))]
    gathered = VarlenAttention(shape, reads_block_table=False).plan(chunks, 4, storage).gathered
    assert gathered is not None
    keys = [
        (chunk.table[place // 16], place % 16)
        for chunk, end in zip(chunks, (41, 3), strict=True)
        for place in range(end)
    ]
    assert list(zip(*(each.tolist() for each in gathered), strict=True)) == keys
    monkeypatch.setattr("giveway.runtime.torch.attention_fast._keys_of", None)  # a call would fail
    assert VarlenAttention(shape, reads_block_table=True).plan(chunks, 4, storage).gathered is None


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("chunk_size", [150, 33, 1])
def test_the_fused_cpu_path_agrees_with_the_reference(window: int | None, chunk_size: int) -> None:
    checkpoint = tiny_checkpoint(6, sliding_window=window, num_heads=6)
    tokens = random_tokens(6, 150, 260)
    expected = Driver(load_backend(checkpoint)).logits_in_chunks(tokens, 150)
    fast = Driver(load_backend(checkpoint, exact=False))
    torch.testing.assert_close(fast.logits_in_chunks(tokens, chunk_size), expected, rtol=1e-3, atol=1e-3)


def test_the_fast_attention_fits_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(4, 2, 64, None, tile_rows=((1, 4), (16, 32), (64, 128)))
    capability: Callable[[object], tuple[int, int]] = lambda device: (8, 0)  # noqa: E731
    monkeypatch.setattr("torch.cuda.get_device_capability", capability)
    cuda = torch.device("cuda")
    assert choose_fast_attention(shape, torch.device("cpu"), torch.float32).name.endswith("dot_product_attention")
    assert choose_fast_attention(shape, cuda, torch.float32).name.endswith("dot_product_attention")
    assert choose_fast_attention(shape, cuda, torch.bfloat16).name.endswith("over gathered blocks")
    assert not activate_flash_attention_3(torch.device("cpu"))
    # The right GPU without the package that carries the kernel: still gathered.
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert not activate_flash_attention_3(cuda)
