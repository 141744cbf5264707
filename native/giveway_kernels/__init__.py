"""CPU kernels of GiveWay: packed products, paged attention and whole steps. See the README of this package."""

from __future__ import annotations

from giveway_kernels._native import (
    Matrix,
    Model,
    Sampler,
    chosen_instruction_set,
    copy_blocks,
    copy_blocks_in_order,
    instruction_sets,
)

__all__ = [
    "Matrix",
    "Model",
    "Sampler",
    "chosen_instruction_set",
    "copy_blocks",
    "copy_blocks_in_order",
    "default_compute",
    "instruction_sets",
]


def default_compute() -> str:
    """Return "bf16" where the chosen instruction set multiplies that faster, else "f32"."""
    return "bf16" if chosen_instruction_set() in {"amx", "avx512_bf16"} else "f32"
