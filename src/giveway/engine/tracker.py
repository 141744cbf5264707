"""What one request has given so far and gone through: built from events alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from giveway.core.errors import RequestFailedError
from giveway.core.events import (
    Admitted,
    CopyEnded,
    Finished,
    Preempted,
    PromptLogprobs,
    Refused,
    StepEvent,
    TokenEmitted,
    TokensComputed,
)
from giveway.core.ids import TokenId
from giveway.core.plan import CopyDirection, PreemptionMode, TokenLogprobs
from giveway.core.request import FinishReason, StopDecision
from giveway.core.tokenizing import Tokenizing
from giveway.engine.detokenizer import Detokenizer
from giveway.engine.intake import Submission
from giveway.engine.outputs import RequestOutput, RequestStats, RequestUpdate


class _Journey:
    """What a request went through on its way."""

    __slots__ = ("_block_bytes", "num_cached", "num_recomputed", "preemptions", "seated_s", "swapped_bytes")

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.seated_s: float | None = None  # when it got its first seat
        self.num_cached = 0
        self.num_recomputed = 0
        self.preemptions: Counter[PreemptionMode] = Counter()
        self.swapped_bytes: Counter[CopyDirection] = Counter()

    def apply(self, event: StepEvent) -> None:
        """Take in one event."""
        if isinstance(event, Admitted):
            if self.seated_s is None:
                self.seated_s, self.num_cached = event.time_s, event.num_hit_tokens
        elif isinstance(event, Preempted):
            self.preemptions[event.mode] += 1
        elif isinstance(event, TokensComputed):
            self.num_recomputed += event.num_recomputed
        elif isinstance(event, CopyEnded) and not event.failed:
            self.swapped_bytes[event.direction] += event.num_blocks * self._block_bytes

    def stats(self, arrival_s: float, first_token_s: float | None, end_s: float) -> RequestStats:
        """Sum up, with times counted from the arrival."""
        return RequestStats(
            queue_s=None if self.seated_s is None else self.seated_s - arrival_s,
            ttft_s=None if first_token_s is None else first_token_s - arrival_s,
            e2e_s=end_s - arrival_s,
            preemptions=dict(self.preemptions),
            num_recomputed_tokens=self.num_recomputed,
            num_cached_tokens=self.num_cached,
            swapped_out_bytes=self.swapped_bytes[CopyDirection.OUT],
            swapped_in_bytes=self.swapped_bytes[CopyDirection.IN],
        )


class SubmissionTracker:
    """Output side of a prompt: what its branches gave, until the last of them has ended."""

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self._results: dict[int, RequestOutput] = {}

    def end(self, result: RequestOutput) -> RequestOutput | None:
        """Take the result of a branch; return all of them, behind choice 0's, if it was the last."""
        self._results[result.index] = result
        if len(self._results) < len(self.submission.branches):
            return None
        first, *others = (self._results[index] for index in sorted(self._results))
        return replace(first, others=tuple(others)) if others else first


class RequestTracker:
    """Output side of one request, which may be one of the branches of a prompt."""

    def __init__(self, whole: SubmissionTracker, index: int, tokenizer: Tokenizing, block_bytes: int) -> None:
        self.whole = whole
        self.spec = spec = whole.submission.branches[index]
        self._index = index
        self._detokenizer = Detokenizer(tokenizer, spec.sampling)
        self._journey = _Journey(block_bytes)
        self._token_ids: list[TokenId] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._first_token_s: float | None = None
        self._num_given = 0  # tokens already handed out in updates
        self.finished: Finished | None = None

    def review(self, token_id: TokenId) -> StopDecision | None:
        """Look at a token before it is committed: does it complete a stop string or the grammar?"""
        spec, constraint = self.spec, self.spec.constraint
        ends = token_id in spec.stop_token_ids and self._detokenizer.num_tokens + 1 >= spec.sampling.min_tokens
        is_complete = False
        if constraint is not None:
            try:
                is_complete = constraint.is_complete_after([*self._token_ids, token_id])
            except RequestFailedError as error:
                return StopDecision(FinishReason.ERROR, str(error))
            ends = ends or (is_complete and token_id in constraint.end_token_ids)
        is_silent = ends and not spec.sampling.include_stop_str_in_output
        stop = self._detokenizer.push(token_id, is_silent=is_silent)
        if stop is not None:
            return StopDecision(FinishReason.STOP, stop)
        return StopDecision() if is_complete else None

    def apply(self, event: StepEvent) -> None:
        """Take in one event of this request."""
        if isinstance(event, TokenEmitted):
            self._token_ids.append(event.token_id)
            if event.logprobs is not None:
                self._logprobs.append(event.logprobs)
            if self._first_token_s is None:
                self._first_token_s = event.time_s
        elif isinstance(event, PromptLogprobs):
            self._prompt_logprobs += event.values
        elif isinstance(event, Finished):
            self.finished = event
        elif isinstance(event, Refused):
            self.finished = Finished(event.request_id, event.time_s, FinishReason.ERROR, str(event.error), 0, 0, 0)
        else:
            self._journey.apply(event)

    def take_update(self) -> RequestUpdate:
        """Return what is new since the last update; the result with it when the request has ended."""
        start = self._num_given
        self._num_given = len(self._token_ids)
        text = self._detokenizer.take_new(is_last=self.finished is not None)  # first: it completes the result's text
        result = self._result(self.finished) if self.finished is not None else None
        scores_prompt = self.spec.sampling.prompt_logprobs is not None and start == 0 < self._num_given
        return RequestUpdate(
            self.spec.request_id,
            text,
            tuple(self._token_ids[start:]),
            tuple(self._logprobs[start:]),
            result,
            self.whole.end(result) if result is not None else None,
            self._index,
            self.spec.branch_of,
            tuple(self._prompt_logprobs) if scores_prompt else None,
        )

    def _result(self, finished: Finished) -> RequestOutput:
        sampling = self.spec.sampling
        failed = finished.reason is FinishReason.ERROR
        return RequestOutput(
            request_id=self.spec.request_id,
            prompt=self.whole.submission.prompt,
            prompt_token_ids=self.spec.prompt_token_ids,
            text=self._detokenizer.text,
            token_ids=tuple(self._token_ids),
            finish_reason=finished.reason,
            stop=None if failed else finished.detail,
            error=finished.detail if failed else None,
            logprobs=tuple(self._logprobs) if sampling.logprobs is not None else None,
            prompt_logprobs=tuple(self._prompt_logprobs) if sampling.prompt_logprobs is not None else None,
            stats=self._journey.stats(self.spec.arrival_s, self._first_token_s, finished.time_s),
            index=self._index,
        )
