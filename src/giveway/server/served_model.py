"""The model that a server offers, as far as HTTP is concerned: names, text side, sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from giveway.core.errors import RequestTooLargeError
from giveway.core.ids import TokenId
from giveway.core.tokenizing import Tokenizing
from giveway.engine.tool_calls import ToolFormat

_LONG_TEXT_CHARACTERS = 1 << 16


class ChatEncoding(Protocol):
    """Messages to token ids."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], **template_arguments: Any) -> list[TokenId]:
        """Return the ids of a conversation, ready for the model's answer. Raises InvalidRequestError."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients see of the model."""

    names: tuple[str, ...]  # the first is the one that answers bear
    root: str  # what the model's makers call it
    tokenizer: Tokenizing
    encode_chat: ChatEncoding
    tool_format: ToolFormat | None  # None: its template takes no tools
    tool_marker_id: TokenId | None  # the control token that announces a call; None: it is ordinary text
    max_model_len: int  # tokens
    num_seats: int
    created: int  # when it was loaded, seconds since 1970
    version: str  # of GiveWay

    @property
    def name(self) -> str:
        """The name in answers."""
        return self.names[0]

    def check_length(self, num_characters: int) -> None:
        """Raise RequestTooLargeError for a text that cannot fit whatever its tokens are: finding them takes seconds."""
        if num_characters >= _LONG_TEXT_CHARACTERS:
            least = num_characters // self.tokenizer.longest_token_bytes
            if least >= self.max_model_len:
                raise RequestTooLargeError(
                    f"messages of {num_characters} characters have at least {least} tokens, and prompt and output "
                    f"together may have {self.max_model_len}"
                )

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint`: changes when the same request might get another answer."""
        digest = hashlib.sha256(f"{self.root}|{self.version}|{self.max_model_len}".encode()).hexdigest()
        return f"fp_{digest[:12]}"
