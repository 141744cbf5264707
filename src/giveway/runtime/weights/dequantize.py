"""Raw tensors as float32, by the formulas of the block formats.

Every block holds 32 elements. Q8_0: scale d (f16), 32 signed bytes q; x = d * q. Q4_0: d, 16 bytes of two nibbles (low
nibbles are elements 0 to 15); x = d * (q - 8). Q4_1: d, minimum m (f16), nibbles; x = d * q + m. Products are rounded
to float32, as the reference does. Source: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt

from giveway.core.errors import UnsupportedModelError
from giveway.runtime.weights.checkpoint import Encoding, RawTensor

Floats = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]

# Rows are decoded a stripe at a time: the temporaries of a whole embedding would take several times its size.
_STRIPE_ELEMENTS = 1 << 18


def dequantize(tensor: RawTensor) -> Floats:
    """Decode a tensor into a new float32 array of tensor.shape."""
    data = np.ascontiguousarray(tensor.data)
    if tensor.encoding is Encoding.F32:
        return data.view("<f4").astype(np.float32).reshape(tensor.shape)
    if tensor.encoding is Encoding.F16:
        return data.view("<f2").astype(np.float32).reshape(tensor.shape)
    if tensor.encoding is Encoding.BF16:
        return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(tensor.shape)
    return _decode_blocks(data, tensor.encoding, prod(tensor.shape)).reshape(tensor.shape)


def _decode_blocks(data: _Bytes, encoding: Encoding, num_elements: int) -> Floats:
    if encoding not in (Encoding.Q8_0, Encoding.Q4_0, Encoding.Q4_1):
        raise UnsupportedModelError(f"encoding {encoding.name} cannot be decoded")
    blocks = data.reshape(-1, encoding.block_bytes)
    decoded = np.empty((num_elements // encoding.block_elements, encoding.block_elements), np.float32)
    stripe = _STRIPE_ELEMENTS // encoding.block_elements
    for first in range(0, len(blocks), stripe):
        part = slice(first, first + stripe)
        # A scale that is not finite makes weights that are not: the logits will show it, so no warning here.
        with np.errstate(invalid="ignore", over="ignore"):
            if encoding is Encoding.Q8_0:
                _decode_q8_0(blocks[part], decoded[part])
            else:
                _decode_q4(blocks[part], decoded[part], has_minimum=encoding is Encoding.Q4_1)
    return decoded


def _halves(blocks: _Bytes, start: int) -> Floats:
    """The float16 at byte `start` of every block, as a float32 column."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _decode_q8_0(blocks: _Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks, 0), out=out)


def _decode_q4(blocks: _Bytes, out: Floats, *, has_minimum: bool) -> None:
    scale = _halves(blocks, 0)
    packed = blocks[:, 4:] if has_minimum else blocks[:, 2:]
    out[:, :16] = packed & np.uint8(0x0F)
    out[:, 16:] = packed >> np.uint8(4)
    if has_minimum:
        out *= scale
        out += _halves(blocks, 2)
    else:
        out -= np.float32(8)
        out *= scale
