"""What is measured: requests and the figure that is taken of them. A further scenario is an entry in SCENARIOS."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.workers.protocol import Finished, Limits, Request

_SEED = 7
_TOKEN_IDS = range(100, 49_000)  # of SmolLM2's vocabulary, without its control tokens
_KV_PAGE = 256  # tokens; the largest page of the engines compared


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens of one request."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run says; None: not a figure of this scenario."""

    seconds: float
    cpu_s: float | None = None  # processor time of all threads: less touched by what else the machine does
    output_tok_s: float | None = None
    prompt_tok_s: float | None = None
    total_tok_s: float | None = None  # prompt and output tokens over the whole run


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests that are handed in together, and what is measured of them."""

    name: str
    about: str
    lengths: tuple[Length, ...]
    figure: str  # the field of Figures that spread and ratio are of
    measure: Callable[[Scenario, Finished], Figures]
    is_from_start: bool = False  # a fresh process every round, its time counted from its start

    @property
    def num_prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(length.prompt for length in self.lengths)

    @property
    def num_output_tokens(self) -> int:
        """Of all requests."""
        return sum(length.output for length in self.lengths)

    def requests(self, round_number: int) -> list[Request]:
        """Return the requests of one round: the same lengths in each, other tokens, so that no prefix cache answers."""
        rng = random.Random(f"{_SEED} {self.name} {round_number}")  # noqa: S311  # repeatable on purpose
        return [Request(rng.choices(_TOKEN_IDS, k=length.prompt), length.output) for length in self.lengths]


def limits_for(scenario: Scenario, *, threads: int, kv_bytes_per_token: int) -> Limits:
    """Return what an engine needs room for. kv_bytes_per_token: in float32."""
    pages = [_in_pages(length.prompt + length.output) for length in scenario.lengths]
    return Limits(
        threads=threads,
        num_seqs=len(pages),
        kv_tokens=sum(pages),
        kv_bytes=sum(pages) * kv_bytes_per_token,
        max_model_len=max(pages),
    )


def _in_pages(num_tokens: int) -> int:
    return -(-num_tokens // _KV_PAGE) * _KV_PAGE


def _all_tokens(scenario: Scenario, finished: Finished) -> Figures:
    return Figures(
        finished.seconds,
        finished.cpu_s,
        output_tok_s=scenario.num_output_tokens / finished.seconds,
        total_tok_s=(scenario.num_prompt_tokens + scenario.num_output_tokens) / finished.seconds,
    )


def _after_the_first(scenario: Scenario, finished: Finished) -> Figures:
    decoding_s = finished.seconds - finished.first_token_s
    return Figures(
        finished.seconds,
        finished.cpu_s,
        output_tok_s=(scenario.num_output_tokens - 1) / decoding_s,
        total_tok_s=(scenario.num_prompt_tokens + scenario.num_output_tokens) / finished.seconds,
    )


def _until_the_first(scenario: Scenario, finished: Finished) -> Figures:
    rate = scenario.num_prompt_tokens / finished.first_token_s
    return Figures(finished.seconds, finished.cpu_s, prompt_tok_s=rate)


def _seconds_alone(_: Scenario, finished: Finished) -> Figures:
    return Figures(finished.seconds)


def _draw_lengths(count: int, prompt: tuple[int, int], output: tuple[int, int]) -> tuple[Length, ...]:
    rng = random.Random(_SEED)  # noqa: S311  # repeatable on purpose
    return tuple(Length(rng.randint(*prompt), rng.randint(*output)) for _ in range(count))


SCENARIOS = (
    Scenario(
        "batch",
        "64 requests at once, prompts of 100-512 tokens, outputs of 64-192 tokens",
        _draw_lengths(64, (100, 512), (64, 192)),
        "output_tok_s",
        _all_tokens,
    ),
    Scenario(
        "one_stream",
        "one request, prompt 64 tokens, output 128; output tok/s without the first token",
        (Length(64, 128),),
        "output_tok_s",
        _after_the_first,
    ),
    Scenario("prefill_512", "first token of a prompt of 512", (Length(512, 1),), "prompt_tok_s", _until_the_first),
    Scenario("prefill_4096", "first token of a prompt of 4096", (Length(4096, 1),), "prompt_tok_s", _until_the_first),
    Scenario(
        "start",
        "process start to the first token of a prompt of 16",
        (Length(16, 1),),
        "seconds",
        _seconds_alone,
        is_from_start=True,
    ),
)
