"""The model that a server offers, as far as HTTP is concerned: names, text side, sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from giveway.core.ids import TokenId
from giveway.core.tokenizing import Tokenizing
from giveway.engine.tool_calls import ToolFormat


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
    vocab_size: int  # ids that prompts may hold; those that the tokenizer lacks have no text
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

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint`: changes when the same request might get another answer."""
        digest = hashlib.sha256(f"{self.root}|{self.version}|{self.max_model_len}".encode()).hexdigest()
        return f"fp_{digest[:12]}"
