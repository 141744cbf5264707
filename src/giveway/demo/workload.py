"""What the demo runs: requests, when each arrives, and a pool that is too small for them on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from giveway.build import Model
from giveway.core.config import DEFAULT_CLASS, blocks_for
from giveway.core.ids import TokenId
from giveway.core.sampling import SamplingParams

BACKGROUND_CLASS = 20
URGENT_CLASS = 0

_TOPICS = (
    "a lighthouse keeper",
    "a lost suitcase",
    "the first snow of the year",
    "a chess game in a park",
    "an old violin",
    "a night train",
    "a garden on the moon",
    "a clock that runs backwards",
)
_QUESTIONS = (
    "What is the capital of France?",
    "What is the chemical symbol for gold?",
    "What colour is a clear sky at noon?",
)
_WORDS = ("alpha", "bravo", "delta", "hotel", "india", "oscar", "romeo", "tango")  # five bytes, so five tokens, each


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request and the moment at which it is handed in."""

    name: str
    text: str  # what a person would read
    token_ids: tuple[TokenId, ...]
    sampling: SamplingParams
    priority: int
    # Handed in once the background has produced so many output tokens (tokens): progress, not time, so that the
    # same thing happens on a fast machine and on a slow one.
    after_tokens: int = 0

    @property
    def is_urgent(self) -> bool:
        """Whether a person waits for it."""
        return self.priority == URGENT_CLASS


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and the engine they are to fight over."""

    title: str
    requests: tuple[DemoRequest, ...]
    block_size: int  # tokens
    num_blocks: int  # of the pool that is too small (blocks)
    num_seats: int  # resident requests, in that pool

    @property
    def max_slots_of_one(self) -> int:
        """Prompt + output of the longest request (tokens)."""
        return max(_num_tokens(request) for request in self.requests)

    @property
    def num_blocks_wanted(self) -> int:
        """Blocks with which nobody ever has to give way."""
        return sum(blocks_for(_num_tokens(request), self.block_size) for request in self.requests)


def _num_tokens(request: DemoRequest) -> int:
    assert request.sampling.max_tokens is not None
    return len(request.token_ids) + request.sampling.max_tokens


def urgent_among_background(
    model: Model, *, num_background_tokens: int = 48, num_urgent_tokens: int = 16, block_size: int = 16
) -> Workload:
    """Eight background stories, and three urgent questions that arrive while they are being written.

    The pool holds about 60 % of what the stories take in the end, and there are as many seats as stories.
    """
    background = [
        DemoRequest(
            name=f"story-{number}",
            text=f"Write a short story about {topic}.",
            token_ids=_chat(model, f"Write a short story about {topic}."),
            sampling=SamplingParams(max_tokens=num_background_tokens, ignore_eos=True, temperature=0.8, seed=number),
            priority=BACKGROUND_CLASS,
        )
        for number, topic in enumerate(_TOPICS, start=1)
    ]
    total = num_background_tokens * len(background)
    urgent = [
        DemoRequest(
            name=f"urgent-{number}",
            text=question,
            token_ids=_chat(model, question),
            sampling=SamplingParams(max_tokens=num_urgent_tokens, temperature=0.0),
            priority=URGENT_CLASS,
            after_tokens=total * number // (len(_QUESTIONS) + 2),
        )
        for number, question in enumerate(_QUESTIONS, start=1)
    ]
    wanted = [blocks_for(_num_tokens(request), block_size) for request in background]
    return Workload(
        title="8 background stories, 3 urgent questions",
        requests=(*background, *urgent),
        block_size=block_size,
        num_blocks=max(sum(wanted) * 6 // 10, *(blocks_for(_num_tokens(request), block_size) for request in urgent)),
        num_seats=len(background),
    )


def write_up(model: Model) -> Workload:
    """Return the tutorial's demonstration: 8 requests of 5 + 8 tokens, one token a block, on a pool of 20."""
    return Workload(
        title="8 requests of 5 prompt and 8 output tokens",
        requests=tuple(
            DemoRequest(
                name=word,
                text=word,
                token_ids=tuple(model.tokenizer.encode(word)),
                sampling=SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0),
                priority=DEFAULT_CLASS,
            )
            for word in _WORDS
        ),
        block_size=1,
        num_blocks=20,
        num_seats=8,
    )


def _chat(model: Model, text: str) -> tuple[TokenId, ...]:
    messages: Sequence[dict[str, str]] = [{"role": "user", "content": text}]
    return tuple(model.encode_chat(messages))
