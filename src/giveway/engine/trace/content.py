"""What a trace holds, as frozen values: counts, names and seconds, never a text or a token."""

from __future__ import annotations

from dataclasses import dataclass

from giveway.core.config import CacheConfig, SchedulerConfig
from giveway.core.cost_profile import CostProfile
from giveway.core.ids import RequestId
from giveway.core.kv_cache import CopyDirection, Tier
from giveway.core.plan import Deferral, Preemption
from giveway.core.request import FinishReason

FORMAT_NAME = "giveway_trace"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """What was asked, in numbers."""

    request_id: RequestId
    number: int  # arrival number, unique in a trace; a name is not: it may be used again
    priority: int  # class, before any aging
    arrival_s: float
    num_prompt_tokens: int
    max_new_tokens: int
    branch_of: RequestId | None  # as of `RequestSpec`


@dataclass(frozen=True, slots=True)
class TracedChunk:
    """Tokens of one prefill."""

    request_id: RequestId
    start: int  # position of the first token
    num_tokens: int
    samples: bool  # a token came out


@dataclass(frozen=True, slots=True)
class TracedAdmission:
    """A request took a seat to compute."""

    request_id: RequestId
    num_hit_blocks: int  # found in the prefix index
    num_new_blocks: int
    num_computed_tokens: int  # whose KV it then had
    is_guest: bool


@dataclass(frozen=True, slots=True)
class TracedSwapIn:
    """A swapped request took a seat; its KV was on the way back."""

    request_id: RequestId
    num_blocks: int  # copied
    tier: Tier  # where from
    is_guest: bool


@dataclass(frozen=True, slots=True)
class TracedCopy:
    """A copy ended."""

    request_id: RequestId
    direction: CopyDirection
    num_blocks: int
    tier: Tier
    has_failed: bool


@dataclass(frozen=True, slots=True)
class TracedMove:
    """Parked KV left the host."""

    request_id: RequestId
    tier: Tier | None  # where it is now; None: gone


@dataclass(frozen=True, slots=True)
class TracedEnd:
    """A request ended."""

    request_id: RequestId
    reason: FinishReason
    num_output_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks of each tier after a step."""

    device_owned: int
    device_idle: int  # findable, without an owner
    device_free: int
    host_owned: int
    disk_owned: int


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One line: what had happened since the last, the plan, and what became of it."""

    line: int  # in the file, from 1
    step_id: int | None  # None: no step was made, only events are told
    start_s: float  # when it was planned
    end_s: float
    costs: CostProfile  # that the plan was made with
    has_failed: bool  # executing it failed: nothing of the plan happened
    # Before the plan, in this order
    accepted: tuple[TracedRequest, ...]
    refused: tuple[RequestId, ...]
    set_back_before: tuple[RequestId, ...]  # lost their KV because an earlier step was broken off
    overdue: tuple[TracedCopy, ...]  # copies that were given up on
    aborted: tuple[TracedEnd, ...]
    held: tuple[RequestId, ...]  # kept off the device because their readers are too slow
    suspects: tuple[RequestId, ...]  # who was tried alone, to find out who breaks a step; empty: everybody was
    # The plan
    preemptions: tuple[Preemption, ...]
    dropped: tuple[RequestId, ...]  # their parked KV made room for somebody more urgent
    moving: tuple[RequestId, ...]  # their parked KV moved on from the host to the disk
    swap_ins: tuple[TracedSwapIn, ...]
    admissions: tuple[TracedAdmission, ...]
    chunks: tuple[TracedChunk, ...]
    decodes: tuple[RequestId, ...]
    deferrals: tuple[Deferral, ...]
    given_up: tuple[RequestId, ...]
    # After the plan
    copies: tuple[TracedCopy, ...]
    moved: tuple[TracedMove, ...]
    set_back: tuple[RequestId, ...]  # lost their KV because this step failed
    finished: tuple[TracedEnd, ...]
    pools: PoolCounts | None  # None: no step was made

    @property
    def num_tokens(self) -> int:
        """Tokens that the plan computes."""
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class TraceContent:
    """A whole file."""

    config: SchedulerConfig
    cache_config: CacheConfig
    steps: tuple[TracedStep, ...]
    is_cut_off: bool  # the last line was not whole, and is left out
