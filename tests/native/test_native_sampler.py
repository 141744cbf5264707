"""Native sampling gives what the numpy sampler gives: tokens, log-probabilities, ranks, top lists and faults."""

from __future__ import annotations

import math
import random
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from giveway.core.sampling import SamplingParams
from giveway.runtime import sampler as reference
from giveway.runtime.backend import SampleInput, SequenceResult, TokenLogprobs
from tests.sample_inputs import mask_of, sample_input

pytest.importorskip("giveway_kernels._native")

from giveway_kernels import _native

from giveway.runtime.native.sampler import BatchSampler, _wishes

Logits = npt.NDArray[np.float32]

MASK = 2**64 - 1
ODD_SIZES = (1, 2, 3, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1023, 1025, 3000)


LOGPROB_CHECKSUM = 1751710752


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "top_p": 1.0, **fields})


def sample_one(logits: Logits, sample: SampleInput) -> SequenceResult:
    return BatchSampler(1).sample(logits[None], [sample])[0]


def expected_result(logits: Logits, sample: SampleInput) -> SequenceResult:
    """What the numpy sampler says."""
    num_wrong = int((~np.isfinite(logits)).sum())
    if num_wrong:
        return SequenceResult(fault=reference.not_finite_fault(num_wrong, len(logits)))
    token = reference.choose_token(logits, sample)
    if token is None:
        return SequenceResult(fault=reference.all_forbidden_fault(len(logits), sample))
    num_top = sample.params.logprobs
    return SequenceResult(
        token_id=token, logprobs=None if num_top is None else reference.token_logprobs(logits, token, num_top)
    )


def assert_same_logprobs(found: TokenLogprobs | None, expected: TokenLogprobs | None) -> None:
    if found is None or expected is None:
        assert found == expected
        return
    assert (found.token_id, found.rank) == (expected.token_id, expected.rank)
    assert found.logprob == pytest.approx(expected.logprob, rel=1e-12, abs=1e-12)
    assert [token for token, _ in found.top] == [token for token, _ in expected.top]
    assert [value for _, value in found.top] == pytest.approx(
        [value for _, value in expected.top], rel=1e-12, abs=1e-12
    )


def assert_same(found: SequenceResult, expected: SequenceResult, message: object = "") -> None:
    assert (found.token_id, found.fault) == (expected.token_id, expected.fault), message
    assert_same_logprobs(found.logprobs, expected.logprobs)


def some_logits(rng: np.random.Generator, vocab: int) -> Logits:
    """A row of one of many kinds: flat, steep, with ties, huge, tiny, two groups far apart."""
    values = rng.normal(0, rng.choice([0.0, 1e-3, 1.0, 5.0, 40.0]), vocab)
    kind = rng.integers(9)
    if kind == 0:
        values = np.round(values)
    elif kind == 1:
        values *= 1e36
    elif kind == 2:
        values *= 1e-42  # denormal numbers
    elif kind == 3:
        values = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
    elif kind == 4:
        values[rng.integers(vocab)] += 30
    elif kind == 5:
        values = rng.choice([0.0, -1.0, -100.0, -2000.0], vocab)
    elif kind == 6:
        values = values * 1e-20 + rng.integers(2, size=vocab)  # differences that float64 cannot hold beside 1
    return values.astype(np.float32)


