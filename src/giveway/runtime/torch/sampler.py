"""Choosing the next token from one row of logits, and reporting log-probabilities. Plain numpy, one row at a time.

Order: penalties, bias, forbidden tokens, temperature, min_p, top_k, top_p, as vLLM documents it. Log-probabilities are
those of the model itself, before all of these. All arithmetic is float64 on the row alone, so a result cannot depend on
the batch. Between equal logits the smaller id comes first, everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from giveway.core.ids import TokenId
from giveway.core.sampling import SamplingParams
from giveway.runtime.backend import SampleInput, TokenLogprobs

Row = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_MASK = 2**64 - 1
# top_p sorts the most likely tokens only; if their mass falls short of it, all are sorted.
_FIRST_SORTED = 1024


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
    temperature = sample.params.temperature
    if not temperature:
        return best
    tokens, weights = _candidates((row - row[best]) / temperature, sample.params)
    reached = np.cumsum(weights)
    place = np.searchsorted(reached, uniform(sample.seed, sample.output_index) * reached[-1], side="right")
    return int(tokens[min(int(place), len(tokens) - 1)])


def _changes_logits(sample: SampleInput) -> bool:
    params = sample.params
    return bool(sample.forbidden or params.logit_bias) or (
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    ) != (1.0, 0.0, 0.0)


def _change_logits(row: Row, sample: SampleInput) -> None:
    params, vocab = sample.params, len(row)
    if params.repetition_penalty != 1.0:
        is_seen = np.zeros(vocab, np.bool_)
        is_seen[_known_ids(sample.prompt_token_ids, vocab)] = True
        is_seen[_known_ids(sample.output_token_ids, vocab)] = True
        seen = np.flatnonzero(is_seen)
        values = row[seen]
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = np.bincount(_known_ids(sample.output_token_ids, vocab), minlength=vocab)
        row -= params.frequency_penalty * counts
        row -= params.presence_penalty * (counts > 0)
    for token, bias in params.logit_bias.items():
        if token < vocab:
            row[token] += bias
    if sample.forbidden:
        row[_known_ids(sample.forbidden, vocab)] = -np.inf


def _known_ids(tokens: Sequence[TokenId], vocab: int) -> Ids:
    ids = np.asarray(tokens, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab)]


def _candidates(scaled: Row, params: SamplingParams) -> tuple[Ids, Row]:
    """Tokens that may be drawn and their weights, in a fixed order. scaled: (logits - the largest) / temperature."""
    tokens = np.flatnonzero(scaled > -np.inf)
    if params.min_p > 0:
        tokens = np.flatnonzero(scaled >= np.log(params.min_p))
    if 0 < params.top_k < len(tokens):
        tokens = best_first(scaled, tokens, params.top_k)
    if params.top_p is not None and params.top_p < 1:
        tokens = _top_p(scaled, tokens, params.top_p)
    return tokens, np.exp(scaled[tokens])


def _top_p(scaled: Row, tokens: Ids, top_p: float) -> Ids:
    """The fewest most likely tokens whose share of the mass of `tokens` reaches top_p."""
    # In a fixed order: after top_k `tokens` are sorted, otherwise ascending by id.
    wanted = top_p * float(np.exp(scaled[tokens]).sum())
    for limit in (_FIRST_SORTED, len(tokens)):
        ordered = best_first(scaled, tokens, min(limit, len(tokens)))
        reached = np.cumsum(np.exp(scaled[ordered]))
        if reached[-1] >= wanted:
            break
    return ordered[: int(np.searchsorted(reached, wanted, side="left")) + 1]


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
