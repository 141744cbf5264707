"""Who executes a plan: a model, the dry run, a simulator. The scheduler sees this protocol alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from giveway.core.ids import RequestId, TokenId
from giveway.core.plan import StepOutcome, StepPlan
from giveway.core.request import RequestSpec


class RequestFacts(Protocol):
    """What an executor may know of a request. Constant while a plan is executed."""

    @property
    def spec(self) -> RequestSpec:
        """What was asked."""

    @property
    def output_token_ids(self) -> Sequence[TokenId]:
        """Everything generated so far, also before a preemption."""

    @property
    def num_prompt_logprobs(self) -> int:
        """Prompt positions whose log-probabilities have been reported already, from position 1 on."""

    def known_token_ids(self, start: int, stop: int) -> Sequence[TokenId]:
        """Return prompt + generated tokens from position `start` up to `stop`."""


class Executor(Protocol):
    """Executes plans, one after another."""

    def execute(self, plan: StepPlan, requests: Mapping[RequestId, RequestFacts]) -> StepOutcome:
        """Copies out, copies in, forward, sample, in this order.

        A failed copy is reported in the outcome. Raises DeviceFaultError when the step failed as a whole; then no
        copy of this plan is under way any more, and copies of earlier plans that ended are told by the next outcome.
        With overlapped copies and nothing else to do, it waits until a copy ends, or a short while.
        """

    def close(self) -> None:
        """Release what the executor holds."""
