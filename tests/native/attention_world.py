"""One request with random queries, keys and values; a pool to keep it in; and the formula of attention in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

native = pytest.importorskip("giveway_kernels._native")

Floats = npt.NDArray[np.float32]
Exact = npt.NDArray[np.float64]
Pool = np.ndarray[Any, np.dtype[np.uint8]]

SETS = [name for name, why_not in native.instruction_sets() if not why_not]
COMPUTE = ["f32", "bf16"]
STALE = 0xFF  # a pool of these bytes is full of NaN, whichever the element


def keeps_the_order(isa: str, compute: str) -> bool:
    """Whether a set adds in the order that all others keep; see the package's README."""
    return not (isa == "avx512_bf16" and compute == "bf16")


def bf16(values: Floats) -> Floats:
    """Rounded to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def rounded(values: Floats, compute: str) -> Floats:
    return bf16(values) if compute == "bf16" else values


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads, and what a query sees of what is before it."""

    head_size: int = 64
    group_size: int = 1
    num_kv_heads: int = 2
    compute: str = "f32"
    window: int = 0
    soft_cap: float = 0.0

    @property
    def num_heads(self) -> int:
        return self.group_size * self.num_kv_heads

    @property
    def num_columns(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    @property
    def element_bytes(self) -> int:
        return 2 if self.compute == "bf16" else 4


@dataclass(slots=True)
class Request:
    """[num_tokens] rows of query, key and value heads, before rotation."""

    shape: Shape
    num_tokens: int
    has_norms: bool = False
    seed: int = 0
    scale: float = field(init=False)
    qkv: Floats = field(init=False)
    cosine: Floats = field(init=False)
    sine: Floats = field(init=False)
    norms: tuple[Floats, Floats] | None = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        size = self.shape.head_size
        self.scale = size**-0.5
        self.qkv = (2 * rng.standard_normal((self.num_tokens, self.shape.num_columns))).astype(np.float32)
        angles = np.arange(self.num_tokens)[:, None] / 10000 ** (np.arange(size // 2) * 2 / size)
        self.cosine, self.sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        query_norm, key_norm = (1 + 0.1 * rng.standard_normal((2, size))).astype(np.float32)
        self.norms = (query_norm, key_norm) if self.has_norms else None

    def heads(self) -> tuple[Exact, Exact, Exact]:
        """Queries [heads, tokens, size], keys and values [KV heads, tokens, size], as attention multiplies them."""
        shape = self.shape
        rows = self.qkv.astype(np.float64).reshape(self.num_tokens, -1, shape.head_size).transpose(1, 0, 2)
        query, key, value = np.split(rows, [shape.num_heads, shape.num_heads + shape.num_kv_heads])
        if self.norms is not None:
            query, key = self._normed(query, self.norms[0]), self._normed(key, self.norms[1])
        query, key = self._turned(query), self._turned(key)
        query, key, value = (
            rounded(each.astype(np.float32), shape.compute).astype(np.float64) for each in (query, key, value)
        )
        return query, key, value

    def _normed(self, heads: Exact, weight: Floats) -> Exact:
        normed: Exact = heads / np.sqrt((heads**2).mean(axis=-1, keepdims=True) + 1e-6) * weight
        return normed

    def _turned(self, heads: Exact) -> Exact:
        first, second = np.split(heads, 2, axis=-1)
        cosine, sine = self.cosine.astype(np.float64), self.sine.astype(np.float64)
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

    def expected(self) -> Exact:
        """Attention of every row, [tokens, heads * size]."""
        shape = self.shape
        query, key, value = self.heads()
        positions = np.arange(self.num_tokens)
        distance = positions[:, None] - positions[None, :]
        is_seen = (distance >= 0) & (distance < (shape.window or self.num_tokens))
        out = np.empty_like(query)
        for head in range(shape.num_heads):
            scores = query[head] @ key[head // shape.group_size].T * self.scale
            if shape.soft_cap:
                scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
            scores = np.where(is_seen, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[head] = weights / weights.sum(axis=1, keepdims=True) @ value[head // shape.group_size]
        return out.transpose(1, 0, 2).reshape(self.num_tokens, -1)


@dataclass(slots=True)
class Memory:
    """A pool of KV blocks in which one request has a table of blocks that follow in no order."""

    shape: Shape
    block_size: int = 16
    num_blocks: int = 20
    num_layers: int = 1
    seed: int = 0
    fill: int = STALE
    pool: Pool = field(init=False)
    table: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        per_head = 2 * self.block_size * shape.head_size * shape.element_bytes
        self.pool = np.full(self.num_blocks * self.num_layers * shape.num_kv_heads * per_head, self.fill, np.uint8)
        self.table = np.random.default_rng(self.seed).permutation(self.num_blocks).astype(np.int32)

    def attend(self, request: Request, start: int, num_rows: int, isa: str, *, layer: int = 0) -> Floats:
        """Write and compute one chunk of the request; [rows, heads * size]."""
        shape, rows = self.shape, slice(start, start + num_rows)
        num_blocks = (start + num_rows + self.block_size - 1) // self.block_size
        out: Floats = native.attend(
            request.qkv[rows],
            self.table[:num_blocks],
            self.pool,
            start=start,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            block_size=self.block_size,
            cosine=request.cosine[rows],
            sine=request.sine[rows],
            scale=request.scale,
            query_norm=None if request.norms is None else request.norms[0],
            key_norm=None if request.norms is None else request.norms[1],
            norm_eps=1e-6,
            window=shape.window,
            soft_cap=shape.soft_cap,
            num_layers=self.num_layers,
            layer=layer,
            compute=shape.compute,
            isa=isa,
        )
        return out[:, : shape.num_heads * shape.head_size]

    def attend_in_chunks(self, request: Request, lengths: Sequence[int], isa: str, *, layer: int = 0) -> Floats:
        """All rows of the request, in chunks of these lengths and one of what is left."""
        chunks, start = [], 0
        for length in [*lengths, request.num_tokens - sum(lengths)]:
            if length > 0:
                chunks.append(self.attend(request, start, length, isa, layer=layer))
            start += length
        return np.concatenate(chunks)
