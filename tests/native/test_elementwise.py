"""Norms, embeddings and rotation: right, with the same bits on every instruction set, written where the layout says."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.native.attention_world import (
    COMPUTE,
    SETS,
    Floats,
    Memory,
    Request,
    Shape,
    native,
)

sets = pytest.mark.parametrize("isa", SETS)
computes = pytest.mark.parametrize("compute", COMPUTE)


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@sets
@computes
@pytest.mark.parametrize("size", [1, 15, 16, 17, 576, 600])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e15])
def test_rms_norm_is_what_the_formula_gives_and_pads_with_zeros(
    size: int, magnitude: float, compute: str, isa: str
) -> None:
    rows, weight = normal(5, size) * np.float32(magnitude), normal(size, seed=1)
    computed = native.rms_norm(rows, weight, eps=1e-5, compute=compute, isa=isa)
    exact = rows.astype(np.float64)
    expected = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    tolerance = 2.0**-8 if compute == "bf16" else 1e-6
    assert np.abs(computed[:, :size] - expected).max() <= tolerance * np.abs(expected).max()
    assert computed.shape == (5, ((size + 31) // 32 | 1) * 32)  # an odd number of blocks
    assert not computed[:, size:].any()


@computes
def test_rms_norm_has_the_same_bits_on_every_instruction_set_and_of_every_row_alone(compute: str) -> None:
    rows, weight = normal(7, 600), normal(600, seed=1)
    wanted = native.rms_norm(rows, weight, eps=1e-6, compute=compute, isa="scalar")
    for isa in SETS:
        assert np.array_equal(native.rms_norm(rows, weight, eps=1e-6, compute=compute, isa=isa), wanted)
        for row in range(7):
            alone = native.rms_norm(rows[row : row + 1], weight, eps=1e-6, compute=compute, isa=isa)
            assert np.array_equal(alone[0], wanted[row])


@sets
@pytest.mark.parametrize("num_columns", [64, 70])
def test_a_token_of_an_unpacked_table_is_its_row(num_columns: int, isa: str) -> None:
    values = normal(50, num_columns)
    matrix = native.Matrix.pack([("F32", values.view(np.uint8).reshape(50, -1))], num_inputs=num_columns, compute="f32")
    tokens = np.array([0, 49, 17, 17, 16, 15], np.int64)
    assert np.array_equal(native.embed(matrix, tokens, isa=isa), values[tokens])


@sets
@computes
def test_a_token_of_a_table_of_bfloat16_is_its_row(compute: str, isa: str) -> None:
    values = (normal(50, 70).view(np.uint32) & 0xFFFF0000).view(np.float32)
    stored = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(50, -1)
    matrix = native.Matrix.pack([("BF16", stored)], num_inputs=70, compute=compute, isa=isa)
    tokens = np.array([0, 49, 17, 16, 15], np.int64)
    assert np.array_equal(native.embed(matrix, tokens, isa=isa), values[tokens])


def stored_and_expected(encoding: str, num_rows: int, num_blocks: int) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Blocks of 32 elements with random scales and codes, and what the format's formula makes of them in float32."""
    rng = np.random.default_rng(0)
    scale, minimum = rng.standard_normal((2, num_rows, num_blocks, 1)).astype(np.float16)
    halves = [scale.view(np.uint8)]
    scale32, minimum32 = scale.astype(np.float32), minimum.astype(np.float32)
    if encoding == "Q8_0":
        codes = rng.integers(-128, 128, (num_rows, num_blocks, 32)).astype(np.int8)
        expected = scale32 * codes
        packed = codes.view(np.uint8)
    else:
        codes4 = rng.integers(0, 16, (num_rows, num_blocks, 32)).astype(np.uint8)
        packed = (codes4[..., :16] | codes4[..., 16:] << 4).view(np.uint8)
        expected = scale32 * (codes4.astype(np.float32) - 8) if encoding == "Q4_0" else scale32 * codes4 + minimum32
        if encoding == "Q4_1":
            halves.append(minimum.view(np.uint8))
    stored = np.concatenate([*halves, packed], axis=-1).reshape(num_rows, -1)
    return np.ascontiguousarray(stored), expected.reshape(num_rows, -1)


@sets
@computes
@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0", "Q4_1"])
def test_a_token_of_a_packed_table_is_decoded_to_the_bit_and_never_rounded(
    encoding: str, compute: str, isa: str
) -> None:
    stored, expected = stored_and_expected(encoding, 40, 3)
    matrix = native.Matrix.pack([(encoding, stored)], num_inputs=96, compute=compute, isa=isa)
    tokens = np.array([39, 0, 16], np.int64)
    assert np.array_equal(native.embed(matrix, tokens, isa=isa), expected[tokens])


