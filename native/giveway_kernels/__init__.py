"""CPU kernels of GiveWay: packed products, paged attention and whole steps. See the README of this package."""

from __future__ import annotations

from giveway_kernels._native import (
    Matrix,
    Model,
    Sampler,
    Workload,
    chosen_instruction_set,
    copy_blocks,
    copy_blocks_in_order,
    instruction_sets,
    multiply_peak,
    read_peak,
)

__all__ = [
    "Matrix",
    "Model",
    "Sampler",
    "Workload",
    "chosen_instruction_set",
    "copy_blocks",
    "copy_blocks_in_order",
    "default_compute",
    "instruction_sets",
    "multiply_peak",
    "read_peak",
]


def default_compute(isa: str = "") -> str:
    """Return "bf16" where an instruction set (the chosen one) multiplies that faster, else "f32"."""
    return "bf16" if (isa or chosen_instruction_set()) in {"amx", "avx512_bf16"} else "f32"
