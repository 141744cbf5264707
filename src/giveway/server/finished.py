"""The end of an API request, for logs and counts: numbers and names, never a text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from giveway.server.generation import Generation


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What one API request was, and how it ended."""

    api_id: str
    alias: str | None
    key_name: str
    endpoint: str
    priority: int
    is_stream: bool
    is_batch: bool
    status: int  # of HTTP; 499: the client went away; of a stream that failed later: what went wrong
    duration_s: float
    num_choices: int
    num_prompt_tokens: int
    num_output_tokens: int  # also of answers that were not completed
    num_cached_tokens: int
    num_recomputed_tokens: int
    swapped_bytes: int  # both ways
    preemptions: dict[str, int]  # by mode
    finish_reasons: dict[str, int]
    queue_s: float | None  # of the answer that waited longest; None: none was completed
    ttft_s: float | None  # of the answer that began first

    @classmethod
    def of(cls, generation: Generation, duration_s: float, status: int) -> FinishedRequest:
        """Sum up a generation, as far as it came."""
        asked, results = generation.asked, list(generation.results.values())
        stats = [result.stats for result in results]
        preemptions: Counter[str] = Counter()
        for each in stats:
            preemptions.update({mode.value: count for mode, count in each.preemptions.items()})
        queue_s = [each.queue_s for each in stats if each.queue_s is not None]
        ttft_s = [each.ttft_s for each in stats if each.ttft_s is not None]
        return cls(
            api_id=generation.api_id,
            alias=asked.alias,
            key_name=asked.caller.name,
            endpoint=asked.endpoint,
            priority=asked.priority,
            is_stream=asked.is_stream,
            is_batch=asked.is_batch,
            status=status,
            duration_s=duration_s,
            num_choices=asked.num_answers,
            num_prompt_tokens=sum(len(each.branches[0].prompt_token_ids) for each in generation.submissions),
            num_output_tokens=generation.num_output_tokens,
            num_cached_tokens=sum(each.num_cached_tokens for each in stats),
            num_recomputed_tokens=sum(each.num_recomputed_tokens for each in stats),
            swapped_bytes=sum(each.swapped_out_bytes + each.swapped_in_bytes for each in stats),
            preemptions=dict(preemptions),
            finish_reasons=dict(Counter(result.finish_reason.value for result in results)),
            queue_s=max(queue_s, default=None),
            ttft_s=min(ttft_s, default=generation.first_token_s),
        )
