"""Several Python threads that use one model wait for each other: none hangs, and none gets into another's step."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread

import numpy as np
import pytest

pytest.importorskip("giveway_kernels", reason="giveway-kernels is not installed: `make kernels` builds it")

from giveway_kernels import Model

from tests.native.small_model import SHAPE, Bytes, Chunk, Runner, make_small_model

SIZES = [1, 150, 17, 64, 3, 97]  # tokens of a step
TIMEOUT_S = 60  # takes less than one second


def pools_after_steps(model: Model, number: int) -> list[Bytes]:
    """Run prompts of all sizes, beginning with another one for each number, and return what each wrote."""
    rng = np.random.default_rng(number)
    pools = []
    for size in SIZES[number:] + SIZES[:number]:
        runner = Runner(model, num_blocks=10, num_threads=1 + number % 3)
        runner.run(Chunk(rng.integers(0, SHAPE["vocab_size"], size).tolist(), 0, range(10)))
        # Whose row 0 this is, nobody knows here; but there is one.
        model.logits(np.zeros(size, np.int64), np.empty((size, model.logits_stride), np.float32), 1 + number % 2)
        pools.append(runner.pool)
    return pools


def started(model: Model, number: int) -> Future[list[Bytes]]:
    """Run in a thread that does not keep the process alive should it hang."""
    future: Future[list[Bytes]] = Future()

    def work() -> None:
        try:
            future.set_result([pool for _ in range(5) for pool in pools_after_steps(model, number)])
        except BaseException as error:
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future


def test_four_threads_with_steps_of_all_sizes_neither_hang_nor_meet(isa: str) -> None:
    small_model = make_small_model()
    model = small_model.pack(compute="f32", isa=isa)
    futures = [started(model, number) for number in range(4)]
    for number, future in enumerate(futures):
        found = future.result(TIMEOUT_S)
        alone = pools_after_steps(small_model.pack(compute="f32", isa=isa), number)
        for index, pool in enumerate(found):
            np.testing.assert_array_equal(pool, alone[index % len(SIZES)])
