"""Block formats against the reference implementation, bit for bit."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from giveway.runtime.weights.checkpoint import Encoding, RawTensor
from giveway.runtime.weights.dequantize import dequantize


def reference(data: npt.NDArray[np.uint8], encoding: Encoding) -> Any:
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[encoding.name])


def random_rows(encoding: Encoding, rows: int, columns: int, seed: int) -> npt.NDArray[np.uint8]:
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[encoding.name])
    stored: npt.NDArray[np.uint8] = raw.view(np.uint8).reshape(rows, -1)
    return stored


@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (600, 1024)])
def test_values_are_those_of_the_reference(encoding: Encoding, shape: tuple[int, int]) -> None:
    data = random_rows(encoding, *shape, seed=shape[0])
    decoded = dequantize(RawTensor("w", encoding, shape, data))
    assert decoded.dtype == np.float32
    assert decoded.shape == shape
    assert np.array_equal(decoded, reference(data, encoding))


@pytest.mark.parametrize("encoding", [Encoding.Q8_0, Encoding.Q4_0, Encoding.Q4_1])
def test_every_byte_pattern_decodes_like_the_reference(encoding: Encoding) -> None:
    # Goal: also scales that no quantizer writes: denormal, negative, infinite and NaN halves.
    data = np.random.default_rng(1).integers(0, 256, (4096, encoding.block_bytes), dtype=np.uint8)
    decoded = dequantize(RawTensor("w", encoding, (4096, 32), data))
    with np.errstate(all="ignore"):
        wanted = reference(data, encoding)
    assert np.array_equal(decoded, wanted, equal_nan=True)


def test_a_vector_comes_back_as_a_vector() -> None:
    data = np.array([1.0, -2.0], np.float32).view(np.uint8).reshape(1, -1)
    assert dequantize(RawTensor("b", Encoding.F32, (2,), data)).tolist() == [1.0, -2.0]


def test_unaligned_and_strided_bytes_are_decoded() -> None:
    padded = np.zeros((2, 9), np.uint8)
    padded[:, 1:] = np.array([[1, 2], [3, 4]], np.float32).view(np.uint8)
    assert dequantize(RawTensor("w", Encoding.F32, (2, 2), padded[:, 1:])).tolist() == [[1.0, 2.0], [3.0, 4.0]]
