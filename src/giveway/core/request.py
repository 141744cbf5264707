"""A request: what was asked (frozen), how far it is (written by the scheduler alone), and the legal moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from giveway.core.config import DEFAULT_CLASS, blocks_for
from giveway.core.constraint import Constraint
from giveway.core.errors import InvariantError
from giveway.core.ids import RequestId, TokenId
from giveway.core.sampling import SamplingParams


class RequestState(Enum):
    """Where the KV of a request is. Prefill or decode follows from the counters; it is not a state."""

    WAITING = auto()  # known, owns no KV
    RUNNING = auto()  # resident: owns device blocks and a seat
    SWAPPING_OUT = auto()  # device blocks pinned while they are copied to reserved host blocks
    SWAPPED = auto()  # KV complete off the device, but for leading blocks that it may have kept
    SWAPPING_IN = auto()  # resident: both tiers pinned while KV returns
    PREEMPTED = auto()  # KV dropped, but for leading blocks that it may have kept; prompt and generated tokens are kept
    FINISHED = auto()  # terminal; FinishReason says why

    __hash__ = object.__hash__  # members are singletons; the hash that Enum has takes longer than the rest of a move


# Looking a member up in its class takes as long as all else in a move.
_WAITING, _RUNNING, _SWAPPING_OUT, _SWAPPED, _SWAPPING_IN, _PREEMPTED, _FINISHED = RequestState

LEGAL_MOVES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset(
        {RequestState.PREEMPTED, RequestState.SWAPPING_OUT, RequestState.WAITING, RequestState.FINISHED}
    ),
    RequestState.SWAPPING_OUT: frozenset({RequestState.SWAPPED, RequestState.PREEMPTED, RequestState.FINISHED}),
    RequestState.SWAPPED: frozenset(
        {
            RequestState.SWAPPING_IN,
            RequestState.RUNNING,  # all of it was still to be found on the device
            RequestState.SWAPPING_OUT,  # it gives up more of what it kept
            RequestState.PREEMPTED,
            RequestState.FINISHED,
        }
    ),
    RequestState.SWAPPING_IN: frozenset({RequestState.RUNNING, RequestState.PREEMPTED, RequestState.FINISHED}),
    RequestState.PREEMPTED: frozenset({RequestState.RUNNING, RequestState.SWAPPING_OUT, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}

NEWCOMER_STATES = frozenset({RequestState.WAITING, RequestState.SWAPPED, RequestState.PREEMPTED})


class FinishReason(Enum):
    """Why a request ended; the values are those of the OpenAI API where it has one."""

    STOP = "stop"  # an end-of-sequence token, a stop token, a stop string, or a complete grammar
    LENGTH = "length"  # max_tokens, or no room for another token
    ABORT = "abort"  # its caller took it back
    ERROR = "error"  # a fault of its own


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What was asked, resolved to numbers; never changes."""

    request_id: RequestId
    prompt_token_ids: tuple[TokenId, ...]
    max_new_tokens: int  # tokens; resolved, at least 1
    priority: int = DEFAULT_CLASS  # class; 0 is the most urgent
    arrival_s: float = 0.0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0  # resolved: the caller's, or drawn once at submission
    stop_token_ids: frozenset[TokenId] = frozenset()  # resolved: end-of-sequence ids and the caller's
    bad_word_ids: tuple[tuple[TokenId, ...], ...] = ()  # resolved: every spelling of every bad word
    cache_salt: bytes = b""  # prefixes are shared among requests of one salt only
    branch_of: RequestId | None = None  # one of several answers to a prompt; the id of the first. None: the only one
    # Of sampling.structured_output, and of this answer alone; None: any token may come. It says no more than the wish
    # it was made of, so two requests that wish the same are equal.
    constraint: Constraint | None = field(default=None, compare=False, repr=False)

    @property
    def max_slots(self) -> int:
        """Slots that the request stores at most: the last token is never stored."""
        return len(self.prompt_token_ids) + self.max_new_tokens - 1


