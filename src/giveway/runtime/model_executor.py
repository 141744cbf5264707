"""Executes plans on a backend: moves, copies, forks, forward, sample. The dry run goes through this very code."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from giveway.core.errors import DeviceFaultError
from giveway.core.executor import RequestFacts
from giveway.core.ids import RequestId, TokenId
from giveway.core.plan import StepOutcome, StepPlan, TokenLogprobs
from giveway.runtime.backend import Backend, BatchSequence, SequenceResult
from giveway.runtime.batch_builder import build_batch
from giveway.runtime.copies import CopyEngine, SynchronousCopies


class ModelExecutor:
    """The executor of the engine, for every backend."""

    def __init__(self, backend: Backend, now: Callable[[], float], copies: CopyEngine | None = None) -> None:
        self.backend = backend
        self._now = now  # seconds, monotonic
        self._copies = copies or SynchronousCopies(backend)

    def execute(self, plan: StepPlan, requests: Mapping[RequestId, RequestFacts]) -> StepOutcome:
        """Execute one plan. Raises DeviceFaultError when the forward pass failed as a whole."""
        started_s = self._now()
        copies = [*plan.copies_out, *(swap_in.copy for swap_in in plan.swap_ins)]
        try:
            self._copies.move(plan.moves)
            self._copies.start(plan.copies_out)
            copied_out_s = self._now()
            forks = [(admission.fork.source, admission.fork.target) for admission in plan.admissions if admission.fork]
            if forks:  # before a copy in, or the forward pass, writes into the block of a branch that is leaving
                self.backend.copy_within(forks)
            forked_s = self._now()
            self._copies.start([swap_in.copy for swap_in in plan.swap_ins])
            copied_in_s = self._now()
            batch = build_batch(plan, requests)
            results = self._forward(batch)
        except BaseException:
            self._copies.abandon(copies)  # whatever happened: the blocks will be handed to others
            raise
        computed_s = self._now()
        sampled: dict[RequestId, TokenId] = {}
        logprobs: dict[RequestId, TokenLogprobs] = {}
        prompt_logprobs: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
        faults: dict[RequestId, str] = {}
        for sequence, result in zip(batch, results, strict=True):
            if result.token_id is not None:
                sampled[sequence.request_id] = result.token_id
            if result.logprobs is not None:
                logprobs[sequence.request_id] = result.logprobs
            if result.prompt_logprobs:
                prompt_logprobs[sequence.request_id] = result.prompt_logprobs
            fault = result.fault if sequence.fault is None else sequence.fault
            if fault is not None:
                faults[sequence.request_id] = fault
        ended = self._copies.collect(wait=not batch)
        now_s = self._now()
        return StepOutcome(
            step_id=plan.step_id,
            now_s=now_s,
            duration_s=now_s - started_s,
            forward_s=computed_s - copied_in_s,
            # With overlap a copy goes on after `start`, so its time is not known here.
            copy_out_s=0.0 if self._copies.is_overlapped else copied_out_s - started_s,
            copy_in_s=0.0 if self._copies.is_overlapped else copied_in_s - forked_s,
            sampled=sampled,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            faults=faults,
            finished_copies=ended.finished,
            failed_copies=ended.failed,
        )

    def _forward(self, batch: list[BatchSequence]) -> list[SequenceResult]:
        results = self.backend.forward(batch) if batch else []
        if len(results) != len(batch):
            raise DeviceFaultError(f"the backend returned {len(results)} results for {len(batch)} sequences")
        return results

    def close(self) -> None:
        """Release the backend, and the disk tier with its file."""
        self._copies.close()
        self.backend.close()
