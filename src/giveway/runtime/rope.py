"""The angles of the rotary position embedding, the same numbers for every backend."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from giveway.core.errors import UnsupportedModelError
from giveway.runtime.model_config import ModelConfig, RopeScaling

_Floats = npt.NDArray[np.float32]

_ONE = np.float32(1)
_PIECE_POSITIONS = 4096  # computed at a time: in between, an angle takes 8 bytes and its cosine as many


@dataclass(frozen=True, slots=True)
class RopeAngles:
    """Cosine and sine by position, float32 [positions, head_size / 2]; element i turns with i + head_size / 2."""

    cosine: _Floats
    sine: _Floats


def inverse_frequencies(config: ModelConfig) -> _Floats:
    """Angular frequency of each pair of elements, float32 [head_size / 2], radians per position.

    Rounded to float32 after each operation, as Hugging Face's models do it: a frequency that is off by its last digit
    turns the ten-thousandth position by a thousandth of a radian.
    Raises UnsupportedModelError if a pair would not turn at all, or by an angle that is not finite.
    Source: RoFormer (Su et al., 2021), equation 15; the stretching of the low frequencies as in Llama 3.1's release.
    """
    with np.errstate(all="ignore"):  # what comes of it is looked at
        frequencies = _frequencies(config)
        farthest = frequencies * np.float32(config.max_positions)
    if not ((frequencies > 0) & np.isfinite(farthest)).all():
        scaled = "" if config.rope_scaling is None and config.rope_freq_factors is None else " and its scaling"
        raise UnsupportedModelError(
            f"model configuration: with rope_theta {config.rope_theta:g}{scaled} rotary angles are zero or not finite"
        )
    return frequencies


def _frequencies(config: ModelConfig) -> _Floats:
    exponents = np.arange(0, config.head_size, 2, dtype=np.float32) / np.float32(config.head_size)
    powers = np.power(np.float64(config.rope_theta), exponents.astype(np.float64))
    frequencies = _ONE / powers.astype(np.float32)
    if config.rope_freq_factors is not None:
        divisors: _Floats = np.array(config.rope_freq_factors, np.float32)
        return frequencies / divisors
    if config.rope_scaling is not None:
        return _stretched(frequencies, config.rope_scaling)
    return frequencies


def _stretched(frequencies: _Floats, scaling: RopeScaling) -> _Floats:
    # A number divided by an array is the number times its reciprocals, which is how PyTorch does it.
    wavelengths = np.float32(2 * math.pi) * (_ONE / frequencies)
    turns = np.float32(scaling.original_max_positions) * (_ONE / wavelengths)
    longest_kept = scaling.original_max_positions / scaling.high_freq_factor
    shortest_stretched = scaling.original_max_positions / scaling.low_freq_factor
    low, high, factor = (
        np.float32(number)
        for number in (scaling.low_freq_factor, scaling.high_freq_factor - scaling.low_freq_factor, scaling.factor)
    )
    share = (turns - low) / high
    between = (_ONE - share) * frequencies / factor + share * frequencies
    stretched = np.where(wavelengths > shortest_stretched, frequencies / factor, between)
    return np.where(wavelengths < longest_kept, frequencies, stretched)


def make_rope_angles(config: ModelConfig, num_positions: int) -> RopeAngles:
    """Compute the angles of positions 0 to num_positions - 1, once, so that a position always has the same bits.

    Angles are rounded to float32 before their cosine is taken, as the reference implementations do: at far positions
    that rounding is what they were trained with. Cosine and sine are taken in float64 and rounded once, so that they do
    not depend on a library's own way of computing them in float32.
    """
    frequencies = inverse_frequencies(config)
    cosine, sine = (np.empty((num_positions, len(frequencies)), np.float32) for _ in range(2))
    for start in range(0, num_positions, _PIECE_POSITIONS):
        positions = np.arange(start, min(start + _PIECE_POSITIONS, num_positions), dtype=np.float32)
        angles = np.outer(positions, frequencies).astype(np.float64)
        cosine[start : start + len(positions)] = np.cos(angles)
        sine[start : start + len(positions)] = np.sin(angles)
    return RopeAngles(cosine, sine)