@dataclass(frozen=True, slots=True)
class StopDecision:
    """Reached outside the core (a stop string matched, a grammar complete): the request ends with this token."""

    reason: FinishReason = FinishReason.STOP
    detail: str | None = None  # the stop string; of an error, what is wrong


Rank = tuple[int, int]
"""(class, arrival number): smaller goes first. The number is unique, so no two requests ever compare equal."""


_PAID = 1 << 48  # more than there will ever be arrivals


def paid_rank(rank: Rank) -> Rank:
    """Return the rank of a request that has paid: at the head of its class, in order of arrival among its like."""
    return (rank[0], rank[1] - _PAID)


class Request:
    """Progress of one request. Read by everybody, written by `Scheduler` through the methods below."""

    __slots__ = (
        "finish_reason",
        "has_paid",
        "is_guest",
        "max_computed_tokens",
        "num_admissions",
        "num_computed_tokens",
        "num_hit_tokens",
        "num_known_tokens",
        "num_lost_in_class",
        "num_output_at_resume",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_recomputed_tokens",
        "output_token_ids",
        "rank",
        "request_id",
        "spec",
        "state",
    )

    def __init__(self, spec: RequestSpec, rank: Rank) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.rank = rank
        self.state = _WAITING
        self.output_token_ids: list[TokenId] = []
        self.num_known_tokens = len(spec.prompt_token_ids)  # prompt + generated
        self.num_computed_tokens = 0  # leading tokens whose KV exists, on whatever tier
        self.num_hit_tokens = 0  # of these, taken from the prefix index at the latest admission
        self.max_computed_tokens = 0  # high-water mark: computing below it again is recomputation
        self.num_recomputed_tokens = 0
        self.num_prompt_logprobs = 0  # prompt positions already reported
        self.num_preemptions = 0  # un-admissions are not counted: nothing was taken
        self.num_lost_in_class = 0  # computed tokens that were dropped for others of its own class
        # Its class has cost it its own length: from now on it goes first in it, and gives way to other classes only.
        self.has_paid = False
        self.num_output_at_resume: int | None = None  # output tokens when it was resumed last; None: it never was
        self.num_admissions = 0
        self.is_guest = False  # admitted behind a deferred newcomer, which may displace it within its class
        self.finish_reason: FinishReason | None = None

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token still has to be computed."""
        return self.num_known_tokens - self.num_computed_tokens == 1 and bool(self.output_token_ids)

    @property
    def num_own_computed_tokens(self) -> int:
        """Tokens that this residency computed itself: zero means it can be un-admitted for free."""
        return self.num_computed_tokens - self.num_hit_tokens

    def is_settling(self, settle_tokens: int) -> bool:
        """Whether it was resumed and has not emitted so many tokens since."""
        start = self.num_output_at_resume
        return start is not None and len(self.output_token_ids) - start < settle_tokens

    def known_token_ids(self, start: int, stop: int) -> list[TokenId]:
        """Return prompt + generated tokens from position `start` up to `stop`."""
        prompt = self.spec.prompt_token_ids
        num_prompt = len(prompt)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return [*prompt[start:stop], *self.output_token_ids[: max(0, stop - num_prompt)]]

    # Events. Each is called by the scheduler alone.

    def admit(self, *, num_hit_tokens: int, is_guest: bool) -> None:
        """Become resident; what the prefix index gave behind what it had kept counts as computed."""
        self._resume(_RUNNING, is_guest)
        self.num_hit_tokens = num_hit_tokens
        self.num_computed_tokens += num_hit_tokens

    def un_admit(self) -> None:
        """Go back to waiting; nothing of its own was computed. Tokens generated in an earlier life are kept."""
        if self.num_own_computed_tokens:
            raise InvariantError(
                f"{self.request_id} has computed {self.num_own_computed_tokens} tokens: cannot un-admit"
            )
        self._move(_PREEMPTED if self.output_token_ids else _WAITING)
        self._lose_kv(0)

    def preempt(self, *, num_kept_tokens: int = 0, is_for_its_class: bool = False, has_paid: bool = False) -> None:
        """Lose the KV behind the first `num_kept_tokens`; it is computed again later.

        is_for_its_class: the beneficiary is of the same class, whose claims on it are limited. has_paid: with this the
        limit is reached; the rank changes, so the request must be in no container.
        """
        if self.state is _RUNNING:
            self.num_preemptions += 1
        if self.state is not _PREEMPTED:  # that one gives up more of what it had kept
            self._move(_PREEMPTED)
        if is_for_its_class:
            self.num_lost_in_class += max(self.num_computed_tokens - num_kept_tokens, 0)
        if has_paid and not self.has_paid:
            self.has_paid = True
            self.rank = paid_rank(self.rank)
        self._lose_kv(num_kept_tokens)

    def begin_swap_out(self) -> None:
        """Leave the seat, if it has one; KV is on its way off the device."""
        if self.state is _RUNNING:
            self.num_preemptions += 1
        self._move(_SWAPPING_OUT)
        self.num_hit_tokens = 0
        self.is_guest = False

    def finish_swap_out(self) -> None:
        """KV is complete off the device, but for what was kept."""
        self._move(_SWAPPED)

    def begin_swap_in(self, *, is_guest: bool) -> None:
        """Take a seat; KV is on its way back."""
        self._resume(_SWAPPING_IN, is_guest)

    def finish_swap_in(self) -> None:
        """KV is complete on the device."""
        self._move(_RUNNING)

    def lose_copy(self, *, num_kept_tokens: int = 0) -> None:
        """A copy failed, or parked KV was let go: that KV is gone and is computed again later."""
        self._move(_PREEMPTED)
        self._lose_kv(num_kept_tokens)

    def _resume(self, state: RequestState, is_guest: bool) -> None:
        self._move(state)
        self.is_guest = is_guest
        self.num_hit_tokens = 0
        if self.num_admissions:
            self.num_output_at_resume = len(self.output_token_ids)
        self.num_admissions += 1

    def compute(self, num_tokens: int) -> int:
        """Count `num_tokens` more as computed. Returns how many of them had been computed before."""
        start = self.num_computed_tokens
        self.num_computed_tokens = start + num_tokens
        again = min(self.max_computed_tokens, self.num_computed_tokens) - start
        if again < num_tokens:
            self.max_computed_tokens = self.num_computed_tokens
        again = max(again, 0)
        self.num_recomputed_tokens += again
        return again

    def append(self, token_id: TokenId) -> None:
        """Take a sampled token; from now on it is never resampled."""
        self.output_token_ids.append(token_id)
        self.num_known_tokens += 1

    def report_prompt_logprobs(self, num_positions: int) -> None:
        """Count prompt positions as reported, so that a recomputation does not report them again."""
        self.num_prompt_logprobs += num_positions

    def finish(self, reason: FinishReason) -> None:
        """End, for good."""
        self._move(_FINISHED)
        self.finish_reason = reason

    def _lose_kv(self, num_kept_tokens: int) -> None:
        self.num_computed_tokens = min(self.num_computed_tokens, num_kept_tokens)
        self.num_hit_tokens = 0
        self.is_guest = False

    def _move(self, state: RequestState) -> None:
        if state not in LEGAL_MOVES[self.state]:
            raise InvariantError(f"{self.request_id}: {self.state.name} -> {state.name} is not a legal move")
        self.state = state


def slots_to_admit(spec: RequestSpec, num_known_tokens: int) -> int:
    """Slots that an admission or a resume takes: the whole known context and the next token, never a first chunk only.

    Admitting because a first chunk fits would evict the request again before its prefill ends, and burn the compute.
    """
    return max(min(num_known_tokens + 1, spec.max_slots), 1)


def blocks_to_finish(spec: RequestSpec, block_size: int) -> int:
    """Blocks that the request owns at most: what `accept` compares with the whole pool."""
    return blocks_for(max(spec.max_slots, 1), block_size)
