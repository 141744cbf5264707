"""What everybody outside the runtime knows of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from giveway.core.ids import TokenId


class Tokenizing(Protocol):
    """Text to token ids and back. Implementations are immutable as seen from outside and safe to share by threads."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""

    @property
    def bos_token_id(self) -> TokenId | None:
        """The token that begins a text; None: the vocabulary has none."""

    @property
    def eos_token_ids(self) -> frozenset[TokenId]:
        """Tokens that end a text, as far as the tokenizer's own files say."""

    @property
    def special_ids(self) -> frozenset[TokenId]:
        """Control tokens: what decode leaves out unless told otherwise."""

    @property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token, at least 1."""

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[TokenId]:
        """Return the ids of a text.

        add_special_tokens: begin (and end) as the model's files say, for example with BOS. parse_special: a control
        token spelled out in the text becomes that token; False: it becomes ordinary pieces, so text of a stranger
        cannot steer the model. Raises InvalidRequestError for text that is not Unicode (a lone surrogate).
        """

    def decode(self, ids: Sequence[TokenId], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence of ids; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""

    def token_bytes(self, token_id: TokenId) -> bytes:
        """Exact bytes that one token adds to a text; an id without a token adds none.

        Their concatenation is the text of a sequence, up to a space that some vocabularies put before the first word
        and that `decode` removes.
        """
