"""PyTorch's fused attention kernels: faster than the reference, and without its promise of equal bits.

On CPU, and on CUDA in float32, `scaled_dot_product_attention` over gathered blocks. On CUDA in bfloat16 or float16 one
`varlen_attn` for the whole batch: with FlashAttention 3 (compute capability 9.0 and the package `flash_attn_interface`)
it reads the pool through the block table; FlashAttention 2, which PyTorch carries, cannot, so the blocks of the
batch are gathered first.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from giveway.runtime.torch.attention import PIECE_TOKENS, Attention, AttentionShape, Bucket, BucketAttention, Chunk
from giveway.runtime.torch.kv_storage import KVStorage


def choose_fast_attention(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> Attention:
    """Return the fastest attention for this device and dtype."""
    if device.type == "cuda" and dtype is not torch.float32:
        return VarlenAttention(shape, reads_block_table=activate_flash_attention_3(device))
    return BucketAttention(shape, dtype, attend_bucket=attend_fused, name="PyTorch scaled_dot_product_attention")


def activate_flash_attention_3(device: torch.device) -> bool:
    """Switch PyTorch to FlashAttention 3 where the device and the installation have it; returns whether they do."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if importlib.util.find_spec("flash_attn_interface") is None:
        return False
    torch.nn.attention.activate_flash_attention_impl("FA3")
    return True


def attend_fused(queries: Tensor, keys: Tensor, values: Tensor, bucket: Bucket, scale: float) -> Tensor:
    """Attend for one bucket in one call; arguments and result are those of attend_in_pieces."""
    tiles, rows, pieces, size = bucket.num_tiles, bucket.num_rows, bucket.num_pieces, queries.shape[-1]
    queries = queries.view(tiles, -1, pieces, rows, size)[:, :, 0]  # the pieces hold copies of the same queries
    keys, values = (each.view(tiles, -1, pieces * PIECE_TOKENS, size) for each in (keys, values))
    mask = bucket.bias.view(tiles, 1, rows, -1).to(queries.dtype)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """Arguments of varlen_attn for one forward pass. N: requests."""

    num_rows: int  # without padding
    query_starts: Tensor  # [N + 1] int32, rows
    key_ends: Tensor  # [N] int32, tokens
    key_starts: Tensor  # [N + 1] int32: the same, summed up
    longest_query: int
    longest_key: int
    block_table: Tensor  # [N, blocks] int32, filled up with the blank block
    gathered: tuple[Tensor, Tensor] | None  # block and offset of every key, [sum of key_ends]; None: the table is read


class VarlenAttention:
    """One fused call for the whole batch, on CUDA."""

    def __init__(self, shape: AttentionShape, *, reads_block_table: bool) -> None:
        self._shape = shape
        self._reads_block_table = reads_block_table
        # Causal, and the window counts the query itself.
        self._window = (-1 if shape.window is None else shape.window - 1, 0)

    @property
    def name(self) -> str:
        """Name for people."""
        return "PyTorch varlen_attn " + ("over the block table" if self._reads_block_table else "over gathered blocks")

    def plan(self, chunks: Sequence[Chunk], padded_rows: int, storage: KVStorage) -> VarlenPlan:
        """Lay the requests of the batch end to end."""
        del padded_rows
        block_size = storage.shape.block_size
        counts = np.array([chunk.num_rows for chunk in chunks], np.int32)
        ends = np.array([chunk.start + chunk.num_rows for chunk in chunks], np.int32)
        tables = np.full((len(chunks), -(-int(ends.max()) // block_size)), storage.blank_block, np.int32)
        for row, (chunk, end) in enumerate(zip(chunks, ends.tolist(), strict=True)):
            used = -(-end // block_size)
            tables[row, :used] = chunk.table[:used]
        device = storage.device
        return VarlenPlan(
            num_rows=int(counts.sum()),
            query_starts=_starts(counts, device),
            key_ends=torch.from_numpy(ends).to(device),
            key_starts=_starts(ends, device),
            longest_query=int(counts.max()),
            longest_key=int(ends.max()),
            block_table=torch.from_numpy(tables).to(device),
            gathered=None if self._reads_block_table else _keys_of(tables, ends.tolist(), block_size, device),
        )

    def attend(self, heads: Tensor, layer: int, plan: object, storage: KVStorage) -> Tensor:
        """Attend for all requests at once; see Attention.attend."""
        from torch.nn.attention.varlen import varlen_attn

        if not isinstance(plan, VarlenPlan):
            raise TypeError(f"a plan of another attention: {type(plan).__name__}")
        keys, values = storage.blocks(layer, 0), storage.blocks(layer, 1)
        is_paged = plan.gathered is None
        if plan.gathered is not None:
            keys, values = keys[plan.gathered], values[plan.gathered]
        attended = varlen_attn(
            heads[: plan.num_rows, : self._shape.num_heads].contiguous(),
            keys,
            values,
            plan.query_starts,
            None if is_paged else plan.key_starts,
            plan.longest_query,
            plan.longest_key,
            window_size=self._window,
            enable_gqa=True,
            seqused_k=plan.key_ends if is_paged else None,
            block_table=plan.block_table if is_paged else None,
            num_splits=1 if is_paged else None,
        )
        assert isinstance(attended, Tensor)  # a tuple only when return_aux is given
        result = heads.new_zeros(heads.shape[0], self._shape.num_heads * self._shape.head_size)
        result[: plan.num_rows] = attended.flatten(1)
        return result


def _keys_of(
    tables: np.typing.NDArray[np.int32], ends: Sequence[int], block_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Block and offset of every key of the batch, request after request; once here, and not in every layer."""
    positions = [np.arange(end) for end in ends]
    blocks = np.concatenate([table[inside // block_size] for table, inside in zip(tables, positions, strict=True)])
    offsets = np.concatenate(positions) % block_size
    return torch.from_numpy(blocks.astype(np.int64)).to(device), torch.from_numpy(offsets).to(device)


def _starts(counts: np.typing.NDArray[np.int32], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], counts.cumsum()]).astype(np.int32)).to(device)
