"""Attention over the paged pool: right, and with the same bits whatever shares the step and wherever the blocks lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.native.attention_world import COMPUTE, SETS, Floats, Memory, Request, Shape, keeps_the_order, rounded

SHAPES = [
    Shape(head_size=64, group_size=3),
    Shape(head_size=16, group_size=1),
    Shape(head_size=80, group_size=8, num_kv_heads=1, window=37),
    Shape(head_size=128, group_size=1, window=100, soft_cap=30.0),
    Shape(head_size=48, group_size=2, soft_cap=5.0),
    Shape(head_size=256, group_size=1, num_kv_heads=1, window=1),
    Shape(head_size=32, group_size=50, num_kv_heads=1),  # more heads than a tile has rows
]


def describe(shape: Shape) -> str:
    return f"head{shape.head_size}-group{shape.group_size}-window{shape.window}-cap{shape.soft_cap:g}"


shapes = pytest.mark.parametrize("shape", SHAPES, ids=describe)
computes = pytest.mark.parametrize("compute", COMPUTE)
sets = pytest.mark.parametrize("isa", SETS)


def assert_same_bits(a: Floats, b: Floats) -> None:
    assert np.array_equal(a.view(np.uint32), b.view(np.uint32))


@sets
@computes
@shapes
def test_every_row_is_what_the_formula_gives(shape: Shape, compute: str, isa: str) -> None:
    request = Request(replace(shape, compute=compute), num_tokens=150, has_norms=shape.window > 0)
    computed = Memory(request.shape).attend_in_chunks(request, [130, 1, 5], isa)
    expected = request.expected()
    # bfloat16 has 8 bits: weights and results are rounded to it.
    tolerance = 2.0**-7 if compute == "bf16" else 3e-6
    assert np.abs(computed - expected).max() <= tolerance * np.abs(expected).max()


@computes
@shapes
def test_no_chunking_no_block_table_no_block_size_and_no_instruction_set_changes_a_bit(
    shape: Shape, compute: str
) -> None:
    # Goal: a row computed alone, as the next token, is the row computed within any chunk, wherever its blocks lie.
    request = Request(replace(shape, compute=compute), num_tokens=141)
    wanted: dict[bool, Floats] = {}
    for isa in SETS:
        ways = [
            Memory(request.shape, block_size=16, seed=1).attend_in_chunks(request, [], isa),
            Memory(request.shape, block_size=16, seed=2).attend_in_chunks(request, [1] * 140, isa),
            Memory(request.shape, block_size=32, seed=3).attend_in_chunks(request, [5] * 28, isa),
            Memory(request.shape, block_size=64, seed=4).attend_in_chunks(request, [3, 64, 64], isa),
            Memory(request.shape, block_size=48, seed=5).attend_in_chunks(request, [130], isa),
            Memory(request.shape, num_layers=3, seed=6).attend_in_chunks(request, [17, 16, 1, 31], isa, layer=2),
        ]
        for rows in ways:
            assert_same_bits(rows, wanted.setdefault(keeps_the_order(isa, compute), rows))


@computes
def test_numbers_too_small_for_float32_vanish_alike_on_every_set_and_in_every_chunking(compute: str) -> None:
    # Goal: sums of both signs at the least that float32 has without denormal numbers, and zeros of both signs.
    request = Request(Shape(group_size=3, compute=compute, window=40), num_tokens=120)
    request.qkv[:, -2 * 64 :] *= np.float32(3e-38)
    wanted: dict[bool, Floats] = {}
    for isa in SETS:
        for lengths in ([], [1] * 119, [50, 1, 30]):
            rows = Memory(request.shape).attend_in_chunks(request, lengths, isa)
            assert_same_bits(rows, wanted.setdefault(keeps_the_order(isa, compute), rows))


@sets
@computes
def test_what_lay_in_the_pool_before_reaches_no_sum(compute: str, isa: str) -> None:
    # Goal: NaN in slots that were never written and in blocks of others, and what another left in this one's blocks.
    request = Request(Shape(group_size=2, compute=compute), num_tokens=75)
    clean, stale = (Memory(request.shape, fill=fill) for fill in (0x00, 0xFF))
    left_by_another = Memory(request.shape, fill=0xFF)
    other = Request(request.shape, num_tokens=200, seed=1)
    other.qkv[:] = 1e38
    left_by_another.attend_in_chunks(other, [], isa)
    for lengths in ([], [1] * 74, [20, 30]):
        expected = clean.attend_in_chunks(request, lengths, isa)
        assert np.isfinite(expected).all()
        assert_same_bits(stale.attend_in_chunks(request, lengths, isa), expected)
        assert_same_bits(left_by_another.attend_in_chunks(request, lengths, isa), expected)


@sets
@computes
@pytest.mark.parametrize("window", [1, 20, 64, 70])
def test_positions_before_the_window_do_not_change_a_bit(window: int, compute: str, isa: str) -> None:
    request = Request(Shape(group_size=3, compute=compute, window=window), num_tokens=160)
    changed = Request(request.shape, num_tokens=160)
    changed.qkv[: 159 - window + 1] *= 50  # all that the last row does not see
    last = [Memory(each.shape).attend_in_chunks(each, [100, 50], isa)[-1] for each in (request, changed)]
    assert_same_bits(*last)


@sets
@computes
def test_the_first_token_attends_to_itself_alone(compute: str, isa: str) -> None:
    request = Request(Shape(compute=compute), num_tokens=40)
    computed = Memory(request.shape).attend_in_chunks(request, [7], isa)
    assert_same_bits(computed[0], rounded(request.qkv[0, -request.shape.num_kv_heads * 64 :], compute))


@sets
@computes
def test_a_score_beyond_what_exp_can_take_neither_overflows_nor_loses_its_position(compute: str, isa: str) -> None:
    # Goal: with one key so long that its scores are in the thousands, a row that agrees with it takes its value alone
    # and one that is against it takes the others.
    shape = Shape(compute=compute, num_kv_heads=1)
    request = Request(shape, num_tokens=100)
    request.cosine[:], request.sine[:] = 1, 0
    query, key, value = np.split(request.qkv, 3, axis=1)  # parts of the same rows
    query[:] = 1
    query[90] = -1
    key[50] = 1e4
    computed = Memory(shape).attend_in_chunks(request, [60, 1], isa)
    kept = rounded(value, compute)
    assert_same_bits(computed[50:90], np.repeat(kept[50:51], 40, axis=0))
    assert_same_bits(computed[91:], np.repeat(kept[50:51], 9, axis=0))
    kept_key = rounded(key, compute).astype(np.float64)
    scores = np.delete(-kept_key[:91].sum(axis=1) * request.scale, 50)
    weights = np.exp(scores - scores.max())
    expected = weights / weights.sum() @ np.delete(kept[:91], 50, axis=0).astype(np.float64)
    assert np.abs(computed[90] - expected).max() < (3e-2 if compute == "bf16" else 1e-4)


@sets
def test_a_soft_cap_bounds_what_one_score_can_do(isa: str) -> None:
    # Goal: however long the key of position 0, its weight beside another of score 0 is that of the cap.
    shape = Shape(head_size=16, num_kv_heads=1, soft_cap=2.0)
    request = Request(shape, num_tokens=2)
    request.cosine[:], request.sine[:] = 1, 0
    query, key, value = np.split(request.qkv, 3, axis=1)
    query[:], key[0], key[1] = 1, 1e6, 0
    value[0], value[1] = 1, 0
    weight = np.exp(2.0) / (np.exp(2.0) + 1)
    assert np.abs(Memory(shape).attend(request, 0, 2, isa)[1] - weight).max() < 1e-6
