"""From a plan to the batch of a forward pass: counts and ids in, tokens and sampling inputs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from giveway.core.constraint import TokenMask, is_allowed
from giveway.core.errors import RequestFailedError
from giveway.core.executor import RequestFacts
from giveway.core.ids import RequestId, TokenId
from giveway.core.plan import ScheduledChunk, StepPlan
from giveway.core.request import RequestSpec
from giveway.runtime.backend import BatchSequence, SampleInput


def build_batch(plan: StepPlan, requests: Mapping[RequestId, RequestFacts]) -> list[BatchSequence]:
    """Return the sequences of the forward pass: prefill chunks, then decodes, in the order of the plan."""
    batch = [_chunk(chunk, requests[chunk.request_id]) for chunk in plan.chunks]
    decodes = plan.decodes
    for request_id, position, table in zip(decodes.request_ids, decodes.positions, decodes.block_tables, strict=True):
        facts = requests[request_id]
        tokens = facts.known_token_ids(position, position + 1)
        sample, fault = _sample_or_fault(facts)
        batch.append(BatchSequence(request_id, tokens, position, table, sample, fault=fault))
    return batch


def _chunk(chunk: ScheduledChunk, facts: RequestFacts) -> BatchSequence:
    end = chunk.start + chunk.num_tokens
    num_logprobs = facts.spec.sampling.prompt_logprobs
    following: Sequence[TokenId] = ()
    last_scored = min(end, len(facts.spec.prompt_token_ids) - 1)
    if num_logprobs is not None and last_scored > facts.num_prompt_logprobs:  # else a recomputation: all reported
        following = facts.spec.prompt_token_ids[chunk.start + 1 : end + 1]
    sample, fault = _sample_or_fault(facts) if chunk.samples else (None, None)
    return BatchSequence(
        chunk.request_id,
        facts.known_token_ids(chunk.start, end),
        chunk.start,
        chunk.block_table,
        sample,
        num_logprobs if following else None,
        following,
        fault,
    )


def _sample_or_fault(facts: RequestFacts) -> tuple[SampleInput | None, str | None]:
    """Return how to choose the next token, or why it cannot be chosen."""
    try:
        return sample_input(facts), None
    except RequestFailedError as error:
        return None, str(error)


def sample_input(facts: RequestFacts) -> SampleInput:
    """Return how the next token of a request is to be chosen; it depends on the request alone.

    Raises RequestFailedError when its grammar cannot say what may follow.
    """
    spec, output = facts.spec, facts.output_token_ids
    allowed = None if spec.constraint is None else spec.constraint.allowed_after(output)
    forbidden = forbidden_tokens(spec, output, allowed)
    return SampleInput(spec.sampling, spec.seed, len(output), spec.prompt_token_ids, output, forbidden, allowed)


def forbidden_tokens(
    spec: RequestSpec, output: Sequence[TokenId], allowed: TokenMask | None = None
) -> tuple[TokenId, ...]:
    """Tokens that may not come next: the end where it is too early, and the last token of a bad word begun.

    The end is too early before min_tokens, and wherever an answer with a grammar ignores it; but a grammar after which
    nothing else may come is at its end all the same. allowed: what the grammar allows; None: everything.
    """
    forbidden: list[TokenId] = []
    ends: frozenset[TokenId] = frozenset()
    if len(output) < spec.sampling.min_tokens:
        ends = spec.stop_token_ids
    if spec.constraint is not None and (ends or spec.sampling.ignore_eos):
        ends |= spec.constraint.end_token_ids
    if ends and (allowed is None or _allows_more_than(ends, allowed)):
        forbidden += sorted(ends)
    for word in spec.bad_word_ids:
        begun = word[:-1]
        if not begun or tuple(output[-len(begun) :]) == begun:
            forbidden.append(word[-1])
    return tuple(forbidden)


def _allows_more_than(tokens: frozenset[TokenId], allowed: TokenMask) -> bool:
    num_allowed = int.from_bytes(allowed).bit_count()
    return num_allowed > sum(is_allowed(allowed, token) for token in tokens)
