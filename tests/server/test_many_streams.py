"""Very many streams at once: each says what it says when it is alone."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest

from tests.server.running import Running, running, wait_until

NUM_PROMPTS = 40


def body_of(number: int) -> dict[str, Any]:
    """One of the requests: of different lengths, classes and temperatures, each with its own seed."""
    number %= NUM_PROMPTS
    return {
        "model": "tiny",
        "prompt": f"{number} " + "tell me " * (number % 7),
        "max_tokens": 8 + number % 25,
        "temperature": 0.8 if number % 2 else 0,
        "seed": number,
        "extra_body": {"priority": (0, 10, 20, 30)[number % 4], "ignore_eos": True},
    }


async def text_of(client: openai.AsyncOpenAI, number: int) -> str:
    pieces = []
    async for chunk in await client.completions.create(stream=True, **body_of(number)):
        pieces += [choice.text for choice in chunk.choices]
    return "".join(pieces)


def when_all_are_there(server: Running, num_streams: int) -> None:
    """Let the engine go on only once so many have come: a fast machine would be done with each before the next."""
    is_over = False

    def hold_the_step(*_: object) -> None:
        nonlocal is_over
        if not is_over:
            wait_until(lambda: server.engine.num_unfinished >= num_streams, "not all have come")
            is_over = True

    server.engine.add_listener(hold_the_step)


async def many(server: Running, num_streams: int, seconds: float) -> int:
    """Keep so many streams open for a time, and compare each with its solo run; return how many there were."""
    async with server.async_client() as client:
        alone = [await text_of(client, number) for number in range(NUM_PROMPTS)]
        when_all_are_there(server, num_streams)
        end_s, num_read = time.monotonic() + seconds, 0

        async def keep_reading(number: int) -> None:
            nonlocal num_read
            while True:
                assert await text_of(client, number) == alone[number % NUM_PROMPTS]
                num_read += 1
                number += num_streams
                if time.monotonic() >= end_s:
                    return

        await asyncio.gather(*(keep_reading(number) for number in range(num_streams)))
    return num_read


# Fewer seats and blocks than streams: they give way to each other all the time.
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "model": "tiny",
    "num_kv_blocks": 24,
    "max_num_seqs": 16,
    "swap_space": 1 << 18,
}


@pytest.mark.parametrize(
    ("num_streams", "seconds"),
    [pytest.param(40, 1.0, id="40"), pytest.param(200, 60.0, id="200 for a minute", marks=pytest.mark.long)],
)
def test_every_one_of_very_many_streams_says_what_it_says_alone(num_streams: int, seconds: float) -> None:
    with running(**{**SETTINGS, "check_invariants": num_streams < 100}) as server:
        assert asyncio.run(many(server, num_streams, seconds)) >= num_streams
        told = server.get("/metrics").text
        given = [each for each in told.splitlines() if each.startswith("vllm:num_preemptions_total{")]
        assert sum(float(each.split()[-1]) for each in given) > 0, "nobody gave way"
        server.until_idle()
