"""What callers of the engine get: updates while a request runs, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from giveway.core.ids import RequestId, TokenId
from giveway.core.plan import PreemptionMode, TokenLogprobs
from giveway.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a request went through."""

    queue_s: float | None = None  # arrival to first seat; None: it never got one
    ttft_s: float | None = None  # arrival to first token; None: there was none
    e2e_s: float | None = None  # arrival to end
    preemptions: dict[PreemptionMode, int] = field(default_factory=dict)  # un-admissions too
    num_recomputed_tokens: int = 0  # computed again because a preemption dropped them
    num_cached_tokens: int = 0  # of the prompt, found in the prefix index at the first admission
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0

    @property
    def num_preemptions(self) -> int:
        """Times it lost something: un-admissions not counted."""
        return sum(count for mode, count in self.preemptions.items() if mode is not PreemptionMode.UN_ADMIT)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one request; with `n` above 1, of one of its branches, or of choice 0 with the others behind it."""

    request_id: RequestId
    prompt: str | None  # None: it was given as token ids
    prompt_token_ids: tuple[TokenId, ...]
    text: str
    token_ids: tuple[TokenId, ...]
    finish_reason: FinishReason
    stop: str | None = None  # the stop string that ended it
    error: str | None = None  # with FinishReason.ERROR: what went wrong, for this request alone
    logprobs: tuple[TokenLogprobs, ...] | None = None  # [num output tokens]
    # [num prompt tokens], None first: nothing precedes the first token. Of several answers, choice 0 has them for all
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    index: int = 0  # which of the answers to its prompt
    # Behind choice 0 where a prompt's answers are returned together: choices 1 and up. Not itself among them, so that
    # a printed result does not hold itself.
    others: tuple[RequestOutput, ...] = ()

    @property
    def choices(self) -> tuple[RequestOutput, ...]:
        """All answers that are here, by index: this one, and behind choice 0 of several the others."""
        return (self, *self.others)


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """Progress of one branch of a request in one step: whole characters only, and never a part of a stop string."""

    request_id: RequestId
    text: str  # new since the last update; may be empty although there are new tokens
    token_ids: tuple[TokenId, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    result: RequestOutput | None = None  # set in the last update of this branch
    whole: RequestOutput | None = None  # set in the last update of all branches: choice 0's result, with all `choices`
    index: int = 0  # which of the answers to its prompt
    branch_of: RequestId | None = None  # one of several answers: the id of choice 0. None: the only one
    # With the first token, where they were asked for: as in the result.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def submission_id(self) -> RequestId:
        """What `submit` returned for the prompt, whichever branch this is."""
        return self.request_id if self.branch_of is None else self.branch_of
