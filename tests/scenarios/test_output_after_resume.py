"""Whatever happens to a request on the way, what comes out is what would have come out in peace."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.events import PromptLogprobs, TokenEmitted
from giveway.core.ids import RequestId, TokenId
from giveway.core.plan import TokenLogprobs
from giveway.core.sampling import SamplingParams
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.six_checks import calm_tokens
from tests.world import World, prompt_of

SWAP, RECOMPUTE = PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE
SEEDED = SamplingParams(temperature=0.8, seed=42)

both_modes = pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])


def run_until(world: World, name: str, num_tokens: int) -> None:
    while len(world.tokens[RequestId(name)]) < num_tokens:
        world.step()


@both_modes
def test_a_token_is_emitted_once_though_its_request_is_evicted_twice_in_a_row(mode: PreemptionChoice) -> None:
    # Goal: evicted in the step after each token, up to the very last one.
    world = World(device_blocks=8, host_blocks=8, copies=lambda copy: CopyFate(copy.copy_id % 3))
    world.submit("r", prompt_tokens=5, max_tokens=6)
    while not world.is_finished("r"):
        if world.plans and world.plans[-1].num_tokens:
            world.give_way("r", mode)
        world.step()
        if not world.is_finished("r"):
            world.give_way("r", mode)
            world.step()
    world.run_until_idle()
    assert [event.output_index for event in world.events_of("r", TokenEmitted)] == list(range(6))


@both_modes
@pytest.mark.parametrize("evict_after", [0, 5])
def test_log_probabilities_keep_step_with_tokens_over_an_eviction(mode: PreemptionChoice, evict_after: int) -> None:
    # Goal: evicted before the first token and after the fifth: as many values as tokens, each at its own token.
    def run(*, disturbed: bool) -> list[tuple[int, TokenId, TokenLogprobs | None]]:
        world = World(device_blocks=8, host_blocks=8, budget=8)
        sampling = SamplingParams(temperature=1.0, logprobs=3)
        world.submit("r", prompt_tokens=12, max_tokens=12, sampling=sampling, seed=9)
        world.step()  # eight of twelve prompt tokens
        run_until(world, "r", evict_after)
        if disturbed:
            world.give_way("r", mode)
        world.run_until_idle()
        return [(e.output_index, e.token_id, e.logprobs) for e in world.events_of("r", TokenEmitted)]

    calm, disturbed = run(disturbed=False), run(disturbed=True)
    assert disturbed == calm
    assert len(calm) == 12
    assert all(logprobs is not None and logprobs.token_id == token for _, token, logprobs in calm)


def scores(world: World, name: str) -> list[TokenLogprobs]:
    return [value for event in world.events_of(name, PromptLogprobs) for value in event.values]


@both_modes
@pytest.mark.parametrize("evict_after_chunks", [1, 2])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_prompt_log_probabilities_are_whole_though_the_prefill_was_chunked_and_evicted(
    mode: PreemptionChoice, evict_after_chunks: int, prefix_caching: bool
) -> None:
    # Goal: prompt 20, chunk 8: nineteen values, those of the calm cold run, and again when the prompt is cached.
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=2)
    text = prompt_of("text", 20)

    def submit(world: World, name: str) -> None:
        world.submit(name, prompt=text, max_tokens=3, sampling=sampling)

    calm = World(device_blocks=8, budget=64)
    submit(calm, "cold")
    calm.run_until_idle()

    world = World(device_blocks=8, host_blocks=8, budget=8, prefix_caching=prefix_caching)
    submit(world, "r")
    world.steps(evict_after_chunks)
    world.give_way("r", mode)
    world.run_until_idle()
    submit(world, "warm")
    world.run_until_idle()
    assert len(scores(calm, "cold")) == 19
    assert scores(world, "r") == scores(world, "warm") == scores(calm, "cold")


def alone(world: World) -> None:
    pass


def with_an_unseeded_neighbour(world: World) -> None:
    world.submit("neighbour", prompt_tokens=7, max_tokens=9, sampling=SamplingParams(temperature=1.3), seed=777)


@both_modes
@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.parametrize("company", [alone, with_an_unseeded_neighbour])
@pytest.mark.parametrize("evict_at", [None, 0, 7])
def test_a_seeded_request_draws_the_same_numbers_alone_evicted_in_company_and_in_chunks(
    mode: PreemptionChoice, budget: int, company: Callable[[World], None], evict_at: int | None
) -> None:
    # Goal: random numbers are a function of (seed, output index); chunks that do not end the prompt draw none.
    world = World(device_blocks=16, host_blocks=16, budget=budget)
    spec = world.submit("r", prompt_tokens=20, max_tokens=12, sampling=SEEDED, seed=42)
    company(world)
    world.step()
    if evict_at is not None:
        run_until(world, "r", evict_at)
        world.give_way("r", mode)
    world.run_until_idle()
    assert world.tokens[RequestId("r")] == list(calm_tokens(spec))


@both_modes
def test_penalties_and_minimum_length_see_the_same_two_lists_after_an_eviction(mode: PreemptionChoice) -> None:
    # Goal: the border between prompt and output is fixed at submission; min_tokens and max_tokens count all output.
    sampling = SamplingParams(temperature=0.0, frequency_penalty=1.5, min_tokens=10, max_tokens=12)
    world = World(device_blocks=16, host_blocks=16, vocab_size=4)
    stops = frozenset({0, 1})
    spec = world.submit("r", prompt_tokens=6, max_tokens=12, sampling=sampling, stop_token_ids=stops)
    world.step()
    run_until(world, "r", 6)
    world.give_way("r", mode)
    world.run_until_idle()
    tokens = world.tokens[RequestId("r")]
    samples = [sample for name, sample in world.backend.samples if name == "r"]
    assert [sample.output_index for sample in samples] == list(range(len(tokens)))
    assert {tuple(sample.prompt_token_ids) for sample in samples} == {spec.prompt_token_ids}
    assert [list(sample.output_token_ids) for sample in samples] == [tokens[:n] for n in range(len(tokens))]
    assert [set(sample.forbidden) for sample in samples] == [
        set(stops) if n < 10 else set() for n in range(len(tokens))
    ]
    assert 10 <= len(tokens) <= 12
    assert not set(tokens[:10]) & stops


def test_one_token_is_exactly_one_token_and_needs_no_second_slot() -> None:
    world = World(device_blocks=1)
    world.submit("r", prompt_tokens=4, max_tokens=1)
    assert world.run_until_idle() == 1
    assert len(world.tokens[RequestId("r")]) == 1


def test_an_empty_prompt_is_refused_and_the_others_sent_with_it_are_served() -> None:
    # Goal: no row of zero tokens ever reaches the backend.
    world = World(device_blocks=8)
    world.submit("before", max_tokens=2)
    world.submit("empty", prompt_tokens=0)
    world.submit("after", max_tokens=2)
    world.run_until_idle()
    assert world.is_finished("before")
    assert world.is_finished("after")
    assert all(chunk.num_tokens > 0 for plan in world.plans for chunk in plan.chunks)


def test_scored_prompt_positions_are_not_skipped_because_somebody_else_computed_them_meanwhile() -> None:
    # Goal: swapped out in the middle of its prefill; when it is back, more of its prompt is to be found than it had
    # computed. It takes back what it had, and computes the rest itself: KV that is found scores nothing.
    world = World(device_blocks=12, host_blocks=12, budget=6, seats=1, prefix_caching=True)
    prompt = tuple(range(100, 111))
    world.submit("scored", prompt=prompt, max_tokens=2, sampling=SamplingParams(temperature=0.0, prompt_logprobs=1))
    world.submit("plain", prompt=prompt, max_tokens=4)
    world.step()
    world.give_way("scored", PreemptionChoice.SWAP)
    world.run_until_idle()
    values = [value for event in world.events_of("scored", PromptLogprobs) for value in event.values]
    assert [value.token_id for value in values] == list(prompt[1:])
