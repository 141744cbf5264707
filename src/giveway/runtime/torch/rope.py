"""Rotary position embedding: the table of angles, and turning heads by it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from giveway.runtime.model_config import ModelConfig


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


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Angular frequency of each pair of elements, float32 [head_size / 2], radians per position.

    Source: RoFormer (Su et al., 2021), equation 15; the stretching of the low frequencies as in Llama 3.1's release.
    """
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.int64).float() / config.head_size
    frequencies = 1.0 / (config.rope_theta**exponents)
    divisors: tuple[float, ...] | None = getattr(config, "rope_freq_factors", None)
    if divisors is not None:
        return frequencies / torch.tensor(divisors, dtype=torch.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaling.original_max_positions / scaling.high_freq_factor
    shortest_stretched = scaling.original_max_positions / scaling.low_freq_factor
    share = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    stretched = torch.where(wavelengths > shortest_stretched, frequencies / scaling.factor, between)
    return torch.where(wavelengths < longest_kept, frequencies, stretched)


def make_rope_table(config: ModelConfig, num_positions: int, device: torch.device) -> RopeTable:
    """Compute the table for positions 0 to num_positions - 1, once, so that a position always has the same bits."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config))
    cosine, sine = angles.cos(), angles.sin()
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
