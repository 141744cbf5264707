"""What accept, commit and discard report. Listeners (server, statistics, trace) read events and never write back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from giveway.core.errors import InvalidRequestError
from giveway.core.ids import RequestId, TokenId
from giveway.core.plan import CopyDirection, PreemptionMode, Tier, TokenLogprobs
from giveway.core.request import FinishReason


class TokenEmitted(NamedTuple):
    """One output token, exactly once and in order. A named tuple: there is one for every token."""

    request_id: RequestId
    time_s: float
    token_id: TokenId
    output_index: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is known and waits."""

    request_id: RequestId
    time_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not taken in; nothing of it remains."""

    request_id: RequestId
    time_s: float
    error: InvalidRequestError


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request took a seat, for the first time or after a preemption."""

    request_id: RequestId
    time_s: float
    num_hit_tokens: int  # found in the prefix index
    is_guest: bool
    is_resume: bool


@dataclass(frozen=True, slots=True)
class Preempted:
    """The request gave way."""

    request_id: RequestId
    time_s: float
    beneficiary: RequestId | None  # None: by command, or after a failed step
    mode: PreemptionMode
    num_blocks: int  # device blocks that it gives up
    num_kept: int = 0  # leading blocks that it keeps
    tier: Tier | None = None  # with a swap: where its KV goes
    is_again: bool = False  # it had given way before and now gives up more of what it had kept


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """A swap copy ended; failed means that its KV is lost and will be computed again."""

    request_id: RequestId
    time_s: float
    direction: CopyDirection
    num_blocks: int
    tier: Tier
    failed: bool


@dataclass(frozen=True, slots=True)
class ParkedMoved:
    """Parked KV made room on the host for somebody better-ranked; without a tier it is gone and computed again."""

    request_id: RequestId
    time_s: float
    num_blocks: int
    tier: Tier | None


@dataclass(frozen=True, slots=True)
class TokensComputed:
    """Prefill progress of one request; decodes are told by TokenEmitted."""

    request_id: RequestId
    time_s: float
    num_tokens: int
    num_recomputed: int  # of these, computed before and lost to a preemption


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens, each position exactly once and in order."""

    request_id: RequestId
    time_s: float
    first_position: int  # of the first token reported
    values: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The one terminal event of a request."""

    request_id: RequestId
    time_s: float
    reason: FinishReason
    detail: str | None  # the stop string, or the message of the error
    num_output_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int


StepEvent = (
    TokenEmitted
    | Accepted
    | Refused
    | Admitted
    | Preempted
    | CopyEnded
    | ParkedMoved
    | TokensComputed
    | PromptLogprobs
    | Finished
)
