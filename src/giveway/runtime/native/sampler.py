"""Choosing the tokens of a whole batch in one call of the native kernels, as runtime/sampler.py does row by row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from giveway_kernels import _native

from giveway.core.constraint import TokenMask
from giveway.core.ids import TokenId
from giveway.runtime.backend import SampleInput, SequenceResult, TokenLogprobs
from giveway.runtime.sampler import all_forbidden_fault, is_plain_greedy, not_finite_fault

Logits = npt.NDArray[np.float32]

_Entry = tuple[float, int, tuple[tuple[TokenId, float], ...]]  # log-probability, rank and top of TokenLogprobs

_SEED_MASK = 2**64 - 1


class BatchSampler:
    """Samples batches on up to num_threads threads. Not for two calls at a time."""

    def __init__(self, num_threads: int) -> None:
        """Raise ValueError for less than 1 thread."""
        self._native = _native.Sampler(num_threads)

    def sample(self, logits: Logits, samples: Sequence[SampleInput]) -> list[SequenceResult]:
        """Choose the token of every row. logits: [rows, vocab], each row contiguous; samples: one for each row.

        A result has a token, with log-probabilities where they were asked for, or a fault.
        """
        if len(samples) != len(logits):
            raise ValueError(f"{len(logits)} rows of logits for {len(samples)} samples")
        if all(sample.params.logprobs is None and is_plain_greedy(sample) for sample in samples):
            tokens, num_wrong = self._native.choose_largest(logits)
            entries: Sequence[_Entry | None] = [None] * len(tokens)
        else:
            tokens, num_wrong, entries = self._native.choose_tokens(logits, **_wishes(samples, logits.shape[1]))
        return [
            SequenceResult(token_id=token, logprobs=TokenLogprobs(token, *entry) if entry else None)
            if token >= 0
            else SequenceResult(fault=_fault(wrong, logits.shape[1], sample))
            for token, wrong, entry, sample in zip(tokens, num_wrong, entries, samples, strict=True)
        ]

    def prompt_logprobs(self, logits: Logits, token_ids: Sequence[TokenId], num_top: int) -> SequenceResult:
        """Log-probabilities of one given token for each row. logits: [rows, vocab]; token_ids: [rows].

        The result has these, or a fault that counts the wrong values of all rows. Raises ValueError for a token outside
        the vocabulary.
        """
        num_wrong, entries = self._native.score_tokens(logits, list(token_ids), num_top)
        if any(num_wrong):
            return SequenceResult(fault=not_finite_fault(sum(num_wrong), logits.size))
        pairs = zip(token_ids, entries, strict=True)
        return SequenceResult(prompt_logprobs=tuple(TokenLogprobs(token, *entry) for token, entry in pairs))


def _fault(num_wrong: int, vocab: int, sample: SampleInput) -> str:
    return not_finite_fault(num_wrong, vocab) if num_wrong else all_forbidden_fault(vocab, sample)


def _wishes(samples: Sequence[SampleInput], vocab: int) -> dict[str, Any]:
    """Return the arguments of Sampler.choose_tokens: lists with an element, or a list of its own, for each row."""
    wishes = [sample.params for sample in samples]
    is_repetition_penalized = [params.repetition_penalty != 1 for params in wishes]
    is_penalized = [
        params.repetition_penalty != 1 or bool(params.presence_penalty or params.frequency_penalty) for params in wishes
    ]
    return {
        "temperature": [params.temperature for params in wishes],
        "top_p": [1.0 if params.top_p is None else params.top_p for params in wishes],
        "top_k": [min(params.top_k, vocab) for params in wishes],
        "min_p": [params.min_p for params in wishes],
        "repetition_penalty": [params.repetition_penalty for params in wishes],
        "presence_penalty": [params.presence_penalty for params in wishes],
        "frequency_penalty": [params.frequency_penalty for params in wishes],
        "seed": [sample.seed & _SEED_MASK for sample in samples],
        "output_index": [sample.output_index for sample in samples],
        "num_logprobs": [-1 if params.logprobs is None else params.logprobs for params in wishes],
        "forbidden": _lists(sample.forbidden for sample in samples),
        "allowed": _masks(samples),
        "biased": _lists(tuple(params.logit_bias) for params in wishes),
        "biases": _lists(tuple(params.logit_bias.values()) for params in wishes),
        # Whole conversations, so only where they count.
        "prompt": _lists(
            sample.prompt_token_ids if needed else ()
            for sample, needed in zip(samples, is_repetition_penalized, strict=True)
        ),
        "output": _lists(
            sample.output_token_ids if needed else () for sample, needed in zip(samples, is_penalized, strict=True)
        ),
    }


def _masks(samples: Sequence[SampleInput]) -> list[TokenMask | None] | None:
    """Return the mask of each row; None if no row has one."""
    found = [sample.allowed for sample in samples]
    return found if any(mask is not None for mask in found) else None


def _lists(lists: Iterable[Sequence[float]]) -> list[Sequence[float]] | None:
    """Return one list for each row; None if all are empty."""
    found = list(lists)
    return found if any(found) else None
