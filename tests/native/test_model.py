"""A whole step of the native model: what a row comes to depends on its own request only, and is what numpy says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("giveway_kernels", reason="giveway-kernels is not installed: `make kernels` builds it")

from tests.native.reference_model import reference_logits
from tests.native.small_model import (
    NUM_POSITIONS,
    SHAPE,
    Chunk,
    Floats,
    Runner,
    SmallModel,
    Stored,
    make_small_model,
    stored,
)

# More positions than attention takes at a time (64), and no multiple of anything.
TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, SHAPE["vocab_size"], 77)]
TABLE = [19, 3, 8, 0, 11]  # of blocks of 16
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"has_biases": True},
    "head norms": {"has_head_norms": True},
    "window": {"window": 20},
    "soft cap": {"soft_cap": 4.0, "gate": "gelu"},
    "one KV head for each": {"num_kv_heads": 6},
    "head of two blocks of products": {"head_size": 48, "num_heads": 4},
}


@pytest.fixture(scope="module")
def small_model() -> SmallModel:
    return make_small_model()


def whole(runner: Runner, tokens: list[int] = TOKENS, table: list[int] = TABLE) -> Floats:
    return runner.logits(Chunk(tokens, 0, table))


def in_chunks(runner: Runner, ends: list[int], table: list[int] = TABLE) -> Floats:
    parts = [runner.logits(Chunk(TOKENS[start:end], start, table)) for start, end in pairwise([0, *ends])]
    return np.concatenate(parts)


def assert_same_bits(found: Floats, expected: Floats) -> None:
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_layers_written_out_in_numpy(case: str, isa: str, compute: str) -> None:
    model = make_small_model(**CASES[case])
    found = whole(Runner(model.pack(compute=compute, isa=isa)))
    expected = reference_logits(model, TOKENS, compute)
    scale = np.abs(expected).max()
    # A value halfway between two bfloat16s may be rounded either way; what is computed from it differs from then on.
    assert np.abs(found - expected).max() < scale * (1.5e-2 if compute == "bf16" else 2e-6)


def test_one_token_at_a_time_gives_what_one_long_prompt_gives(small_model: SmallModel, isa: str, compute: str) -> None:
    model = small_model.pack(compute=compute, isa=isa)
    one_by_one = in_chunks(Runner(model), list(range(1, len(TOKENS) + 1)))
    assert_same_bits(one_by_one, whole(Runner(model)))


@pytest.mark.parametrize("ends", [[1, 3, 20, 77], [16, 32, 64, 77], [33, 34, 63, 65, 76, 77]])
def test_how_a_prompt_is_cut_does_not_matter(ends: list[int], small_model: SmallModel, isa: str, compute: str) -> None:
    model = small_model.pack(compute=compute, isa=isa)
    assert_same_bits(in_chunks(Runner(model), ends), whole(Runner(model)))


def test_the_number_of_threads_does_not_matter(small_model: SmallModel, isa: str, compute: str) -> None:
    model = small_model.pack(compute=compute, isa=isa)
    alone = whole(Runner(model))
    for num_threads in (2, 3, 11):  # the last: more than have a part of the work to themselves
        assert_same_bits(whole(Runner(model, num_threads=num_threads)), alone)
        assert_same_bits(in_chunks(Runner(model, num_threads=num_threads), [40, 41, 77]), alone)


def test_neither_the_places_of_blocks_nor_their_size_matter(small_model: SmallModel, isa: str, compute: str) -> None:
    model = small_model.pack(compute=compute, isa=isa)
    expected = whole(Runner(model))
    assert_same_bits(whole(Runner(model), table=[0, 1, 2, 3, 4, 5]), expected)
    assert_same_bits(whole(Runner(model, block_size=32, num_blocks=7), table=[6, 0, 3]), expected)
    assert_same_bits(whole(Runner(model, block_size=80, num_blocks=2), table=[1]), expected)


@pytest.mark.parametrize("mates", [1, 3, 20])
def test_batch_mates_do_not_matter(mates: int, small_model: SmallModel, isa: str, compute: str) -> None:
    # Goal: alone, between decodes and between chunks of others, at whatever row of the batch, the bits are the same.
    model = small_model.pack(compute=compute, isa=isa)
    expected = whole(Runner(model))
    runner = Runner(model, num_blocks=80)
    rng = np.random.default_rng(mates)
    for start, end in pairwise([0, 16, 17, 18, 50, 77]):
        others = []
        for number in range(mates):
            num_tokens = int(rng.choice([1, 1, 1, 5, 17]))
            tokens = [int(token) for token in rng.integers(0, SHAPE["vocab_size"], num_tokens)]
            others.append(Chunk(tokens, 0, [20 + 2 * number, 21 + 2 * number]))
        place = int(rng.integers(0, mates + 1))
        first_row = sum(len(chunk.tokens) for chunk in others[:place])
        batch = [*others[:place], Chunk(TOKENS[start:end], start, TABLE), *others[place:]]
        found = runner.logits(*batch)[first_row : first_row + end - start]
        assert_same_bits(found, expected[start:end])


@pytest.mark.parametrize("num_kv_heads", [2, 3, 6])
def test_many_decodes_that_take_their_heads_together_get_what_each_gets_alone(
    num_kv_heads: int, isa: str, compute: str
) -> None:
    # Goal: contexts that end in the middle of a piece and of a panel, so that what is fetched ahead differs.
    model = make_small_model(num_kv_heads=num_kv_heads).pack(compute=compute, isa=isa)
    contexts = [64, 65, 3, 17, 128, 96, 63, 80]
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, SHAPE["vocab_size"], length).tolist() for length in contexts]
    ends = np.cumsum([-(-(length + 1) // 16) for length in contexts])
    tables = [list(range(start, end)) for start, end in pairwise([0, *ends])]
    runner = Runner(model, num_blocks=int(ends[-1]))
    for prompt, table in zip(prompts, tables, strict=True):
        runner.run(Chunk(prompt, 0, table))
    found = runner.logits(*(Chunk([7], len(p), t) for p, t in zip(prompts, tables, strict=True)))
    for number, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
        alone = Runner(model, num_blocks=int(ends[-1]))
        alone.run(Chunk(prompt, 0, table))
        assert_same_bits(found[number : number + 1], alone.logits(Chunk([7], len(prompt), table)))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_a_step_of_many_rows_gives_what_steps_of_few_give(num_threads: int, isa: str, compute: str) -> None:
    # Goal: threads share the rows of a large step and the weights of a small one. Four threads have too few rows each.
    model = make_small_model(has_biases=True).pack(compute=compute, isa=isa)
    prompts = np.random.default_rng(4).integers(0, SHAPE["vocab_size"], (4, 149)).tolist()
    tables = [list(range(start, start + 10)) for start in (0, 10, 20, 30)]
    chunks = [Chunk(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)]
    found = Runner(model, num_blocks=40, num_threads=num_threads).logits(*chunks)
    alone = Runner(model, num_blocks=40)
    for number, chunk in enumerate(chunks):
        parts = [
            alone.logits(Chunk(chunk.tokens[start:end], start, chunk.table)) for start, end in pairwise([0, 5, 80, 149])
        ]
        assert_same_bits(found[149 * number : 149 * (number + 1)], np.concatenate(parts))


def test_a_block_that_two_requests_share_is_only_read(small_model: SmallModel, isa: str, compute: str) -> None:
    model = small_model.pack(compute=compute, isa=isa)
    runner = Runner(model)
    runner.run(Chunk(TOKENS[:32], 0, TABLE))
    found = runner.logits(Chunk(TOKENS[32:], 32, TABLE), Chunk(TOKENS[32:], 32, [*TABLE[:2], 20, 21, 22]))
    expected = whole(Runner(model))[32:]
    assert_same_bits(found[: len(expected)], expected)
    assert_same_bits(found[len(expected) :], expected)


def test_a_large_step_after_a_small_one_and_back_leaves_nothing_behind(
    small_model: SmallModel, isa: str, compute: str
) -> None:
    # Goal: memory that a model keeps between steps holds what earlier steps left; no later step may read it.
    model = small_model.pack(compute=compute, isa=isa)
    expected = whole(Runner(model))
    runner = Runner(model)
    for num_tokens in (1, 77, 5, 18, 77):
        found = runner.logits(Chunk(TOKENS[:num_tokens], 0, TABLE))
        assert_same_bits(found, expected[:num_tokens])


def test_logits_of_some_rows_in_any_order_are_those_of_all_rows(small_model: SmallModel, isa: str) -> None:
    runner = Runner(small_model.pack(compute="f32", isa=isa))
    everything = whole(runner)
    rows = np.array([76, 0, 3, 3], np.int64)
    out = np.empty((4, runner.model.logits_stride), np.float32)
    runner.model.logits(rows, out, 2)
    assert_same_bits(out[:, : SHAPE["vocab_size"]].copy(), everything[rows])
    with pytest.raises(IndexError, match="row 77 is not one of the 77"):
        runner.model.logits(np.array([77], np.int64), out, 1)
    with pytest.raises(IndexError, match="row -1"):
        runner.model.logits(np.array([0, -1], np.int64), out, 1)
    with pytest.raises(ValueError, match="wrong shape"):
        runner.model.logits(np.zeros(5, np.int64), out, 1)


def test_one_row_may_be_asked_for_more_often_than_the_step_had_rows(small_model: SmallModel, isa: str) -> None:
    runner = Runner(small_model.pack(compute="f32", isa=isa))
    expected = runner.logits(Chunk(TOKENS[:3], 0, TABLE))
    out = np.empty((70, runner.model.logits_stride), np.float32)
    runner.model.logits(np.full(70, 2, np.int64), out, 1)
    assert_same_bits(out[:, : SHAPE["vocab_size"]].copy(), np.repeat(expected[2:], 70, axis=0))


def with_nan_embedding(model: SmallModel, token: int) -> SmallModel:
    values = model.embedding.values.copy()
    values[token] = np.nan
    return replace(model, embedding=stored(values))


def test_a_request_of_nan_harms_itself_only(small_model: SmallModel, isa: str, compute: str) -> None:
    # Goal: token 7 is embedded as NaN, so its request's hidden states and KV are NaN; its neighbours see none of it.
    sick = [7, 7, 7]
    tokens = [token if token != 7 else 8 for token in TOKENS[:40]]
    model = with_nan_embedding(small_model, 7).pack(compute=compute, isa=isa)
    expected = whole(Runner(model), tokens)
    runner = Runner(model, num_threads=2)
    runner.run(Chunk(sick, 0, [1]), Chunk(tokens[:20], 0, TABLE), Chunk(sick, 0, [2]))
    found = runner.logits(Chunk(sick, 3, [1]), Chunk(tokens[20:], 20, TABLE), Chunk([7], 3, [2]))
    assert_same_bits(found[3:23], expected[20:])
    assert np.isnan(found[:3]).all()
    assert np.isnan(found[23:]).all()


@pytest.mark.parametrize("stale", [0x00, 0x7F, 0xFF])
def test_what_blocks_held_before_does_not_matter(stale: int, small_model: SmallModel, isa: str, compute: str) -> None:
    # Goal: 0xFF is NaN in both types, 0x7F is huge (bf16: NaN): neither reaches a request, also not times zero.
    model = small_model.pack(compute=compute, isa=isa)
    expected = whole(Runner(model))
    runner = Runner(model)
    runner.pool[:] = stale
    assert_same_bits(in_chunks(runner, [1, 2, 30, 77]), expected)


WRONG: dict[str, tuple[Chunk, str]] = {
    "token beyond the vocabulary": (Chunk([1, SHAPE["vocab_size"]], 0, [0]), "token id 37"),
    "negative token": (Chunk([-1], 0, [0]), "token id -1"),
    "position beyond the angles": (Chunk([1, 2], NUM_POSITIONS - 1, range(11)), "2 positions from 159 on"),
    "negative position": (Chunk([1], -1, [0]), "1 positions from -1"),
    "position that overflows": (Chunk([1, 2], 2**63 - 1, [0]), "2 positions from 9223372036854775807"),
    "block beyond the pool": (Chunk([1] * 17, 0, [0, 24]), "KV block 24 is outside the pool of 24"),
    "negative block": (Chunk([1], 16, [0, -1]), "KV block -1"),
    "table too short": (Chunk([1] * 17, 0, [0]), "17 tokens need 2 KV blocks, the table has 1"),
    "no table": (Chunk([1], 0, []), "need 1 KV blocks, the table has 0"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_out_of_range_is_refused_before_anything_is_written(
    wrong: str, small_model: SmallModel, isa: str
) -> None:
    runner = Runner(small_model.pack(compute="f32", isa=isa))
    before = runner.pool.copy()
    chunk, message = WRONG[wrong]
    good = Chunk([3, 4], 0, [5])
    for batch in ((chunk,), (good, chunk), (chunk, good)):
        with pytest.raises(IndexError, match=message):
            runner.run(*batch)
        np.testing.assert_array_equal(runner.pool, before)
    runner.run(good)
    assert (runner.pool != before).any()


def test_arrays_that_do_not_belong_together_are_refused(small_model: SmallModel, isa: str) -> None:
    runner = Runner(small_model.pack(compute="f32", isa=isa))
    arguments: dict[str, Any] = {
        "tokens": np.array([1, 2], np.int32),
        "num_rows": np.array([2], np.int64),
        "starts": np.array([0], np.int64),
        "tables": np.array([0], np.int32),
        "table_ends": np.array([1], np.int64),
        "pool": runner.pool,
        "num_blocks": 24,
        "block_size": 16,
        "num_threads": 1,
    }
    before = runner.pool.copy()
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"starts": np.array([0, 1], np.int64)}, ValueError, "differ in length"),
        ({"table_ends": np.array([2], np.int64)}, ValueError, "out of order"),
        ({"num_blocks": 25}, ValueError, "smaller than its blocks"),
        ({"num_blocks": 2**62}, ValueError, "smaller than its blocks"),
        ({"block_size": 24, "num_blocks": 2}, ValueError, "multiple of 16"),
        ({"num_threads": 0}, ValueError, "num_threads is 0; it must be from 1 to 1024"),
        ({"num_rows": np.array([1], np.int64)}, IndexError, "do not cover the rows"),
        ({"num_rows": np.array([3], np.int64)}, IndexError, "sequence of 3 rows: 2 are left"),
        ({"num_rows": np.array([2**63 - 1], np.int64)}, IndexError, "rows: 2 are left"),
        ({"num_rows": np.array([0], np.int64)}, IndexError, "sequence of 0 rows"),
        ({"num_rows": np.array([-1], np.int64)}, IndexError, "sequence of -1 rows"),
    ]
    for changes, error, message in wrong:
        with pytest.raises(error, match=message):
            runner.model.run(**{**arguments, **changes})
        np.testing.assert_array_equal(runner.pool, before)
    runner.model.run(**arguments)


def test_a_weight_of_the_wrong_shape_is_refused_by_name() -> None:
    model = make_small_model(has_biases=True)
    layer = model.layers[1]
    down, bias = layer["down"], layer["output_bias"]
    assert isinstance(down, Stored)
    assert not isinstance(bias, Stored)
    layer["down"] = stored(down.values[:, :64].copy())
    with pytest.raises(ValueError, match=r"down projection is \[48, 64\]; the model needs \[48, 80\]"):
        model.pack(compute="f32", isa="scalar")
    layer |= {"down": down, "output_bias": bias[:3].copy()}
    with pytest.raises(ValueError, match="output bias has 3 elements; the model needs 48"):
        model.pack(compute="f32", isa="scalar")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_size": 0}, "head size must be a multiple of 16"),
        ({"head_size": 24}, "head size must be a multiple of 16"),
        ({"head_size": 272}, "at most 256"),
        ({"num_kv_heads": 4}, "multiple of the KV heads"),
        ({"num_kv_heads": 0}, "multiple of the KV heads"),
        ({"intermediate_size": 72}, "intermediate size must be a multiple of 16"),
        ({"num_layers": 3}, "number of layers"),
        ({"gate": "relu"}, "must be 'silu' or 'gelu'"),
    ],
)
def test_a_shape_that_the_kernels_cannot_compute_is_refused(
    changes: dict[str, Any], message: str, small_model: SmallModel
) -> None:
    model = replace(small_model, shape={**small_model.shape, **changes})
    with pytest.raises(ValueError, match=message):
        model.pack(compute="f32", isa="scalar")


def test_every_instruction_set_gives_the_same_bits(small_model: SmallModel, isa: str, compute: str) -> None:
    # Goal: but for the one set whose instruction adds in another order.
    if isa == "avx512_bf16" and compute == "bf16":
        pytest.skip("its dot instruction adds in another order")
    expected = whole(Runner(small_model.pack(compute=compute, isa="scalar")))
    assert_same_bits(whole(Runner(small_model.pack(compute=compute, isa=isa))), expected)
