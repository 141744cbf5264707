"""Prompts of a wished length against servers whose tokenizer is unknown.

As token ids the length is exact. As text every word counts as one token, which is near the truth in most vocabularies;
what the server counted (`usage`) is what the report says.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from giveway.bench.serve.words import WORDS
from giveway.core.errors import ConfigError

BLOCK_TOKENS = 512  # tokens that one entry of a Mooncake trace's hash_ids stands for

Prompt = list[int] | str


class PromptFormat(Enum):
    """How a prompt is sent."""

    IDS = "ids"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids that prompts are made of: first to last, both included."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last < 1 << 31:
            raise ConfigError(f"--random-vocab {self.first}-{self.last}: write first-last, two ids from 0 on")


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes prompts that share nothing from their beginning on, unless that is wished.

    The first two tokens of a prompt spell its serial number, so no two of a run begin alike and no prefix cache helps.
    Everything follows from the seed: the same seed against the same server meets the cache of the run before.
    """

    format: PromptFormat
    vocabulary: Vocabulary
    seed: int
    prefix_tokens: int = 0  # the same in front of every prompt, on top of its own length

    @property
    def _size(self) -> int:
        if self.format is PromptFormat.TEXT:
            return len(WORDS)
        return self.vocabulary.last - self.vocabulary.first + 1

    def fresh(self, serial: int, num_tokens: int) -> Prompt:
        """Return a prompt of its own. serial: no other prompt of the run has it."""
        return self._render([*self._prefix(), *self._unique(serial, num_tokens)])

    def from_blocks(self, serial: int, num_tokens: int, block_ids: Sequence[int]) -> Prompt:
        """Return a prompt made of blocks; equal ids give equal blocks. What they do not cover is unlike any other."""
        symbols: list[int] = []
        for block_id in block_ids:
            if len(symbols) >= num_tokens:
                break
            symbols += self._draw(f"block {block_id}", BLOCK_TOKENS)
        if len(symbols) < num_tokens:
            symbols += self._unique(serial, num_tokens - len(symbols))
        return self._render([*self._prefix(), *symbols[:num_tokens]])

    def _prefix(self) -> list[int]:
        return self._draw("prefix", self.prefix_tokens) if self.prefix_tokens else []

    def _unique(self, serial: int, num_tokens: int) -> list[int]:
        symbols = self._draw(f"prompt {serial}", num_tokens)
        digits = [serial % self._size, serial // self._size]
        for place, (digit, shift) in enumerate(zip(digits[:num_tokens], self._draw("shift", 2), strict=False)):
            symbols[place] = (digit + shift) % self._size
        return symbols

    def _draw(self, name: str, num_symbols: int) -> list[int]:
        rng = random.Random(f"{self.seed} {name}")  # noqa: S311  # repeatable on purpose
        return rng.choices(range(self._size), k=num_symbols)

    def _render(self, symbols: Sequence[int]) -> Prompt:
        if self.format is PromptFormat.TEXT:
            return " ".join(WORDS[symbol] for symbol in symbols)
        return [self.vocabulary.first + symbol for symbol in symbols]
