"""What is known of one request of the engine, which is one answer of an API request: written by the book alone."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from giveway.core.events import Admitted, CopyEnded, Finished, Preempted, Refused, TokenEmitted, TokensComputed
from giveway.core.plan import CopyDirection, Preemption
from giveway.core.request import RequestSpec
from giveway.engine.trace import UnservedReason
from giveway.server.preemption_causes import PreemptionCause

MAX_PREEMPTIONS = 32  # that are remembered one by one, the newest; all of them are counted


@dataclass(frozen=True, slots=True)
class Loss:
    """One time at which it gave way, or gave up more of what it had kept."""

    event: Preempted
    cause: PreemptionCause
    planned: Preemption | None  # with the price of each way. None: its KV was lost with a step that failed
    beneficiary_priority: int | None  # None: nobody profits, or whoever did is gone


@dataclass(frozen=True, slots=True)
class Wait:
    """Why it is not served, and since when."""

    reason: UnservedReason
    since_s: float
    num_lacking_blocks: int = 0


class RequestRecord:
    """One answer, from the moment the engine knows of it."""

    __slots__ = (
        "arrival_s",
        "end",
        "first_token_s",
        "losses",
        "max_new_tokens",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_recomputed_tokens",
        "priority",
        "refusal",
        "request_id",
        "seated_s",
        "swapped_bytes",
        "wait",
        "waited_s",
    )

    def __init__(self, spec: RequestSpec) -> None:
        self.request_id = spec.request_id
        self.priority = spec.priority
        self.arrival_s = spec.arrival_s
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.max_new_tokens = spec.max_new_tokens
        self.seated_s: float | None = None
        self.first_token_s: float | None = None
        self.num_cached_tokens = 0
        self.num_recomputed_tokens = 0
        # Most requests never give way: what only victims need is made when it is needed.
        self.losses: deque[Loss] | None = None
        self.num_preemptions: Counter[str] | None = None  # by mode, as in the result's statistics
        self.swapped_bytes: Counter[CopyDirection] | None = None
        self.wait: Wait | None = None  # None: served, or not looked at by any step yet
        self.waited_s: dict[UnservedReason, float] = {}
        self.end: Finished | None = None
        self.refusal: Refused | None = None

    @property
    def ended_s(self) -> float | None:
        """When it ended. None: it has not."""
        last = self.end or self.refusal
        return None if last is None else last.time_s

    # Events

    def admit(self, event: Admitted) -> None:
        """Take a seat."""
        if self.seated_s is None:
            self.seated_s, self.num_cached_tokens = event.time_s, event.num_hit_tokens

    def emit(self, event: TokenEmitted) -> None:
        """Note the first token; later ones are counted by the scheduler."""
        if self.first_token_s is None:
            self.first_token_s = event.time_s

    def compute(self, event: TokensComputed) -> None:
        """Count tokens computed again."""
        self.num_recomputed_tokens += event.num_recomputed

    def copied(self, event: CopyEnded, block_bytes: int) -> None:
        """Count bytes that a copy carried."""
        if not event.failed:
            self.swapped_bytes = self.swapped_bytes or Counter()
            self.swapped_bytes[event.direction] += event.num_blocks * block_bytes

    def lose(self, loss: Loss) -> None:
        """Give way."""
        if self.losses is None or self.num_preemptions is None:
            self.losses, self.num_preemptions = deque(maxlen=MAX_PREEMPTIONS), Counter()
        self.losses.append(loss)
        self.num_preemptions[loss.event.mode.value] += 1

    def unserved(self, reason: UnservedReason, since_s: float, num_lacking_blocks: int = 0) -> None:
        """It is not served. since_s: when the step began in which that was decided."""
        wait = self.wait
        if wait is not None and wait.reason is reason:
            if wait.num_lacking_blocks != num_lacking_blocks:
                self.wait = Wait(reason, wait.since_s, num_lacking_blocks)
            return
        self.served(since_s)
        self.wait = Wait(reason, since_s, num_lacking_blocks)

    def served(self, until_s: float) -> None:
        """What it waited for is over; the time goes to its reason."""
        wait, self.wait = self.wait, None
        if wait is not None:
            waited_s = self.waited_s.get(wait.reason, 0.0)
            self.waited_s[wait.reason] = waited_s + max(until_s - wait.since_s, 0.0)

    def finish(self, event: Finished) -> None:
        """End."""
        self.served(event.time_s)
        self.end = event

    def refuse(self, event: Refused) -> None:
        """End without having begun."""
        self.served(event.time_s)
        self.refusal = event
