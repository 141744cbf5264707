"""The tree of exceptions at the top of the file is the tree of classes below it."""

from __future__ import annotations

import re

from giveway.core import errors
from giveway.core.errors import GiveWayError, ModelNotFoundError


def test_the_picture_at_the_top_shows_every_exception_below_its_base() -> None:
    pictured: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^([ │├└─]+)([A-Z]\w+Error)\b", line)
        if not found:
            continue
        depth = len(found[1])
        path = [(d, name) for d, name in path if d < depth]
        pictured[found[2]] = path[-1][1] if path else "Exception"
        path.append((depth, found[2]))
    classes = {
        name: kind.__bases__[0].__name__
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, GiveWayError)
    }
    assert pictured == classes


def test_every_exception_can_be_caught_by_the_builtin_that_fits_it() -> None:
    assert issubclass(errors.InvalidRequestError, ValueError)
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.MissingDependencyError, ImportError)
    assert issubclass(errors.InvariantError, AssertionError)


def test_a_missing_model_is_told_in_our_words_and_not_with_an_errno() -> None:
    assert str(ModelNotFoundError("no model at 'x'")) == "no model at 'x'"
    assert str(ModelNotFoundError()) == ""
