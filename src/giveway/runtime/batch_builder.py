"""From a plan to the batch of a forward pass: counts and ids in, tokens and sampling inputs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
        batch.append(BatchSequence(request_id, tokens, position, table, sample_input(facts)))
    return batch


def _chunk(chunk: ScheduledChunk, facts: RequestFacts) -> BatchSequence:
    end = chunk.start + chunk.num_tokens
    num_logprobs = facts.spec.sampling.prompt_logprobs
    following: Sequence[TokenId] = ()
    last_scored = min(end, len(facts.spec.prompt_token_ids) - 1)
    if num_logprobs is not None and last_scored > facts.num_prompt_logprobs:  # else a recomputation: all reported
        following = facts.spec.prompt_token_ids[chunk.start + 1 : end + 1]
    return BatchSequence(
        chunk.request_id,
        facts.known_token_ids(chunk.start, end),
        chunk.start,
        chunk.block_table,
        sample_input(facts) if chunk.samples else None,
        num_logprobs if following else None,
        following,
    )


def sample_input(facts: RequestFacts) -> SampleInput:
    """Return how the next token of a request is to be chosen; it depends on the request alone."""
    spec, output = facts.spec, facts.output_token_ids
    return SampleInput(
        spec.sampling, spec.seed, len(output), spec.prompt_token_ids, output, forbidden_tokens(spec, output)
    )


def forbidden_tokens(spec: RequestSpec, output: Sequence[TokenId]) -> tuple[TokenId, ...]:
    """Tokens that may not come next: the end before min_tokens, and the last token of a bad word begun."""
    forbidden: list[TokenId] = []
    if len(output) < spec.sampling.min_tokens:
        forbidden += sorted(spec.stop_token_ids)
    for word in spec.bad_word_ids:
        begun = word[:-1]
        if not begun or tuple(output[-len(begun) :]) == begun:
            forbidden.append(word[-1])
    return tuple(forbidden)
