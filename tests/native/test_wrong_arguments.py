"""What Python gives to single operations by mistake is refused by name: no crash, no copy that is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("giveway_kernels", reason="giveway-kernels is not installed: `make kernels` builds it")

from giveway_kernels import _native

kernels: Any = _native  # what is given to it is wrong on purpose
TOO_LARGE = r"the product at most 2\*\*47"


def zeros(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.zeros(shape, np.float32)


def matrix(num_outputs: int = 32, num_inputs: int = 48, **settings: Any) -> Any:
    rows = np.zeros((num_outputs, 4 * num_inputs), np.uint8)
    return kernels.Matrix.pack([("F32", rows)], **{"num_inputs": num_inputs, "compute": "f32", **settings})


def attend(**changes: Any) -> Any:
    """Two rows of one head, in a pool of two blocks."""
    arrays = {"qkv": zeros(2, 48), "table": np.arange(2, dtype=np.int32), "pool": np.zeros(4096, np.uint8)}
    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_size": 16, "block_size": 16}
    angles = {"cosine": zeros(2, 8), "sine": zeros(2, 8)}
    return kernels.attend(**{**arrays, **sizes, **angles, "start": 0, "scale": 1.0, **changes})


def test_attention_does_not_write_kv_to_a_copy_that_is_lost() -> None:
    for pool in (np.zeros(4096, np.int8), np.zeros(8192, np.uint8)[::2]):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            attend(pool=pool)


def test_pairs_that_are_no_whole_numbers_are_refused() -> None:
    pool = np.zeros((2, 4), np.uint8)
    for pairs in (np.array([[0.0, 1.5]]), np.array([[0, 1]], np.int32)):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            kernels.copy_blocks(pool, pool.copy(), pairs, num_threads=1)
        with pytest.raises(TypeError, match="incompatible function arguments"):
            kernels.copy_blocks_in_order(pool, pairs)


def calls_with_threads() -> dict[str, Callable[[int], object]]:
    pool, packed = np.zeros((2, 4), np.uint8), matrix()
    norm = kernels.Workload.norm(num_rows=4, size=4, compute="f32")
    return {
        "pack": lambda count: matrix(num_threads=count),
        "multiply": lambda count: kernels.multiply(zeros(1, 48), packed, num_threads=count),
        "multiply_peak": lambda count: kernels.multiply_peak("f32", num_threads=count),
        "read_peak": lambda count: kernels.read_peak(np.zeros(1 << 20, np.uint8), num_threads=count),
        "workload": lambda count: norm.run(1, num_threads=count),
        "sampler": kernels.Sampler,
        "copy_blocks": lambda count: kernels.copy_blocks(pool, pool.copy(), np.array([[0, 1]]), num_threads=count),
    }


def test_a_number_of_threads_that_cannot_be_is_refused_by_every_call() -> None:
    for call in calls_with_threads().values():
        call(2)
        for count in (0, -1, 1025, 100_000, 2**40):
            with pytest.raises(ValueError, match=f"num_threads is {count}; it must be from 1 to 1024"):
                call(count)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gate": "nope"}, "gate is 'nope'; it must be 'silu' or 'gelu'"),
        ({"bias": zeros(31)}, "bias must have an element for each output"),
        ({"bias": zeros(3000)}, "bias must have an element for each output"),
        ({"bias": zeros(32), "epilogue": "gate"}, "bias must .* goes with no gate"),
        ({"onto": zeros(3, 31), "epilogue": "add"}, r"onto must be \[rows, outputs\]"),
        ({"onto": zeros(2, 32), "epilogue": "add"}, r"onto must be \[rows, outputs\]"),
        ({"onto": zeros(3, 32)}, "goes with the epilogue 'add'"),
    ],
)
def test_a_product_refuses_what_does_not_fit_it(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.multiply(zeros(3, 48), matrix(), **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"start": -1}, "start is -1; it must be a position"),
        ({"start": -100}, "start is -100; it must be a position"),
        ({"start": 2**63 - 2}, "start is 9223372036854775806; it must be a position"),
        ({"start": 31}, "does not cover the chunk"),
        ({"num_layers": 2**60}, TOO_LARGE),
        ({"num_layers": 0}, "every size must be at least 1"),
        ({"block_size": 2**58}, TOO_LARGE),
        ({"num_heads": 2**60}, TOO_LARGE),
        ({"layer": 1}, "layer is not below num_layers"),
        ({"window": -1}, "window is -1"),
    ],
)
def test_attention_refuses_what_would_lead_out_of_the_pool(wrong: dict[str, Any], message: str) -> None:
    attend()
    with pytest.raises(ValueError, match=message):
        attend(**wrong)


def workload_of_attention(**changes: int) -> Any:
    one = dict.fromkeys(("num_sequences", "num_rows", "context", "num_heads", "num_kv_heads"), 1)
    return kernels.Workload.attention(**{**one, "head_size": 16, "block_size": 16, "compute": "f32", **changes})


HUGE: dict[str, Callable[[], object]] = {
    "product, rows": lambda: kernels.Workload.product(matrix(), num_rows=2**57, num_outputs=32, compute="f32"),
    "norm, rows": lambda: kernels.Workload.norm(num_rows=2**62, size=4, compute="f32"),
    "attention, sequences": lambda: workload_of_attention(num_sequences=2**60),
    "attention, context": lambda: workload_of_attention(context=2**60),
    "attention, heads": lambda: workload_of_attention(num_heads=2**60),
    "attention, block size": lambda: workload_of_attention(block_size=2**60),
    "matrix, inputs": lambda: kernels.Matrix.pack(
        [("F32", np.zeros((1, 0), np.uint8))], num_inputs=2**62, compute="f32"
    ),
}


@pytest.mark.parametrize("name", HUGE)
def test_sizes_whose_product_overflows_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=TOO_LARGE):
        HUGE[name]()


def test_more_turns_than_there_is_memory_to_count_are_refused() -> None:
    with pytest.raises(ValueError, match="num_turns is 1099511627776; it must be from 1 to 1000000"):
        kernels.Workload.norm(num_rows=4, size=4, compute="f32").run(2**40)
