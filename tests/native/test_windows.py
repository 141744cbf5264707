"""A window that no position reaches the end of is none, however large it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("giveway_kernels", reason="giveway-kernels is not installed: `make kernels` builds it")

from tests.native.attention_world import Memory, Request, Shape
from tests.native.small_model import NUM_POSITIONS, SHAPE, Chunk, Floats, Runner, make_small_model

TOKENS = [int(token) for token in np.random.default_rng(2).integers(0, SHAPE["vocab_size"], NUM_POSITIONS)]
HUGE = [NUM_POSITIONS, 2**31, 2**63 - 1]


@pytest.mark.parametrize("window", HUGE)
def test_attention_within_a_huge_window_is_attention_without_one(window: int, isa: str, compute: str) -> None:
    request = Request(Shape(group_size=3, compute=compute), num_tokens=NUM_POSITIONS)
    windowed = replace(request.shape, window=window)
    expected = Memory(request.shape).attend_in_chunks(request, [70, 1], isa)
    found = Memory(windowed).attend_in_chunks(Request(windowed, NUM_POSITIONS), [70, 1], isa)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("window", HUGE)
def test_a_model_with_a_huge_window_gives_the_logits_of_one_without(window: int, isa: str) -> None:
    def logits(**changes: Any) -> Floats:
        runner = Runner(make_small_model(**changes).pack(compute="f32", isa=isa))
        return runner.logits(Chunk(TOKENS, 0, range(10)))

    np.testing.assert_array_equal(logits(window=window), logits())
    assert (logits(window=NUM_POSITIONS - 1)[-1] != logits()[-1]).any()  # one position less is a window