def some_wishes(rng: random.Random, vocab: int) -> SamplingParams:
    return params(
        temperature=rng.choice([0.0, 1e-300, 1e-3, 0.3, 0.7, 1.0, 1.7, 100.0]),
        top_p=rng.choice([1e-300, 0.1, 0.5, 0.9, 0.999, 1 - 2**-53, 1.0, 1.0, 1.0]),
        top_k=rng.choice([-1, 0, 0, 1, 2, 40, vocab - 1, vocab, vocab + 1, 2**70]) or 0,
        min_p=rng.choice([0.0, 0.0, 0.0, 1e-300, 0.01, 0.5, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.0, 0.5, 1.3, 100.0, 1e-300]),
        presence_penalty=rng.choice([0.0, 0.0, -2.0, 1.5]),
        frequency_penalty=rng.choice([0.0, 0.0, -0.3, 2.0]),
        logit_bias=rng.choice([{}, {}, {0: 100.0, vocab // 2: -100.0, vocab: 5.0, 2**70: 1.0}]),
        logprobs=rng.choice([None, None, 0, 1, 5, 20]),
    )


def some_sample(rng: random.Random, vocab: int) -> SampleInput:
    def tokens(most: int) -> list[int]:
        return [rng.randrange(-2, vocab + 2) for _ in range(rng.randrange(most))]

    return sample_input(
        some_wishes(rng, vocab),
        seed=rng.choice([0, 1, -1, 2**64 - 1, -(2**63), rng.getrandbits(64)]),
        output_index=rng.choice([0, 1, 1000, 10**6]),
        prompt_token_ids=tuple(tokens(30)),
        output_token_ids=tokens(20),
        forbidden=rng.choice([(), (), tokens(10), range(vocab), range(vocab - 1), [*range(0, vocab, 2), 2**70]]),
        allowed=some_mask(rng, vocab),
    )


def some_mask(rng: random.Random, vocab: int) -> bytes | None:
    """A mask of one of many kinds: none, empty, too short, too long, no whole number of words, sparse, dense, full."""
    length = rng.choice([vocab // 8, vocab // 8 + 1, vocab // 16, vocab // 32 * 4 + 4, vocab // 8 + 9])
    kind = rng.randrange(8)
    if kind < 3:
        return None
    if kind == 3:
        return rng.choice([b"", bytes(length), b"\xff" * length])
    if kind == 4:
        return mask_of(rng.randrange(vocab + 40) for _ in range(rng.randrange(1, 4)))
    if kind == 5:
        return bytes(rng.choice([0, 255, 255, 255, 1, 128]) for _ in range(length))
    return rng.randbytes(length)


@pytest.mark.parametrize("vocab", ODD_SIZES)
def test_every_wish_over_every_kind_of_row_gives_the_result_of_the_numpy_sampler(vocab: int) -> None:
    # Goal: whole batches of unlike rows, so that rows that need lists sit beside rows that need none.
    rng, values = random.Random(vocab), np.random.default_rng(vocab)
    sampler = BatchSampler(2)
    for _ in range(25):
        rows = rng.randrange(1, 14)
        logits = np.stack([some_logits(values, vocab) for _ in range(rows)])
        samples = [some_sample(rng, vocab) for _ in range(rows)]
        for found, row, sample in zip(sampler.sample(logits, samples), logits, samples, strict=True):
            assert_same(found, expected_result(row, sample), sample)


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(
    row=st.lists(FLOATS | st.sampled_from([0.0, -0.0, 1.0, 1.5]), min_size=1, max_size=40),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 50),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    penalties=st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
    bias=st.dictionaries(st.integers(0, 50), st.floats(-100, 100), max_size=4),
    tokens=st.tuples(*[st.lists(st.integers(-2, 45), max_size=8)] * 3),
    allowed=st.none() | st.binary(max_size=9),
    seed=st.integers(-(2**63), 2**64 - 1),
    num_top=st.none() | st.integers(0, 20),
)
def test_whatever_a_request_may_ask_for_gives_the_result_of_the_numpy_sampler(
    row: list[float],
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    repetition_penalty: float,
    penalties: tuple[float, float],
    bias: dict[int, float],
    tokens: tuple[list[int], list[int], list[int]],
    allowed: bytes | None,
    seed: int,
    num_top: int | None,
) -> None:
    wishes = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=penalties[0],
        frequency_penalty=penalties[1],
        logit_bias=bias,
        logprobs=num_top,
    )
    prompt, output, forbidden = tokens
    lists = {"prompt_token_ids": prompt, "output_token_ids": output, "forbidden": forbidden, "allowed": allowed}
    sample = sample_input(wishes, seed=seed, output_index=3, **lists)
    logits = np.array(row, np.float32)
    assert_same(sample_one(logits, sample), expected_result(logits, sample))


@pytest.mark.parametrize("vocab", [700, 5000])
def test_draws_with_filters_are_those_of_the_numpy_sampler(vocab: int) -> None:
    # Goal: many draws from each row, so that every part of its distribution is met.
    sampler, values = BatchSampler(2), np.random.default_rng(vocab)
    for wishes in (
        params(temperature=0.7),
        params(top_p=0.9),
        params(top_p=0.999, temperature=1.5),
        params(top_k=50),
        params(top_k=600, top_p=0.6),
        params(min_p=0.02),
        params(min_p=0.001, top_p=0.95),
        params(min_p=0.05, top_k=30),
    ):
        for spread in (0.0, 0.01, 1.0, 5.0, 40.0):
            row = values.normal(0, spread, vocab).astype(np.float32)
            row = np.round(row) if values.random() < 0.3 else row
            samples = [sample_input(wishes, seed=int(spread), output_index=index) for index in range(60)]
            found = sampler.sample(np.repeat(row[None], 60, 0), samples)
            expected = [reference.choose_token(row, sample) for sample in samples]
            assert [result.token_id for result in found] == expected, (wishes, spread)


def test_where_differences_vanish_in_rounding_the_smaller_id_comes_first() -> None:
    # Goal: ties are those of the scaled logits, not of the logits as the model gave them.
    row = np.array([1e-20, 3e-20, 2e-20, 1.0, 3e-20], np.float32)
    for wishes in (params(top_k=3, logprobs=4), params(top_p=0.9), params(top_k=4, temperature=30.0)):
        for index in range(40):
            sample = sample_input(wishes, output_index=index)
            assert_same(sample_one(row, sample), expected_result(row, sample))


# Draws with a chosen number.


def unmixed(value: int) -> int:
    """The argument for which the finalizer of splitmix64 gives `value`."""
    value ^= (value >> 31) ^ (value >> 62)
    value = value * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    value ^= (value >> 27) ^ (value >> 54)
    value = value * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    return value ^ (value >> 30) ^ (value >> 60)


def seed_for(number: float, index: int = 0) -> int:
    """A seed that draws `number`, a multiple of 2^-53, as output token `index`."""
    seed = unmixed(unmixed(int(number * 2**53) << 11) - (index + 1) * 0x9E3779B97F4A7C15 & MASK)
    assert reference.uniform(seed, index) == number
    return seed


NUMBERS = [0.0, 2**-53, 0.125, 0.25, 0.5, 0.5 - 2**-53, 0.75, 0.9, 1 - 2**-53]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("num_allowed", [1, 2, 3, 8, 1000])
def test_numbers_on_the_border_between_two_tokens_and_at_both_ends_draw_the_same_token(
    number: float, num_allowed: int
) -> None:
    # Goal: equal weights, whose sums are exact: a number that falls on a border belongs to the next token, and none of
    # weight zero is drawn, first or last.
    row = np.zeros(num_allowed + 1500, np.float32)
    forbidden = [*range(700), *range(700 + num_allowed, len(row))]
    for wishes in (params(), params(top_p=0.5), params(top_p=0.9), params(top_k=num_allowed), params(min_p=1.0)):
        sample = sample_input(wishes, seed=seed_for(number, 2), output_index=2, forbidden=forbidden)
        found = sample_one(row, sample)
        assert_same(found, expected_result(row, sample), wishes)
        assert 700 <= (found.token_id or 0) < 700 + num_allowed


def test_weights_too_small_to_count_are_drawn_by_the_number_zero_only_if_they_come_first() -> None:
    row = np.array([-744.5, -800.0, 0.0, -744.5], np.float32)
    for number in NUMBERS:
        sample = sample_input(params(), seed=seed_for(number))
        assert_same(sample_one(row, sample), expected_result(row, sample), number)


def test_equal_logits_draw_the_number_itself() -> None:
    # Goal: the native stream of numbers is that of the other backends.
    row = np.zeros(1 << 12, np.float32)
    samples = [sample_input(params(), seed=seed, output_index=index) for seed in (0, -1, 77) for index in (0, 1, 2**40)]
    found = BatchSampler(1).sample(np.repeat(row[None], len(samples), 0), samples)
    expected = [int(reference.uniform(sample.seed, sample.output_index) * (1 << 12)) for sample in samples]
    assert [result.token_id for result in found] == expected


# Masks.


def test_a_mask_restricts_its_row_alone_and_log_probabilities_do_not_see_it() -> None:
    logits = np.random.default_rng(4).normal(0, 1, (3, 200)).astype(np.float32)
    masks = [None, mask_of([7, 40, 199]), None]
    for wishes in (params(temperature=0.0, logprobs=2), params(logprobs=2), params(top_k=5, logprobs=2)):
        samples = [sample_input(wishes, seed=row, allowed=mask) for row, mask in enumerate(masks)]
        found = BatchSampler(2).sample(logits, samples)
        for result, row, sample in zip(found, logits, samples, strict=True):
            assert_same(result, expected_result(row, sample))
        assert found[1].token_id in (7, 40, 199)
        unmasked = BatchSampler(1).prompt_logprobs(logits[1:2], [found[1].token_id], 2).prompt_logprobs[0]
        assert found[1].logprobs == unmasked


def test_columns_behind_the_vocabulary_of_the_mask_are_never_chosen() -> None:
    # Goal: a head may be padded; its last rows are no tokens, and their logits may be the largest.
    row = np.zeros(300, np.float32)
    row[256:] = 50
    for wishes in (params(temperature=0.0), params()):
        found = sample_one(row, sample_input(wishes, allowed=b"\xff" * 32))
        assert found.token_id is not None
        assert found.token_id < 256


def test_masks_that_are_no_bytes_or_not_one_for_each_row_are_refused() -> None:
    zeros = np.zeros((2, 30), np.float32)
    for wrong in ("text", 3, [1]):
        with pytest.raises((TypeError, RuntimeError)):
            sample_one(zeros[0], sample_input(params(), allowed=wrong))
    wishes = _wishes([sample_input(params())] * 2, 30) | {"allowed": [b"\xff"]}
    with pytest.raises(ValueError, match="allowed has 1 elements for 2 rows"):
        _native.Sampler(1).choose_tokens(zeros, **wishes)


# Faults.


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wishes", [params(temperature=0.0), params(logprobs=3), params(top_p=0.5)])
def test_logits_that_are_no_numbers_are_a_fault_of_their_row_alone(value: float, wishes: SamplingParams) -> None:
    logits = np.random.default_rng(0).normal(0, 1, (3, 3000)).astype(np.float32)
    logits[1, [0, 1500, 2999]] = value
    samples = [sample_input(wishes, seed=row) for row in range(3)]
    found = BatchSampler(1).sample(logits, samples)
    for result, row, sample in zip(found, logits, samples, strict=True):
        assert_same(result, expected_result(row, sample))
    assert found[1].fault == "logits are not finite: 3 of 3000 values are NaN or infinite"
    assert found[0].token_id is not None
    assert found[2].token_id is not None


def test_a_row_without_any_number_is_a_fault() -> None:
    for value in (math.nan, -math.inf):
        row = np.full(2000, value, np.float32)
        assert sample_one(row, sample_input()).fault == "logits are not finite: 2000 of 2000 values are NaN or infinite"


def test_forbidding_everything_is_a_fault_of_its_row_alone() -> None:
    logits = np.random.default_rng(1).normal(0, 1, (2, 40)).astype(np.float32)
    for wishes in (params(temperature=0.0), params(logit_bias={3: 100.0}, logprobs=1)):
        samples = [sample_input(wishes, forbidden=range(40), output_index=6), sample_input(wishes)]
        found = BatchSampler(1).sample(logits, samples)
        assert found[0] == SequenceResult(fault="all 40 tokens are forbidden at output position 6")
        assert_same(found[1], expected_result(logits[1], samples[1]))


def test_a_penalty_next_to_zero_that_makes_a_logit_infinite_chooses_it() -> None:
    row = np.array([1.0, 5.0, 2.0], np.float32)
    for temperature in (0.0, 1.0):
        for top_p in (0.5, 1.0):
            wishes = params(temperature=temperature, top_p=top_p, repetition_penalty=1e-310)
            sample = sample_input(wishes, prompt_token_ids=(2,))
            assert sample_one(row, sample).token_id == reference.choose_token(row, sample) == 2


# The batch, threads and memory do not matter.


def bits(result: SequenceResult) -> tuple[Any, ...]:
    """Everything that a result says, floats to the last bit."""
    entry = result.logprobs
    if entry is None:
        return (result.token_id, result.fault)
    values = [entry.logprob, *(value for _, value in entry.top)]
    return (result.token_id, entry.rank, [token for token, _ in entry.top], struct.pack(f"{len(values)}d", *values))


def test_a_row_gives_the_same_bits_alone_in_any_batch_and_on_any_number_of_threads() -> None:
    rng, values = random.Random(3), np.random.default_rng(3)
    logits = np.stack([some_logits(values, 1777) for _ in range(40)])
    samples = [some_sample(rng, 1777) for _ in range(40)]
    alone = [bits(sample_one(row, sample)) for row, sample in zip(logits, samples, strict=True)]
    assert [bits(result) for result in BatchSampler(1).sample(logits, samples)] == alone
    for num_threads in (2, 7):
        sampler = BatchSampler(num_threads)
        for _ in range(3):
            order = rng.sample(range(40), 40)
            shuffled = sampler.sample(logits[order], [samples[index] for index in order])
            assert [bits(result) for result in shuffled] == [alone[index] for index in order]


def test_rows_may_lie_apart() -> None:
    # Goal: the step's logits have columns behind the vocabulary; no copy is made, and these are not looked at.
    wide = np.full((5, 130), np.nan, np.float32)
    logits = wide[:, :101]
    logits[:] = np.random.default_rng(9).normal(0, 2, (5, 101))
    for wishes in (params(temperature=0.0), params(logprobs=2, top_p=0.7)):
        samples = [sample_input(wishes, seed=row) for row in range(5)]
        for result, row, sample in zip(BatchSampler(2).sample(logits, samples), logits, samples, strict=True):
            assert_same(result, expected_result(row, sample))


def test_one_sampler_serves_vocabularies_of_every_size_in_any_order() -> None:
    sampler, rng, values = BatchSampler(2), random.Random(8), np.random.default_rng(8)
    for vocab in (10, 5000, 3, 700, 5001, 1):
        samples = [some_sample(rng, vocab) for _ in range(5)]
        logits = np.stack([some_logits(values, vocab) for _ in samples])
        for result, row, sample in zip(sampler.sample(logits, samples), logits, samples, strict=True):
            assert_same(result, expected_result(row, sample), sample)


def test_log_probabilities_have_the_same_bits_on_every_machine() -> None:
    # Goal: this was written down once. exp and log of the C library, and sums that are fused with products, differ from
    # one processor to the next.
    rows = (np.arange(20_000) * 7919 % 10007 / -10007).astype(np.float32).reshape(5000, 4)
    found = BatchSampler(1).prompt_logprobs(rows, [0] * 5000, 0).prompt_logprobs
    assert zlib.crc32(struct.pack("<5000d", *(entry.logprob for entry in found))) == LOGPROB_CHECKSUM


def test_an_empty_batch_has_no_results() -> None:
    assert BatchSampler(1).sample(np.empty((0, 30), np.float32), []) == []


# Log-probabilities of given tokens.


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab", [1, 4, 65, 1030])
def test_prompt_logprobs_are_those_of_the_numpy_sampler(vocab: int, num_top: int) -> None:
    rng, values = random.Random(vocab), np.random.default_rng(vocab)
    logits = np.stack([some_logits(values, vocab) for _ in range(30)])
    tokens = [rng.randrange(vocab) for _ in range(30)]
    found = BatchSampler(2).prompt_logprobs(logits, tokens, num_top)
    assert (found.token_id, found.logprobs, found.fault) == (None, None, None)
    for entry, row, token in zip(found.prompt_logprobs, logits, tokens, strict=True):
        assert_same_logprobs(entry, reference.token_logprobs(row, token, num_top))


def test_prompt_logits_that_are_no_numbers_are_a_fault_that_counts_all_rows() -> None:
    logits = np.zeros((4, 50), np.float32)
    logits[1, 3], logits[3, :2] = math.inf, math.nan
    fault = "logits are not finite: 3 of 200 values are NaN or infinite"
    assert BatchSampler(1).prompt_logprobs(logits, [0] * 4, 2) == SequenceResult(fault=fault)


# Wrong calls.


@pytest.mark.parametrize("tokens", [[0, 30], [-1, 0], [0]])
def test_tokens_to_score_must_be_in_the_vocabulary_and_as_many_as_rows(tokens: Sequence[int]) -> None:
    with pytest.raises(ValueError, match=r"outside the vocabulary of 30|1 elements for 2 rows"):
        BatchSampler(1).prompt_logprobs(np.zeros((2, 30), np.float32), tokens, 1)


def test_a_call_that_does_not_fit_together_is_refused() -> None:
    zeros = np.zeros((2, 30), np.float32)
    samples = [sample_input(), sample_input()]
    with pytest.raises(ValueError, match="2 rows of logits for 1 samples"):
        BatchSampler(1).sample(zeros, samples[:1])
    with pytest.raises(ValueError, match="each row contiguous"):
        BatchSampler(1).sample(np.zeros((2, 60), np.float32)[:, ::2], samples)
    with pytest.raises(ValueError, match="at least one value in a row"):
        BatchSampler(1).sample(zeros[:, :0], samples)
    with pytest.raises(TypeError):
        BatchSampler(1).sample(zeros.astype(np.float64), samples)
    with pytest.raises(ValueError, match="num_threads is 0"):
        BatchSampler(0)


@pytest.mark.parametrize("value", [math.nan, -1.0, -math.inf, 1e300])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "logit_bias"]
)
def test_a_wish_that_no_request_can_have_is_refused_and_never_computed_with(field: str, value: float) -> None:
    # Goal: requests are checked long before; a wrong number must not become an index here.
    wishes = params()
    object.__setattr__(wishes, field, {1: value} if field == "logit_bias" else value)
    sample = sample_input(wishes, output_token_ids=[1, 2])
    if (field, value) in {("temperature", 1e300), ("top_p", 1e300), ("presence_penalty", -1.0), ("logit_bias", -1.0)}:
        assert sample_one(np.zeros(40, np.float32), sample).fault is None
        return
    with pytest.raises(ValueError, match="out of its range"):
        sample_one(np.zeros(40, np.float32), sample)
