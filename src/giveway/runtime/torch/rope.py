"""Rotary position embedding: turning heads by the table of angles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from giveway.runtime.model_config import ModelConfig
from giveway.runtime.rope import make_rope_angles


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosine and signed sine of every position, float32 [positions, 1, head_size] each.

    The sine of the first half carries a minus, so that turning is x * cosine + swapped(x) * sine.
    """

    cosine: Tensor
    sine: Tensor

    @property
    def num_positions(self) -> int:
        """Positions the table covers."""
        return self.cosine.shape[0]


def make_rope_table(config: ModelConfig, num_positions: int, device: torch.device) -> RopeTable:
    """Lay out the angles of positions 0 to num_positions - 1 on the device."""
    angles = make_rope_angles(config, num_positions)
    cosine, sine = torch.from_numpy(angles.cosine), torch.from_numpy(angles.sine)
    return RopeTable(
        cosine=torch.cat([cosine, cosine], -1).unsqueeze(1).to(device),
        sine=torch.cat([-sine, sine], -1).unsqueeze(1).to(device),
    )


def turn(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn heads [rows, heads, head_size] by the rows' angles [rows, 1, head_size]; returns float32."""
    half = heads.shape[-1] // 2
    swapped = heads.reshape(*heads.shape[:-1], 2, half).flip(-2).flatten(-2)
    # Two roundings, not addcmul: whether that one fuses differs between the vector loop and its tail.
    return (heads * cosine).add_(swapped * sine)
