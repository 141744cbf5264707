"""What a test asks the sampler for: plain greedy but for the changes that it names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from giveway.core.sampling import SamplingParams
from giveway.runtime.backend import SampleInput

GREEDY = SamplingParams(temperature=0.0, top_p=1.0)


def sample_input(params: SamplingParams = GREEDY, **changes: Any) -> SampleInput:
    fields: dict[str, Any] = {
        "seed": 0,
        "output_index": 0,
        "prompt_token_ids": (),
        "output_token_ids": (),
        **changes,
    }
    return SampleInput(params=params, **fields)


def mask_of(tokens: Iterable[int]) -> bytes:
    """A mask, of whole 32-bit words, that allows these tokens."""
    bits = 0
    for token in tokens:
        bits |= 1 << token
    return bits.to_bytes(4 * (bits.bit_length() // 32 + 1), "little")
