"""Choosing the next token from one row of logits, and reporting log-probabilities. Plain numpy, one row at a time.

The PyTorch backend samples with it, and it says what every other way of sampling must give.

Order: forbidden tokens and those that a grammar does not allow, bias, penalties (repetition, frequency, presence),
temperature, min_p, top_k, top_p: that of vLLM's `Sampler` (v1/sample/sampler.py). Penalties see the biased logits.
Log-probabilities are those of the model itself, before all of these. All arithmetic is float64 on the row alone, so a
result cannot depend on the batch.
Between equal logits the smaller id comes first, everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from giveway.core.constraint import TokenMask
from giveway.core.ids import TokenId
from giveway.core.sampling import SamplingParams
from giveway.runtime.backend import SampleInput, TokenLogprobs

Row = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_MASK = 2**64 - 1


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that is a function of its arguments: draw `index` of the stream `seed`.

    Source: the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), applied to the seed and then to the index.
    """
    return (_mix(_mix(seed & _MASK) + (index + 1) * 0x9E3779B97F4A7C15) >> 11) / 2.0**53


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def is_plain_greedy(sample: SampleInput) -> bool:
    """Whether the token is the largest logit as the model gave it."""
    return sample.params.temperature == 0 and not _changes_logits(sample)


def choose_token(logits: npt.NDArray[np.float32], sample: SampleInput) -> TokenId | None:
    """Choose the next token from finite logits [vocab]; None when every token is forbidden."""
    row = logits.astype(np.float64)
    if _changes_logits(sample):
        _change_logits(row, sample)
    best = int(row.argmax())
    if row[best] == -np.inf:
        return None
    # Only a repetition penalty next to 0 makes a logit infinite: nothing else has any weight beside it.
    if not sample.params.temperature or row[best] == np.inf:
        return best
    row -= row[best]
    with np.errstate(over="ignore"):  # a temperature next to 0: infinitely unlikely is what is meant
        row /= sample.params.temperature
    return _draw(row, sample.params, uniform(sample.seed, sample.output_index))


def _changes_logits(sample: SampleInput) -> bool:
    params = sample.params
    return bool(
        sample.forbidden
        or sample.allowed is not None
        or params.logit_bias
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
    )


def _change_logits(row: Row, sample: SampleInput) -> None:
    params, vocab = sample.params, len(row)
    if sample.forbidden:
        row[_known_ids(sample.forbidden, vocab)] = -np.inf
    if sample.allowed is not None:
        row[~_allowed_tokens(sample.allowed, vocab)] = -np.inf
    for token, bias in params.logit_bias.items():
        if token < vocab:
            row[token] += bias
    if params.repetition_penalty != 1.0:
        is_seen = np.zeros(vocab, np.bool_)
        is_seen[_known_ids(sample.prompt_token_ids, vocab)] = True
        is_seen[_known_ids(sample.output_token_ids, vocab)] = True
        seen = np.flatnonzero(is_seen)
        values = row[seen]
        with np.errstate(over="ignore"):  # a penalty next to 0
            row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        generated, counts = np.unique(_known_ids(sample.output_token_ids, vocab), return_counts=True)
        row[generated] -= params.frequency_penalty * counts
        row[generated] -= params.presence_penalty


def _allowed_tokens(mask: TokenMask, vocab: int) -> npt.NDArray[np.bool_]:
    """Which tokens of the vocabulary a mask allows: none beyond its end, as rows that only pad a matrix have."""
    num_bytes = -(-vocab // 8)
    padded = np.frombuffer(mask[:num_bytes].ljust(num_bytes, b"\0"), np.uint8)
    return np.unpackbits(padded, count=vocab, bitorder="little").view(np.bool_)


def _known_ids(tokens: Sequence[TokenId], vocab: int) -> Ids:
    try:
        ids = np.asarray(tokens, dtype=np.int64)
    except OverflowError:  # a stop token may be any number
        ids = np.array([token for token in tokens if 0 <= token < vocab], dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab)]


