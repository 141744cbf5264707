"""What restricts the tokens of an answer: a grammar, seen from outside as a function of the output tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from giveway.core.ids import TokenId
from giveway.core.sampling import StructuredOutput

TokenMask = bytes
"""Which tokens may come next: bit `token % 8` of byte `token // 8`. A token beyond the end may not."""


class Constraint(Protocol):
    """The grammar of one answer.

    Every method gives the same for the same tokens, whatever it was asked before, so an answer that is preempted,
    computed again or replayed goes on exactly where it was. Implementations remember the tokens that they were asked
    about last, and asking about the same ones with a few more is cheap; so each answer has an object of its own, which
    is used by one thread at a time.
    """

    @property
    def end_token_ids(self) -> frozenset[TokenId]:
        """The tokens that say that the text ends here: they are allowed where the grammar may end."""

    def allowed_after(self, output_token_ids: Sequence[TokenId]) -> TokenMask | None:
        """Return which tokens may follow; None: every one.

        Raises RequestFailedError when these tokens do not keep the grammar, or it takes more work than one request may
        cost.
        """

    def is_complete_after(self, output_token_ids: Sequence[TokenId]) -> bool:
        """Whether the grammar is complete and nothing but the end may follow. Raises as allowed_after."""


GRAMMAR_FAILED = "response_format: the grammar"
"""How the error of a request begins whose grammar was too much for the library that keeps it, once under way."""

ConstraintFactory = Callable[[], Constraint]
"""A compiled grammar: makes the object of each answer."""


class ConstraintCompiler(Protocol):
    """Makes grammars for one vocabulary. May be called from any thread."""

    def __call__(self, wish: StructuredOutput) -> ConstraintFactory:
        """Compile. Raises InvalidRequestError, naming response_format, for a grammar that is wrong or too costly."""


def is_allowed(mask: TokenMask, token_id: TokenId) -> bool:
    """Whether a mask allows a token, which is 0 or more."""
    place = token_id >> 3
    return place < len(mask) and bool(mask[place] >> (token_id & 7) & 1)
