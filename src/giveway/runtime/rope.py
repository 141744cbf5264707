"""The angles of the rotary position embedding, the same numbers for every backend."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from giveway.runtime.model_config import ModelConfig

_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RopeAngles:
    """Cosine and sine by position, float32 [positions, head_size / 2]; element i turns with i + head_size / 2."""

    cosine: _Floats
    sine: _Floats


def inverse_frequencies(config: ModelConfig) -> _Floats:
    """Angular frequency of each pair of elements, float32 [head_size / 2], radians per position.

    Source: RoFormer (Su et al., 2021), equation 15; the stretching of the low frequencies as in Llama 3.1's release.
    """
    exponents = np.arange(0, config.head_size, 2, dtype=np.float64) / config.head_size
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if config.rope_freq_factors is not None:
        frequencies /= np.array(config.rope_freq_factors, np.float64)
    elif scaling is not None:
        wavelengths = 2 * math.pi / frequencies
        longest_kept = scaling.original_max_positions / scaling.high_freq_factor
        shortest_stretched = scaling.original_max_positions / scaling.low_freq_factor
        share = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        between = (1 - share) * frequencies / scaling.factor + share * frequencies
        stretched = np.where(wavelengths > shortest_stretched, frequencies / scaling.factor, between)
        frequencies = np.where(wavelengths < longest_kept, frequencies, stretched)
    return frequencies.astype(np.float32)


def make_rope_angles(config: ModelConfig, num_positions: int) -> RopeAngles:
    """Compute the angles of positions 0 to num_positions - 1, once, so that a position always has the same bits.

    Angles are rounded to float32 before their cosine is taken, as the reference implementations do: at far positions
    that rounding is what they were trained with.
    """
    angles = np.outer(np.arange(num_positions, dtype=np.float32), inverse_frequencies(config)).astype(np.float64)
    return RopeAngles(cosine=np.cos(angles).astype(np.float32), sine=np.sin(angles).astype(np.float32))
