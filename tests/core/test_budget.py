"""Tokens of a step: who gets how many."""

from __future__ import annotations

import pytest

from giveway.core.budget import prefill_tokens


@pytest.mark.parametrize(
    ("wanted", "left", "set_aside", "is_best", "granted"),
    [
        (20, 64, 0, True, 20),  # all it wants
        (20, 8, 0, True, 8),  # all there is
        (20, 8, 5, False, 3),  # decodes of its class keep their tokens
        (20, 8, 8, False, 0),  # nothing left over for a second prefill
        (20, 8, 8, True, 4),  # the best prefill gets a block whatever is set aside
        (20, 3, 8, True, 3),  # or what is left of one
        (2, 8, 8, True, 2),  # or what it wants of one
        (20, 0, 0, True, 0),  # an empty budget is empty for everybody
        (20, 4, 9, False, 0),  # more set aside than left is not a debt
    ],
)
def test_a_prefill_gets_what_decodes_of_its_class_leave_and_the_best_one_at_least_a_block(
    wanted: int, left: int, set_aside: int, is_best: bool, granted: int
) -> None:
    tokens = prefill_tokens(wanted=wanted, left=left, set_aside=set_aside, block_size=4, is_best_prefill=is_best)
    assert tokens == granted
