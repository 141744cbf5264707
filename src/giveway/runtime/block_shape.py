"""Geometry of one KV block, the same in every backend that holds tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Geometry of one KV block; [num_layers, 2, block_size, num_kv_heads, head_size] and contiguous."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_size: int

    @property
    def dimensions(self) -> tuple[int, int, int, int, int]:
        """Shape of a block as a tensor."""
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_size)

    @property
    def num_elements(self) -> int:
        """Elements of a block."""
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_size