def blocks_as_keys_and_values(memory: Memory) -> tuple[Floats, Floats]:
    """Every slot of the pool by the documented layout: two arrays [blocks, layers, KV heads, positions, head size]."""
    shape, panels = memory.shape, memory.block_size // 16
    size = shape.head_size
    leading = (memory.num_blocks, memory.num_layers, shape.num_kv_heads, 2)
    if shape.compute == "f32":
        elements = memory.pool.view(np.float32).reshape(*leading, -1)
        keys = elements[..., 0, :].reshape(*leading[:3], panels, size, 16).swapaxes(-1, -2)
        values = elements[..., 1, :].reshape(*leading[:3], panels, 16, size)
    else:
        elements = (memory.pool.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(*leading, -1)
        keys = elements[..., 0, :].reshape(*leading[:3], panels, size // 2, 16, 2)
        keys = keys.transpose(0, 1, 2, 3, 5, 4, 6)
        values = elements[..., 1, :].reshape(*leading[:3], panels, 8, size, 2).swapaxes(-1, -2)
    flat = (*leading[:3], memory.block_size, size)
    return keys.reshape(flat), values.reshape(flat)


@sets
@computes
@pytest.mark.parametrize("head_size", [16, 64, 80])
@pytest.mark.parametrize("has_norms", [False, True])
def test_keys_and_values_lie_where_the_layout_says(has_norms: bool, head_size: int, compute: str, isa: str) -> None:
    request = Request(Shape(head_size=head_size, group_size=2, compute=compute), num_tokens=45, has_norms=has_norms)
    memory = Memory(request.shape, block_size=32, num_layers=2)
    memory.attend_in_chunks(request, [20], isa, layer=1)
    keys, values = (slots[memory.table[:2], 1].transpose(1, 0, 2, 3) for slots in blocks_as_keys_and_values(memory))
    _, expected_keys, expected_values = request.heads()
    written_keys = keys.reshape(2, 64, head_size)[:, :45]
    # Rotation in float32 may fall on the other side of a tie of bfloat16.
    tolerance = 2.0**-8 if compute == "bf16" else 1e-6
    assert np.abs(written_keys - expected_keys).max() <= tolerance * np.abs(expected_keys).max()
    assert np.array_equal(values.reshape(2, 64, head_size)[:, :45], expected_values.astype(np.float32))


@sets
@computes
@pytest.mark.parametrize("num_tokens", [33, 46, 48])
def test_only_the_rest_of_the_last_panel_of_values_is_cleared(num_tokens: int, compute: str, isa: str) -> None:
    # Goal: what products touch without being seen is zero; every other slot keeps what it held.
    request = Request(Shape(compute=compute), num_tokens=num_tokens)
    memory = Memory(request.shape, block_size=32)
    memory.attend(request, 0, num_tokens, isa)
    keys, values = (
        slots[memory.table, 0].transpose(1, 0, 2, 3).reshape(2, -1, 64) for slots in blocks_as_keys_and_values(memory)
    )
    end_of_panel = (num_tokens + 15) // 16 * 16
    assert not values[:, num_tokens:end_of_panel].any()
    assert np.isnan(values[:, end_of_panel:]).all()
    assert np.isnan(keys[:, num_tokens:]).all()


@computes
@pytest.mark.parametrize("head_size", [16, 48, 128])
def test_every_instruction_set_writes_the_same_bytes_into_the_pool(head_size: int, compute: str) -> None:
    request = Request(Shape(head_size=head_size, compute=compute), num_tokens=40, has_norms=True)
    pools = {}
    for isa in SETS:
        memory = Memory(request.shape)
        memory.attend_in_chunks(request, [7, 20], isa)
        pools[isa] = memory.pool
    for isa, pool in pools.items():
        assert np.array_equal(pool, pools["scalar"]), isa


@sets
def test_a_value_between_two_of_bfloat16_becomes_the_even_one(isa: str) -> None:
    shape = Shape(head_size=16, num_kv_heads=1, compute="bf16")
    request = Request(shape, num_tokens=1)
    request.qkv[0, -16:] = np.resize(np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 1 + 2.0**-7]), 16)
    memory = Memory(shape, num_blocks=1)
    memory.attend(request, 0, 1, isa)
    _, values = blocks_as_keys_and_values(memory)
    assert values[0, 0, 0, 0, :4].tolist() == [1, 1 + 2.0**-6, -1, 1 + 2.0**-7]