def _draw(scaled: Row, params: SamplingParams, number: float) -> TokenId:
    """Draw a token with `number`, in [0, 1). scaled: (logits - the largest) / temperature; it is overwritten."""
    tokens, values = None, scaled  # None: all of them
    if params.min_p > 0:
        tokens = np.flatnonzero(scaled >= np.log(params.min_p))
        values = scaled[tokens]
    top_p = 1.0 if params.top_p is None else params.top_p
    has_top_k = 0 < params.top_k < len(values)
    if not has_top_k and top_p >= 1:
        place = _place(_cumulated_weights(values, out=values), number)
        return place if tokens is None else int(tokens[place])
    if has_top_k:
        values = _descending(np.partition(values, len(values) - params.top_k)[-params.top_k :])
    ordered, reached = (values, _cumulated_weights(values)) if top_p >= 1 else _top_p(values, top_p)
    place = _place(reached, number)
    # Only values were sorted, which is several times faster than sorting ids by them. Equal ones stand in order of id.
    is_equal = ordered == ordered[place]
    return int(np.flatnonzero(scaled == ordered[place])[place - int(is_equal.argmax())])


def _place(reached: Row, number: float) -> int:
    """Index whose share of the mass holds `number`. reached: cumulated weights; one of weight zero is never chosen."""
    mass = reached[-1]
    place = np.searchsorted(reached, number * mass, side="right")
    return int(min(place, np.searchsorted(reached, mass, side="left")))  # the product may be rounded up to the mass


def _cumulated_weights(values: Row, out: Row | None = None) -> Row:
    weights: Row = np.exp(values, out=out)
    return np.cumsum(weights, out=weights)


def _descending(values: Row) -> Row:
    ordered: Row = np.negative(values)
    ordered.sort()
    return np.negative(ordered, out=ordered)


def _top_p(values: Row, top_p: float) -> tuple[Row, Row]:
    """The fewest largest values whose share of the mass reaches top_p, descending, and their cumulated weights."""
    mass = float(np.exp(values).sum())
    # All that is smaller than `lowest` holds less than half of the mass that top_p leaves out, so nothing of it is kept
    # and it need not be sorted. Only a top_p within rounding of 1 makes the second round needed.
    lowest = np.log((1 - top_p) * mass / (2 * len(values)))
    for limit in (lowest, -np.inf):
        ordered = _descending(values[values >= limit])
        reached = _cumulated_weights(ordered)
        if reached[-1] >= top_p * mass:
            break
    count = int(np.searchsorted(reached, top_p * mass, side="left")) + 1
    return ordered[:count], reached[:count]


def best_first(values: Row, tokens: Ids, count: int) -> Ids:
    """The `count` tokens with the largest values, best first, ties by smaller id."""
    if count < len(tokens):
        chosen = values[tokens]
        smallest = np.partition(chosen, len(chosen) - count)[len(chosen) - count]
        tokens = tokens[chosen >= smallest]
    return tokens[np.lexsort((tokens, -values[tokens]))][:count]


def token_logprobs(logits: npt.NDArray[np.float32], token: TokenId, num_top: int) -> TokenLogprobs:
    """Log-probabilities of `token` and of the num_top most likely tokens, from finite logits [vocab]."""
    row = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    value = row[token]
    rank = 1 + int((row > value).sum()) + int((row[:token] == value).sum())
    top = best_first(row, np.arange(len(row)), num_top) if num_top else ()
    return TokenLogprobs(
        token_id=token,
        logprob=float(value),
        rank=rank,
        top=tuple((int(candidate), float(row[candidate])) for candidate in top),
    )


def not_finite_fault(num_wrong: int, num_values: int) -> str:
    """Say in a fault that the model gave `num_wrong` values that are no numbers, of `num_values`."""
    return f"logits are not finite: {num_wrong} of {num_values} values are NaN or infinite"


def all_forbidden_fault(vocab_size: int, sample: SampleInput) -> str:
    """Say in a fault that the request left no token to choose."""
    return f"all {vocab_size} tokens are forbidden at output position {sample.output_index}"
