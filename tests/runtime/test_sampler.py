"""Choosing tokens: the order of operations, ties, draws, log-probabilities; against a plain oracle over seeds."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from giveway.core.sampling import SamplingParams
from giveway.runtime import sampler
from giveway.runtime.sampler import (
    _place,
    best_first,
    choose_token,
    is_plain_greedy,
    token_logprobs,
    uniform,
)
from tests.sample_inputs import mask_of, sample_input

VOCAB = 50
UNIFORM_VALUES = [0.8833108082136426, 0.43152799704850997, 0.7497482413580301, 0.64635420864685]
Logits = npt.NDArray[np.float32]


def random_logits(seed: int, vocab: int = VOCAB, *, ties: bool = False) -> Logits:
    values = np.random.default_rng(seed).normal(0, 3, vocab)
    return (np.round(values) if ties else values).astype(np.float32)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "top_p": 1.0, **fields})


# The oracle: one token at a time, with lists, straight from the definitions.


def oracle_distribution(logits: Logits, sample: Any) -> dict[int, float]:
    """Probability of every token that may be drawn."""
    wishes = sample.params
    row = [float(value) for value in logits]
    for token, bias in wishes.logit_bias.items():
        row[token] += bias
    for token in {*sample.prompt_token_ids, *sample.output_token_ids}:
        row[token] = (
            row[token] / wishes.repetition_penalty if row[token] > 0 else row[token] * wishes.repetition_penalty
        )
    for token in sample.output_token_ids:
        row[token] -= wishes.frequency_penalty
    for token in set(sample.output_token_ids):
        row[token] -= wishes.presence_penalty
    tokens = [token for token in range(len(row)) if token not in sample.forbidden]
    best = max(row[token] for token in tokens)
    weights = {token: math.exp((row[token] - best) / wishes.temperature) for token in tokens}
    weights = {token: weight for token, weight in weights.items() if weight >= wishes.min_p}
    ranked = sorted(weights, key=lambda token: (-weights[token], token))
    if wishes.top_k > 0:
        ranked = ranked[: wishes.top_k]
    total = sum(weights[token] for token in ranked)
    kept: list[int] = []
    mass = 0.0
    for token in ranked:
        if mass >= wishes.top_p * total - 1e-12 and kept:
            break
        kept.append(token)
        mass += weights[token]
    return {token: weights[token] / mass for token in kept}


def test_draws_follow_the_oracles_distribution() -> None:
    # Goal: every option, alone and together, allows exactly the oracle's tokens, in the oracle's proportions.
    rng = random.Random(1)
    for seed in range(40):
        wishes = params(
            temperature=rng.choice([0.3, 0.7, 1.0, 2.5]),
            top_p=rng.choice([0.1, 0.5, 0.9, 1.0]),
            top_k=rng.choice([0, 0, 1, 5, 30]),
            min_p=rng.choice([0.0, 0.0, 0.02, 0.3]),
            repetition_penalty=rng.choice([1.0, 0.8, 1.3]),
            presence_penalty=rng.choice([0.0, -0.5, 1.0]),
            frequency_penalty=rng.choice([0.0, 0.4]),
            logit_bias=rng.choice([{}, {3: 4.0, 7: -100.0}]),
        )
        fields = {
            "prompt_token_ids": [rng.randrange(VOCAB) for _ in range(20)],
            "output_token_ids": [rng.randrange(VOCAB) for _ in range(12)],
            "forbidden": rng.choice([(), (1, 2, 3)]),
        }
        logits = random_logits(seed)
        expected = oracle_distribution(logits, sample_input(wishes, **fields))
        draws = [
            choose_token(logits, sample_input(wishes, seed=seed, output_index=index, **fields)) for index in range(400)
        ]
        assert set(draws) <= set(expected), wishes
        for token, probability in expected.items():
            tolerance = 5 * math.sqrt(probability * (1 - probability) / 400) + 0.005
            assert abs(draws.count(token) / 400 - probability) < tolerance, (wishes, token)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 0.9999])
def test_top_p_over_a_large_vocabulary_keeps_the_fewest_tokens(top_p: float) -> None:
    # Goal: the shortcut that sorts the most likely tokens only must not show, on flat and on steep distributions.
    for spread in (0.01, 1.0, 4.0):
        logits = (np.random.default_rng(4).normal(0, spread, 20_000)).astype(np.float32)
        order = np.lexsort((np.arange(20_000), -logits.astype(np.float64)))
        weights = np.exp(logits[order].astype(np.float64) - float(logits.max()))
        count = int(np.searchsorted(np.cumsum(weights), top_p * weights.sum())) + 1
        allowed = set(order[:count].tolist())
        draws = {choose_token(logits, sample_input(params(top_p=top_p), output_index=index)) for index in range(60)}
        assert draws <= allowed
        if count > 1 and count < 20:
            assert len(draws) > 1


def full_sort_choice(logits: Logits, sample: Any) -> int:
    """What choose_token says it computes, by sorting every id; for requests without penalties and bias."""
    wishes, vocab = sample.params, len(logits)
    row = logits.astype(np.float64)
    row[list(sample.forbidden)] = -np.inf
    row = (row - row.max()) / wishes.temperature
    tokens = np.flatnonzero(row >= (np.log(wishes.min_p) if wishes.min_p else -np.inf))
    if 0 < wishes.top_k < vocab or wishes.top_p < 1:
        mass = np.exp(row[tokens]).sum()
        tokens = tokens[np.lexsort((tokens, -row[tokens]))]
        if 0 < wishes.top_k < len(tokens):
            tokens = tokens[: wishes.top_k]
            mass = np.exp(row[tokens]).sum()
        if wishes.top_p < 1:
            reached = np.cumsum(np.exp(row[tokens]))
            tokens = tokens[: int(np.searchsorted(reached, wishes.top_p * mass)) + 1]
    reached = np.cumsum(np.exp(row[tokens]))
    number = uniform(sample.seed, sample.output_index) * reached[-1]
    return int(tokens[np.searchsorted(reached, number, side="right")])


@pytest.mark.parametrize("top_p", [1e-12, 0.1, 0.9, 0.999, 1 - 1e-12, 1 - 2**-53, 1.0])
def test_a_draw_without_sorting_the_ids_is_the_draw_of_the_full_sort(top_p: float) -> None:
    # Goal: the same token for every number drawn, with ties, flat and steep rows, and every filter before top_p.
    rng = random.Random(str(top_p))
    for seed in range(12):
        spread = rng.choice([0.0, 0.01, 1.0, 5.0, 40.0])
        logits = np.random.default_rng(seed).normal(0, spread, 3000).astype(np.float32)
        if rng.random() < 0.5:
            logits = np.round(logits)
        wishes = params(
            temperature=rng.choice([0.3, 1.0, 1.7]),
            top_p=top_p,
            top_k=rng.choice([0, 0, 7, 500, 3000]),
            min_p=rng.choice([0.0, 0.0, 0.001, 0.2]),
        )
        forbidden = rng.choice([(), tuple(range(0, 3000, 2)), tuple(range(2990))])
        for index in range(25):
            sample = sample_input(wishes, seed=seed, output_index=index, forbidden=forbidden)
            assert choose_token(logits, sample) == full_sort_choice(logits, sample), (wishes, spread, index)


def test_top_p_over_a_steep_row_sorts_few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    # Goal: most of the time of a draw went into sorting a vocabulary of which a few dozen tokens mattered.
    sizes: list[int] = []
    whole = sampler._descending

    def counting(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        sizes.append(len(values))
        return whole(values)

    monkeypatch.setattr(sampler, "_descending", counting)
    logits = np.random.default_rng(2).normal(0, 1, 100_000).astype(np.float32)
    logits[:50] += 20
    choose_token(logits, sample_input(params(top_p=0.9)))
    assert len(sizes) == 1
    assert 30 < sizes[0] <= 60


def test_a_token_of_weight_zero_is_never_drawn() -> None:
    # Goal: the number times the mass may be rounded up to the mass, which no token exceeds.
    assert _place(np.array([0.0, 1.0, 1.5, 1.5]), 1.0) == 2
    assert _place(np.array([0.0, 1.0, 1.5, 1.5]), 0.0) == 1


def test_greedy_takes_the_smallest_id_among_equals() -> None:
    for seed in range(20):
        logits = random_logits(seed, ties=True)
        largest = int(np.flatnonzero(logits == logits.max())[0])
        assert choose_token(logits, sample_input(params(temperature=0.0))) == largest
        assert choose_token(logits, sample_input(params(temperature=2.0, top_k=1))) == largest
        assert choose_token(logits, sample_input(params(temperature=2.0, top_p=1e-9))) == largest


def test_penalties_apply_to_greedy_too() -> None:
    logits = np.array([5.0, 4.0, -1.0, -2.0], np.float32)
    greedy = params(temperature=0.0)
    assert is_plain_greedy(sample_input(greedy))
    for changed in (
        sample_input(params(temperature=0.0, repetition_penalty=2.0), prompt_token_ids=[0]),
        sample_input(params(temperature=0.0, presence_penalty=1.5), output_token_ids=[0]),
        sample_input(params(temperature=0.0, frequency_penalty=0.6), output_token_ids=[0, 0]),
        sample_input(params(temperature=0.0, logit_bias={0: -2.0})),
        sample_input(greedy, forbidden=(0,)),
    ):
        assert not is_plain_greedy(changed)
        assert choose_token(logits, changed) == 1


def test_a_repetition_penalty_sees_the_biased_logit() -> None:
    # Goal: bias first, then penalties: (2 + 4) / 2 loses to 4, while 2 / 2 + 4 would win.
    logits = np.array([2.0, 4.0], np.float32)
    wishes = params(temperature=0.0, repetition_penalty=2.0, logit_bias={0: 4.0})
    assert choose_token(logits, sample_input(wishes, prompt_token_ids=[0])) == 1
    # A bias that makes a negative logit positive: it is divided, not multiplied.
    logits = np.array([-1.0, 1.4], np.float32)
    wishes = params(temperature=0.0, repetition_penalty=2.0, logit_bias={0: 4.0})
    assert choose_token(logits, sample_input(wishes, prompt_token_ids=[0])) == 0


def test_neither_bias_nor_penalty_brings_a_forbidden_token_back() -> None:
    logits = np.array([5.0, 4.0, 3.0], np.float32)
    wishes = params(
        temperature=0.0, repetition_penalty=0.5, presence_penalty=-2, frequency_penalty=-2, logit_bias={0: 90.0}
    )
    sample = sample_input(wishes, output_token_ids=[0, 0, 2], forbidden=(0,))
    assert choose_token(logits, sample) == 2


def test_a_mask_is_the_same_as_forbidding_all_other_tokens() -> None:
    rng = random.Random(5)
    for seed in range(60):
        logits = random_logits(seed, ties=seed % 3 == 0)
        wishes = params(temperature=rng.choice([0.0, 0.7, 1.5]), top_p=rng.choice([0.6, 1.0]), top_k=rng.choice([0, 4]))
        allowed = {rng.randrange(VOCAB + 20) for _ in range(rng.randrange(1, 30))} | {3}
        forbidden = [token for token in range(VOCAB) if token not in allowed]
        masked = choose_token(logits, sample_input(wishes, seed=seed, allowed=mask_of(allowed)))
        assert masked == choose_token(logits, sample_input(wishes, seed=seed, forbidden=forbidden))


def test_a_mask_shorter_than_the_row_allows_nothing_beyond_its_end() -> None:
    logits = np.array([0.0, 1.0, 2.0, *[50.0] * 30], np.float32)
    assert choose_token(logits, sample_input(allowed=b"\x07")) == 2
    assert choose_token(logits, sample_input(allowed=b"")) is None
    assert choose_token(logits, sample_input(allowed=b"\x07", forbidden=(2,))) == 1


def test_log_probabilities_do_not_see_a_mask() -> None:
    assert not is_plain_greedy(sample_input(allowed=b"\x01"))
    logits = random_logits(1)
    token = choose_token(logits, sample_input(allowed=mask_of([9])))
    assert token == 9
    assert token_logprobs(logits, token, 2).rank > 1


def test_presence_and_frequency_do_not_count_the_prompt() -> None:
    logits = np.array([5.0, 4.0], np.float32)
    wishes = params(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert choose_token(logits, sample_input(wishes, prompt_token_ids=[0, 0, 0])) == 0


def test_a_negative_logit_is_penalised_downwards() -> None:
    logits = np.array([-1.0, -1.5], np.float32)
    wishes = params(temperature=0.0, repetition_penalty=2.0)
    assert choose_token(logits, sample_input(wishes, prompt_token_ids=[0])) == 1


def test_ids_beyond_the_vocabulary_are_ignored() -> None:
    logits = np.array([1.0, 2.0], np.float32)
    wishes = params(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.1, logit_bias={9: 50.0})
    sample = sample_input(wishes, prompt_token_ids=[7, -1], output_token_ids=[99], forbidden=[55, 2**70])
    assert choose_token(logits, sample) == 1


def test_forbidding_everything_leaves_no_token() -> None:
    assert choose_token(random_logits(0), sample_input(params(), forbidden=range(VOCAB))) is None


def test_the_random_number_is_a_function_of_seed_and_index() -> None:
    # Goal: the same on every machine and in every version; these numbers were written down once.
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(-1, 0)] == UNIFORM_VALUES
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)
    values = np.array([uniform(seed, index) for seed in range(50) for index in range(200)])
    assert 0 <= values.min() < 0.001
    assert 0.999 < values.max() < 1
    assert np.abs(np.histogram(values, 10)[0] - 1000).max() < 130
    # Neighbouring streams and neighbouring draws are unrelated.
    table = values.reshape(50, 200)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.05


def test_a_draw_depends_on_nothing_but_logits_wishes_seed_and_index() -> None:
    logits = random_logits(5, 1000)
    first = [choose_token(logits, sample_input(params(), seed=9, output_index=index)) for index in range(30)]
    copies = np.stack([random_logits(6, 1000), logits, random_logits(7, 1000)])  # another place in memory
    again = [choose_token(copies[1], sample_input(params(), seed=9, output_index=index)) for index in range(30)]
    assert first == again
    assert first != [choose_token(logits, sample_input(params(), seed=10, output_index=index)) for index in range(30)]


@pytest.mark.parametrize("temperature", [1e-6, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = np.array([0.0, 80.0, 79.0], np.float32)
    drawn = {choose_token(logits, sample_input(params(temperature=temperature), seed=seed)) for seed in range(200)}
    assert drawn == ({1} if temperature < 1 else {0, 1, 2})


def test_a_penalty_or_temperature_next_to_zero_chooses_what_it_lifts_above_all() -> None:
    logits = np.array([1.0, 5.0, 2.0], np.float32)
    for temperature in (0.0, 1e-310, 1.0):
        wishes = params(temperature=temperature, repetition_penalty=1e-310)
        assert choose_token(logits, sample_input(wishes, prompt_token_ids=[2])) == 2
    assert choose_token(logits, sample_input(params(temperature=1e-310))) == 1


def test_logprobs_are_those_of_the_model_before_any_wish() -> None:
    for seed in range(10):
        logits = random_logits(seed, ties=True)
        total = math.log(sum(math.exp(float(value)) for value in logits))
        ranked = sorted(range(VOCAB), key=lambda token: (-logits[token], token))
        for token in (0, ranked[0], ranked[7], ranked[-1]):
            entry = token_logprobs(logits, token, 5)
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(float(logits[token]) - total, abs=1e-12)
            assert entry.rank == ranked.index(token) + 1
            assert [candidate for candidate, _ in entry.top] == ranked[:5]
            assert entry.top[0][1] == pytest.approx(float(logits[ranked[0]]) - total, abs=1e-12)
    assert token_logprobs(logits, 0, 0).top == ()


def test_best_first_breaks_ties_by_smaller_id() -> None:
    values = np.array([1.0, 3.0, 3.0, 2.0, 3.0, 1.0])
    everything = np.arange(6)
    assert [best_first(values, everything, count).tolist() for count in (1, 2, 4, 6)] == [
        [1],
        [1, 2],
        [1, 2, 4, 3],
        [1, 2, 4, 3, 0, 5],
    ]
