"""Names for classes."""

from __future__ import annotations

from typing import Any

import pytest

from giveway.core.errors import ConfigError
from giveway.server.classes import PriorityClasses


def test_a_number_has_the_name_with_the_largest_start_not_above_it() -> None:
    classes = PriorityClasses()
    found = [classes.name_of(number) for number in (-5, 0, 9, 10, 19, 20, 29, 30, 100)]
    assert found == ["priority"] * 3 + ["default"] * 2 + ["flex"] * 2 + ["batch"] * 2
    assert [classes.start_of(name) for name in classes.names] == [0, 10, 20, 30]


def test_numbers_below_the_first_start_belong_to_the_first_name() -> None:
    classes = PriorityClasses.of({"chat": 5, "bulk": 50})
    assert [classes.name_of(number) for number in (0, 5, 49, 50)] == ["chat", "chat", "chat", "bulk"]
    assert classes.start_of("flex") is None


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ((), "1 to 16"),
        (tuple((f"c{number}", number) for number in range(17)), "1 to 16"),
        ((("Chat", 0),), "a name is"),
        ((("a b", 0),), "a name is"),
        ((("", 0),), "a name is"),
        ((("a\n", 0),), "a name is"),
        (((1, 0),), "a name is"),
        ((("a", True),), "whole number"),
        ((("a", 0.5),), "whole number"),
        ((("a", -1),), "starts at -1"),
        ((("a", 101),), "starts at 101"),
        ((("a", 0), ("a", 1)), "twice"),
        ((("a", 5), ("b", 5)), "above the one before"),
        ((("a", 5), ("b", 0)), "above the one before"),
    ],
)
def test_names_and_starts_that_make_no_order_are_refused(entries: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        PriorityClasses(entries)
