"""What Python gives to a model by mistake is refused by name: no crash, no copy that is written to and lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("giveway_kernels", reason="giveway-kernels is not installed: `make kernels` builds it")

from giveway_kernels import Matrix, Model

from tests.native.small_model import NUM_POSITIONS, Bytes, Chunk, Runner, SmallModel, make_small_model

TOO_LARGE = r"the product at most 2\*\*47"


def zeros(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.zeros(shape, np.float32)


@pytest.fixture(scope="module")
def small_model() -> SmallModel:
    return make_small_model()


@pytest.fixture
def runner(small_model: SmallModel) -> Runner:
    return Runner(small_model.pack(compute="f32", isa="scalar"))


def step(pool: Bytes) -> dict[str, Any]:
    """Arguments of Model.run: two tokens of one request."""
    return {
        "tokens": np.array([1, 2], np.int32),
        "num_rows": np.array([2], np.int64),
        "starts": np.array([0], np.int64),
        "tables": np.array([0], np.int32),
        "table_ends": np.array([1], np.int64),
        "pool": pool,
        "num_blocks": 24,
        "block_size": 16,
        "num_threads": 1,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": np.array([2**32 + 1, 2])},
        {"tokens": np.array([1.0, 2.0], np.float32)},
        {"tables": np.array([2**32])},
        {"num_rows": np.array([2], np.int32)},
        {"starts": np.array([0.0])},
        {"table_ends": np.array([1], np.uint64)},
        {"tokens": np.array([1, 7, 2, 7], np.int32)[::2]},
    ],
    ids=str,
)
def test_ids_of_another_type_are_not_taken_for_others(wrong: dict[str, Any], runner: Runner) -> None:
    before = runner.pool.copy()
    with pytest.raises(TypeError, match="incompatible function arguments"):
        runner.model.run(**{**step(runner.pool), **wrong})
    np.testing.assert_array_equal(runner.pool, before)


def test_a_pool_that_would_be_copied_is_refused(runner: Runner) -> None:
    # Goal: else the KV would be written to a copy, and be lost.
    read_only = runner.pool.copy()
    read_only.flags.writeable = False
    for pool in (runner.pool.view(np.int8), np.zeros(2 * runner.pool.size, np.uint8)[::2], read_only):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            runner.model.run(**{**step(runner.pool), "pool": pool})


def test_logits_are_not_written_to_a_copy_that_is_lost(runner: Runner) -> None:
    runner.run(Chunk([1, 2], 0, [0]))
    stride = runner.model.logits_stride
    for out in (np.zeros((1, stride)), zeros(1, 2 * stride)[:, ::2]):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            runner.model.logits(np.array([0]), out, 1)  # type: ignore[arg-type]
        assert not out.any()


@pytest.mark.parametrize("count", [0, -1, 1025, 100_000, 2**40])
def test_a_number_of_threads_that_cannot_be_is_refused(count: int, runner: Runner) -> None:
    with pytest.raises(ValueError, match=f"num_threads is {count}; it must be from 1 to 1024"):
        runner.model.run(**{**step(runner.pool), "num_threads": count})
    with pytest.raises(ValueError, match=f"num_threads is {count}; it must be from 1 to 1024"):
        runner.model.logits(np.array([0]), zeros(1, runner.model.logits_stride), count)


@pytest.mark.parametrize("block_size", [2**56, 2**62, 2**63 - 16])
def test_blocks_larger_than_any_memory_are_refused(block_size: int, runner: Runner) -> None:
    with pytest.raises(ValueError, match=TOO_LARGE):
        runner.model.run(**{**step(runner.pool), "block_size": block_size})
    with pytest.raises(ValueError, match=TOO_LARGE):
        runner.model.kv_block_bytes(block_size)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_size": "48"}, TypeError, "'hidden_size' is of the type str; it must be a whole number"),
        ({"hidden_size": 48.0}, TypeError, "'hidden_size' is of the type float"),
        ({"vocab_size": 2**70}, TypeError, r"'vocab_size' .* must be a whole number below 2\*\*63"),
        ({"norm_eps": None}, TypeError, "'norm_eps' is of the type NoneType; it must be a number"),
        ({"gate": 1}, TypeError, "'gate' is of the type int; it must be a string"),
        ({"intermediate_size": 2**62}, ValueError, TOO_LARGE),
        ({"num_heads": 2**62}, ValueError, TOO_LARGE),
        ({"window": -1}, ValueError, "window is -1"),
    ],
)
def test_a_wrong_number_in_the_shape_of_a_model_is_named(
    changes: dict[str, Any], error: type[Exception], message: str, small_model: SmallModel
) -> None:
    with pytest.raises(error, match=message):
        replace(small_model, shape={**small_model.shape, **changes}).pack(compute="f32", isa="scalar")


def test_a_model_without_layers_is_refused(small_model: SmallModel) -> None:
    # Goal: it has no KV, and a pool was divided by the size of its blocks.
    shape = {**small_model.shape, "num_layers": 0}
    with pytest.raises(ValueError, match="at least one layer"):
        replace(small_model, shape=shape, layers=[]).pack(compute="f32", isa="scalar")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"input_norm": 3}, "'input_norm' is of the type int; it must be a contiguous array of float32"),
        ({"input_norm": np.zeros(48)}, "'input_norm' is of the type ndarray"),
        ({"query": 3}, "'query' is of the type int; it must be a Matrix"),
        ([], "a layer is of the type list; it must be a dict"),
    ],
)
def test_a_wrong_weight_of_a_layer_is_named(layer: Any, message: str, small_model: SmallModel) -> None:
    shape, table = (
        {**small_model.shape, "compute": "f32"},
        Matrix.pack([("F32", np.zeros((37, 192), np.uint8))], num_inputs=48, compute="f32"),
    )
    with pytest.raises(TypeError, match=message):
        Model.make(shape, [layer], embedding=table, head=table, final_norm=zeros(48))


def test_angles_of_another_head_size_are_refused(runner: Runner) -> None:
    # Goal: not taken for twice as many positions of half the width.
    for cosine, sine in (
        (zeros(50, 16), zeros(50, 16)),
        (zeros(50, 8), zeros(50, 16)),
        (zeros(50, 8), zeros(49, 8)),
    ):
        with pytest.raises(ValueError, match=r"must both be \[positions, head_size / 2 = 8\]"):
            runner.model.set_angles(cosine, sine)
    runner.run(Chunk([1], NUM_POSITIONS - 1, range(10)))  # those that it had are still there


def test_a_model_without_angles_has_no_positions(runner: Runner) -> None:
    runner.model.set_angles(zeros(0, 8), zeros(0, 8))
    with pytest.raises(IndexError, match="1 positions from 0 on cannot be computed: the model has 0"):
        runner.run(Chunk([1], 0, [0]))
