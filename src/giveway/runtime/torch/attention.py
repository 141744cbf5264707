"""Attention over the block table: the plan of one forward pass, and the reference that computes it.

A chunk is cut into tiles of query positions. A tile attends to the pieces of 128 KV positions that reach from position
0 to its own end. Tiles of one size with the same number of pieces (rounded up a little) form a *bucket*, and a bucket
is computed by a dozen operations, however many requests it holds. How a row is computed never depends on the batch:
every matrix product of the reference is a batch of problems of one shape, pieces begin at fixed positions, and partial
results are folded in a fixed order, so that zeros from rounding up change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from giveway.core.errors import ConfigError
from giveway.core.ids import DeviceBlockId
from giveway.runtime.model_config import ModelConfig
from giveway.runtime.torch.exact_ops import fold_halves, products_agree
from giveway.runtime.torch.kv_storage import KVStorage

PIECE_TOKENS = 128  # KV positions of one piece; changing it changes answers in the last bits
TILES = (1, 16, 64)  # query positions of a tile: a decode, the end of a chunk, the body of a chunk

# Bounds of a bucket's temporaries (elements; scores about the size of a cache): more are computed in several parts.
_LARGEST_SCORES = 1 << 20
_LARGEST_GATHER = 1 << 24

Ints = npt.NDArray[np.int64]


class Chunk(NamedTuple):
    """Consecutive rows of one request in the batch."""

    first_row: int
    num_rows: int
    start: int  # position of the first row
    table: Sequence[DeviceBlockId]


Tile = Chunk  # a part of a chunk, at most as many rows as its tile size


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the plan needs to know of the model and of the machine."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None
    tile_rows: tuple[tuple[int, int], ...]  # (query positions, rows of a product: positions * heads a KV head, padded)

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tiles computed together. I tiles, M rows of a product, P pieces of L positions, T = P * L."""

    num_tiles: int
    num_rows: int  # M
    num_pieces: int  # P
    query_rows: Tensor  # [I * kv_heads * P * M] rows of [rows * (heads + kv_heads), head_size]
    kv_rows: Tensor  # [I * kv_heads * T] rows of KVStorage.head_rows
    bias: Tensor  # [I, 1, M, P, L] float32: 0 where a query sees a key, else -infinity


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The attention of one forward pass, the same for every layer."""

    buckets: tuple[Bucket, ...]
    output_rows: Tensor  # [padded rows * heads] rows of the buckets' concatenated results


# Gathered queries, keys and values of a bucket, and the scale of the scores -> its result; see attend_in_pieces.
AttendBucket = Callable[[Tensor, Tensor, Tensor, Bucket, float], Tensor]


class Attention(Protocol):
    """One way to compute attention."""

    @property
    def name(self) -> str:
        """Name for people."""

    def plan(self, chunks: Sequence[Chunk], padded_rows: int, storage: KVStorage) -> object:
        """Work out everything that is the same for all layers."""

    def attend(self, heads: Tensor, layer: int, plan: object, storage: KVStorage) -> Tensor:
        """Attend with turned heads [padded rows, heads + kv_heads, head_size] -> [padded rows, heads * head_size]."""


def make_attention_shape(config: ModelConfig, device: torch.device, *, exact: bool) -> AttentionShape:
    """Choose the rows of a product for each tile size; with `exact`, only ones shown to agree bit for bit.

    Raises ConfigError when not even the larger tiles agree on this machine.
    """
    group = config.num_heads // config.num_kv_heads
    rows = [-(-tile * group // 4) * 4 for tile in TILES]
    tile_rows = list(zip(TILES, rows, strict=True))
    if exact:
        sides = ((config.head_size, PIECE_TOKENS, True), (PIECE_TOKENS, config.head_size, False))
        agreeing = [
            set(products_agree(rows, inner=inner, out=out, device=device, transposed=transposed))
            for inner, out, transposed in sides
        ]
        tile_rows = [(tile, count) for tile, count in tile_rows if all(count in found for found in agreeing)]
        if not tile_rows:
            raise ConfigError(
                f"exact=True: batched products of {rows[-1]} x {config.head_size} x {PIECE_TOKENS} do not repeat bit "
                f"for bit on {device}. Use exact=False."
            )
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        window=config.sliding_window,
        tile_rows=tuple(tile_rows),
    )


def cut_into_tiles(chunk: Chunk, sizes: Sequence[int]) -> Iterator[tuple[int, Tile]]:
    """Cut a chunk into tiles; yields the tile size (one of ascending `sizes`) and the tile, which may be shorter."""
    done = 0
    while done < chunk.num_rows:
        rest = chunk.num_rows - done
        size = next((size for size in sizes if size >= rest), sizes[-1])
        taken = min(size, rest)
        yield size, Tile(chunk.first_row + done, taken, chunk.start + done, chunk.table)
        done += taken


def num_pieces(num_tokens: int, *, is_rounded: bool) -> int:
    """Pieces that cover `num_tokens` KV positions; `is_rounded`: up to 1, 2, 3, 4, 6, 8 ..., for few buckets.

    Rounding pays for small tiles, of which a batch has many; a large one costs more than the calls that it would save.
    """
    pieces = -(-num_tokens // PIECE_TOKENS)
    if not is_rounded:
        return pieces
    power = 1 << (pieces - 1).bit_length()
    return power * 3 // 4 if power >= 4 and pieces <= power * 3 // 4 else power


def kv_row_index(tiles: Sequence[Tile], num_tokens: int, storage: KVStorage) -> Ints:
    """Row in KVStorage.head_rows of every (tile, KV head, position below num_tokens): [I, kv_heads, num_tokens].

    Positions that hold no token of the tile's request yet lead to the blank block.
    """
    shape = storage.shape
    block_rows = shape.num_layers * 2 * shape.block_size * shape.num_kv_heads
    width = -(-num_tokens // shape.block_size)
    tables = np.full((len(tiles), width), storage.blank_block, np.int64)
    for row, tile in enumerate(tiles):
        used = -(-(tile.start + tile.num_rows) // shape.block_size)
        tables[row, :used] = tile.table[:used]
    heads = np.arange(shape.num_kv_heads)
    inside = np.arange(shape.block_size) * shape.num_kv_heads + heads[:, None]
    rows = (tables * block_rows)[:, None, :, None] + inside[:, None, :]
    rows = rows.reshape(len(tiles), shape.num_kv_heads, -1)[:, :, :num_tokens]
    ends = np.array([tile.start + tile.num_rows for tile in tiles])
    is_empty = np.arange(num_tokens) >= ends[:, None]
    blank = storage.blank_block * block_rows + heads
    return np.where(is_empty[:, None, :], blank[:, None], rows)


def attend_in_pieces(queries: Tensor, keys: Tensor, values: Tensor, bucket: Bucket, scale: float) -> Tensor:
    """Attend for one bucket in plain float32 operations, exact when the rows of its products were chosen for it.

    queries: [I * kv_heads * P, M, head_size]; overwritten. keys, values: [I * kv_heads * P, L, head_size]. scale:
    factor of the scores. Returns float32 [I * kv_heads, M, head_size]. Products in bfloat16 would save up to a fifth of
    a step, but more than double the error of the logits.
    """
    rows, pieces, size = bucket.num_rows, bucket.num_pieces, queries.shape[-1]
    # Scaled as float32: in bfloat16 the factor and the product would be rounded. Queries are fewer than scores.
    scores = torch.bmm(queries.float().mul_(scale), keys.float().transpose(1, 2))
    scores = scores.view(bucket.num_tiles, -1, pieces, rows, PIECE_TOKENS)
    if pieces == 1:
        weights = torch.softmax(scores.add_(bucket.bias.transpose(2, 3)), -1)
    else:
        biased = torch.empty_like(scores.transpose(2, 3), memory_format=torch.contiguous_format)
        torch.add(scores.transpose(2, 3), bucket.bias, out=biased)
        weights = torch.softmax(biased.view(-1, pieces * PIECE_TOKENS), -1)
        weights = weights.view(-1, rows, pieces, PIECE_TOKENS).transpose(1, 2)
    partial = torch.bmm(weights.reshape(-1, rows, PIECE_TOKENS), values.float())
    return fold_halves(partial.view(-1, pieces, rows, size))


class BucketAttention:
    """Attention bucket by bucket; how a bucket is computed is a parameter."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, *, attend_bucket: AttendBucket, name: str) -> None:
        self._shape = shape
        self._dtype = dtype
        self._attend_bucket = attend_bucket
        self._scale = shape.head_size**-0.5
        self._name = name

    @property
    def name(self) -> str:
        """Name for people."""
        return self._name

    def plan(self, chunks: Sequence[Chunk], padded_rows: int, storage: KVStorage) -> AttentionPlan:
        """Sort the tiles of all chunks into buckets and index every row that they read and write."""
        shape, sizes = self._shape, [tile for tile, _ in self._shape.tile_rows]
        product_rows = dict(shape.tile_rows)
        groups: dict[tuple[int, int], list[Tile]] = {}
        for chunk in chunks:
            for size, tile in cut_into_tiles(chunk, sizes):
                pieces = num_pieces(tile.start + tile.num_rows, is_rounded=size < sizes[-1])
                groups.setdefault((size, pieces), []).append(tile)
        buckets: list[Bucket] = []
        output_rows = np.zeros((padded_rows, shape.num_heads), np.int64)
        filled = 0
        for (size, pieces), tiles in sorted(groups.items()):
            rows = product_rows[size]
            for part in self._parts(tiles, rows, pieces):
                buckets.append(self._bucket(part, size, rows, pieces, storage))
                self._index_output(part, rows, filled, output_rows)
                filled += len(part) * shape.num_kv_heads * rows
        return AttentionPlan(tuple(buckets), self._to_device(output_rows.reshape(-1), storage))

    def attend(self, heads: Tensor, layer: int, plan: object, storage: KVStorage) -> Tensor:
        """Attend bucket by bucket; see Attention.attend."""
        if not isinstance(plan, AttentionPlan):
            raise TypeError(f"a plan of another attention: {type(plan).__name__}")
        query = heads.view(-1, self._shape.head_size)
        keys, values = storage.head_rows(layer, 0), storage.head_rows(layer, 1)
        results = [self._attend(query, keys, values, bucket) for bucket in plan.buckets]
        result = results[0] if len(results) == 1 else torch.cat(results)
        return result.index_select(0, plan.output_rows).view(heads.shape[0], -1)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, bucket: Bucket) -> Tensor:
        """Gather and attend for one bucket; returns [I * kv_heads * M, head_size]."""
        size = self._shape.head_size
        result = self._attend_bucket(
            query.index_select(0, bucket.query_rows).view(-1, bucket.num_rows, size),
            keys.index_select(0, bucket.kv_rows).view(-1, PIECE_TOKENS, size),
            values.index_select(0, bucket.kv_rows).view(-1, PIECE_TOKENS, size),
            bucket,
            self._scale,
        )
        return result.reshape(-1, size).to(self._dtype)

    def _parts(self, tiles: list[Tile], rows: int, pieces: int) -> Iterator[list[Tile]]:
        per_tile = self._shape.num_kv_heads * pieces * PIECE_TOKENS
        most = max(1, min(_LARGEST_SCORES // (per_tile * rows), _LARGEST_GATHER // (per_tile * self._shape.head_size)))
        return (tiles[first : first + most] for first in range(0, len(tiles), most))

    def _bucket(self, tiles: list[Tile], size: int, rows: int, pieces: int, storage: KVStorage) -> Bucket:
        shape, num_tokens = self._shape, pieces * PIECE_TOKENS
        filler = np.arange(rows)
        offsets = np.minimum(filler // shape.group_size, size - 1)  # rows added by padding repeat the last position
        member = np.where(filler < size * shape.group_size, filler % shape.group_size, 0)
        counts = np.array([tile.num_rows for tile in tiles])
        offsets = np.minimum(offsets, counts[:, None] - 1)  # [I, M]; a part-filled tile repeats its last position
        token_rows = np.array([tile.first_row for tile in tiles])[:, None] + offsets
        head = np.arange(shape.num_kv_heads)[:, None] * shape.group_size + member  # [kv_heads, M]
        query_rows = (token_rows * (shape.num_heads + shape.num_kv_heads))[:, None] + head
        query_rows = np.repeat(query_rows[:, :, None], pieces, axis=2)
        positions = (np.array([tile.start for tile in tiles])[:, None] + offsets)[:, :, None]
        keys = np.arange(num_tokens)
        is_seen = keys <= positions
        if shape.window is not None:
            is_seen &= keys > positions - shape.window
        bias = np.where(is_seen, np.float32(0), np.float32("-inf"))
        return Bucket(
            num_tiles=len(tiles),
            num_rows=rows,
            num_pieces=pieces,
            query_rows=self._to_device(query_rows.reshape(-1), storage),
            kv_rows=self._to_device(kv_row_index(tiles, num_tokens, storage).reshape(-1), storage),
            bias=self._to_device(bias.reshape(len(tiles), 1, rows, pieces, PIECE_TOKENS), storage),
        )

    def _index_output(self, tiles: list[Tile], rows: int, filled: int, output_rows: Ints) -> None:
        """Enter where the result of every (row, head) of these tiles will stand, after `filled` earlier rows."""
        shape = self._shape
        heads = np.arange(shape.num_heads)
        in_tile = heads // shape.group_size * rows + heads % shape.group_size
        for index, tile in enumerate(tiles):
            first = filled + index * shape.num_kv_heads * rows
            offsets = np.arange(tile.num_rows)[:, None] * shape.group_size
            output_rows[tile.first_row : tile.first_row + tile.num_rows] = first + offsets + in_tile

    def _to_device(self, values: npt.NDArray[np.int64] | npt.NDArray[np.float32], storage: KVStorage) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(storage.device)
