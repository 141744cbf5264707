"""A small world to test the scheduler in: the real executor, the dry backend, and six checks after every step.

The dry backend notices when a request reads KV that is not its own; `SixChecks` notices what a backend cannot see.
Time is the number of steps, one second each, so that copies that get lost are overdue at a step one can name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from giveway.core.commands import Abort, Command, GiveWay, Hold, LetGo, Submit
from giveway.core.config import (
    DEFAULT_CLASS,
    CacheConfig,
    PreemptionChoice,
    SchedulerConfig,
    SchedulingPolicy,
    VictimOrder,
    blocks_for,
)
from giveway.core.cost_profile import SHIPPED, CostProfile
from giveway.core.errors import DeviceFaultError
from giveway.core.events import Finished, Preempted, StepEvent, TokenEmitted
from giveway.core.ids import BlockTable, DeviceBlockId, RequestId, TokenId
from giveway.core.kv_cache import BlockCopy
from giveway.core.plan import DeferralReason, StepPlan
from giveway.core.request import Request, RequestSpec, RequestState, slots_to_admit
from giveway.core.sampling import SamplingParams
from giveway.core.scheduler import Scheduler
from giveway.runtime.backend import BatchSequence, SampleInput, SequenceResult
from giveway.runtime.batch_builder import sample_input
from giveway.runtime.copies import CopyEngine, EndedCopies, SynchronousCopies
from giveway.runtime.disk_tier import DiskTier
from giveway.runtime.dry.dry_backend import DryBackend
from giveway.runtime.dry.scripted_copies import CopyFate, ScriptedCopies
from giveway.runtime.model_executor import ModelExecutor
from tests.six_checks import SixChecks

GREEDY = SamplingParams(temperature=0.0)
UNBOUNDED = 1_000_000  # context length that no small world reaches

AnyEvent = TypeVar("AnyEvent", bound=StepEvent)


class MoodyBackend(DryBackend):
    """A dry backend that fails on demand: whole steps, or one request's logits."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.poison: dict[str, int] = {}  # the whole step fails when this request computes this position or a later one
        self.faults: dict[str, int] = {}  # the same, but only this request's logits are spoilt
        self.fails_next = False
        self.failed_alone: set[str] = set()
        self.num_failures = 0
        self.samples: list[tuple[str, SampleInput]] = []  # what every choice of a token was based on, as it was then

    def forward(self, batch: Sequence[BatchSequence]) -> list[SequenceResult]:
        self.samples += [
            (sequence.request_id, replace(sequence.sample, output_token_ids=tuple(sequence.sample.output_token_ids)))
            for sequence in batch
            if sequence.sample is not None
        ]
        if self.fails_next or any(self._reaches(sequence, self.poison) for sequence in batch):
            if self.fails_next and len(batch) == 1:  # a step of one request that fails is that request's own failure
                self.failed_alone.add(batch[0].request_id)
            self.fails_next = False
            self.num_failures += 1
            self._scramble(batch)
            raise DeviceFaultError("the device went away in the middle of a step")
        results = super().forward(batch)
        return [
            SequenceResult(fault="logits are not finite") if self._reaches(sequence, self.faults) else result
            for sequence, result in zip(batch, results, strict=True)
        ]

    def _reaches(self, sequence: BatchSequence, limits: dict[str, int]) -> bool:
        limit = limits.get(sequence.request_id)
        return limit is not None and sequence.start + len(sequence.token_ids) > limit

    def _scramble(self, batch: Sequence[BatchSequence]) -> None:
        """Leave nonsense in every slot that the step meant to write."""
        size = self._device.block_size
        for sequence in batch:
            for position in range(sequence.start, sequence.start + len(sequence.token_ids)):
                slot = sequence.block_table[position // size] * size + position % size
                self._device.tokens[slot] = self._device.prefixes[slot] = -7


class StepwiseCopies(ScriptedCopies):
    """Scripted copies that are late by as many steps as the script says, also when there is nothing else to do."""

    def collect(self, *, wait: bool) -> EndedCopies:
        return super().collect(wait=False)


def prompt_of(name: str, num_tokens: int) -> tuple[TokenId, ...]:
    """A prompt that differs from every other name's in its first token already."""
    start = zlib.crc32(name.encode())
    return tuple((start + place) % 65536 for place in range(num_tokens))


class World:
    """One scheduler, one executor, and everything that ever happened."""

    default_prefix_caching = False  # scenarios run with both

    def __init__(
        self,
        *,
        device_blocks: int,
        block_size: int = 4,
        host_blocks: int = 0,
        seats: int = 8,
        budget: int = 64,
        policy: SchedulingPolicy = SchedulingPolicy.PRIORITY,
        mode: PreemptionChoice = PreemptionChoice.SWAP,
        prefix_caching: bool | None = None,  # None: what `default_prefix_caching` says
        copies: Callable[[BlockCopy], CopyFate] | None = None,  # None: copies end within their step
        copy_timeout_s: float = 20.0,
        waits_for_copies: bool = False,  # True: a step with nothing to compute lasts until a copy ends
        max_model_len: int = UNBOUNDED,
        max_guest_looks: int = 32,
        vocab_size: int = 1000,
        tails: bool = False,
        victim_order: VictimOrder | None = None,
        aging_s: float | None = None,
        target_step_s: float | None = 1e6,  # by default no prefill is held back for the sake of time
        disk_blocks: int = 0,
        disk_dir: Path | None = None,
        disk: DiskTier | None = None,  # None: made in disk_dir
        costs: CostProfile = SHIPPED,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            policy=policy,
            preemption_mode=mode,
            overlapped_copies=copies is not None,
            copy_timeout_s=copy_timeout_s,
            max_guest_looks=max_guest_looks,
            allow_tails=tails,
            victim_order=victim_order,
            priority_aging_s=aging_s,
            target_step_s=target_step_s,
            check_invariants=True,
        )
        self.block_size = block_size
        if prefix_caching is None:
            prefix_caching = self.default_prefix_caching
        cache = CacheConfig(device_blocks, host_blocks, block_size, prefix_caching, disk_blocks)
        self.scheduler = Scheduler(config, cache, costs)
        self.backend = MoodyBackend(vocab_size)
        self.backend.allocate(num_device_blocks=device_blocks, num_host_blocks=host_blocks, block_size=block_size)
        make_engine = ScriptedCopies if waits_for_copies else StepwiseCopies
        if disk is None and disk_dir is not None and disk_blocks:
            disk = DiskTier(disk_dir, num_blocks=disk_blocks, block_bytes=self.backend.block_bytes)
        self.disk = disk
        engine: CopyEngine = SynchronousCopies(self.backend, disk)
        if copies is not None:
            engine = make_engine(self.backend, copies, disk)
        self.executor = ModelExecutor(self.backend, lambda: self.now_s, engine)
        self.now_s = 0.0
        self.specs: dict[RequestId, RequestSpec] = {}
        self.tokens: dict[RequestId, list[TokenId]] = {}
        self.events: list[StepEvent] = []
        self.plans: list[StepPlan] = []
        self.checks = SixChecks(self.scheduler, self.specs, vocab_size)
        self._commands: list[Command] = []
        self._open_plan: StepPlan | None = None

    # What clients do: takes effect with the next plan

    def submit(
        self,
        name: str,
        *,
        priority: int = DEFAULT_CLASS,
        prompt_tokens: int = 4,
        max_tokens: int = 8,
        prompt: Sequence[TokenId] | None = None,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        stop_token_ids: frozenset[TokenId] = frozenset(),
        branch_of: str | None = None,
        salt: bytes = b"",
    ) -> RequestSpec:
        """Send a request; without a prompt of its own it gets one that nobody shares."""
        ids = prompt_of(name, prompt_tokens) if prompt is None else tuple(prompt)
        spec = RequestSpec(
            request_id=RequestId(name),
            prompt_token_ids=ids,
            max_new_tokens=max_tokens,
            priority=priority,
            arrival_s=self.now_s,
            sampling=sampling,
            seed=seed,
            stop_token_ids=stop_token_ids,
            cache_salt=salt,
            branch_of=None if branch_of is None else RequestId(branch_of),
        )
        self._commands.append(Submit(spec))
        return spec

    def abort(self, name: str) -> None:
        """Take a request back."""
        self._commands.append(Abort(RequestId(name)))

    def give_way(self, name: str, choice: PreemptionChoice) -> None:
        """Tell a resident to give way in the next step."""
        self._commands.append(GiveWay(RequestId(name), choice))

    def hold(self, name: str) -> None:
        """Keep a request off the device from the next step on."""
        self._commands.append(Hold(RequestId(name)))

    def let_go(self, name: str) -> None:
        """End a hold."""
        self._commands.append(LetGo(RequestId(name)))

    def let_go_all(self) -> None:
        """End every hold, also those that the next step would begin."""
        self._commands += [LetGo(name) for name in self.scheduler.requests]

    def make_resident(
        self,
        name: str,
        *,
        priority: int = DEFAULT_CLASS,
        prompt_tokens: int = 4,
        max_tokens: int = 8,
        prompt: Sequence[TokenId] | None = None,
        computed: int | None = None,
        blocks: int | None = None,
    ) -> None:
        """Place a request on a seat, as if earlier steps had brought it there; its KV is really written.

        computed: prompt tokens prefilled; None: all, and the first token is out. blocks: size of its table; None: what
        an admission takes.
        """
        self._flush()
        spec = self.submit(name, priority=priority, prompt_tokens=prompt_tokens, max_tokens=max_tokens, prompt=prompt)
        self._flush()
        state, ids = self.scheduler.state, spec.prompt_token_ids
        request = state.requests[spec.request_id]
        count = blocks_for(slots_to_admit(spec, len(ids)), self.block_size) if blocks is None else blocks
        free = state.kv.device.peek_free(0, count)
        assert len(free) == count, f"no room to place {name}: {len(free)} of {count} blocks"
        table: BlockTable = tuple(DeviceBlockId(block) for block in free)
        state.kv.admit(spec.request_id, hits=(), new=table)
        state.newcomers.remove(request)
        request.admit(num_hit_tokens=0, is_guest=False)
        state.residents.add(request)
        self._compute_directly(request, table, len(ids) if computed is None else computed)

    def _compute_directly(self, request: Request, table: BlockTable, num_tokens: int) -> None:
        if not num_tokens:
            return
        ids = request.spec.prompt_token_ids
        sample = sample_input(request) if num_tokens == len(ids) else None
        (result,) = DryBackend.forward(
            self.backend, [BatchSequence(request.request_id, ids[:num_tokens], 0, table, sample)]
        )
        request.compute(num_tokens)
        self.scheduler._transitions.publish(request)
        if result.token_id is not None:
            request.append(result.token_id)
            self._record([TokenEmitted(request.request_id, self.now_s, result.token_id, 0, result.logprobs)])

    # Time

    def plan(self) -> StepPlan:
        """Take in what clients did and return the plan of the next step, not yet executed."""
        if self._open_plan is None:
            self._flush()
            self._open_plan = self.scheduler.plan()
            self.checks.check_plan(self._open_plan)
        return self._open_plan

    def step(self) -> StepPlan:
        """Plan, execute, commit (or discard), and check everything."""
        plan = self.plan()
        self._open_plan = None
        self.now_s += 1.0
        self.plans.append(plan)
        try:
            outcome = self.executor.execute(plan, self.scheduler.requests)
        except DeviceFaultError as fault:
            events = self.scheduler.discard(plan, str(fault), self.now_s)
        else:
            events = self.scheduler.commit(plan, outcome)
        self._record(events)
        self.checks.check_step(plan, events)
        return plan

    def steps(self, count: int) -> list[StepPlan]:
        """Go on for some steps."""
        return [self.step() for _ in range(count)]

    def run_until_idle(self, *, max_steps: int = 5000) -> int:
        """Go on until nothing is left to do, and check that nothing is owned. Returns the number of steps."""
        count = 0
        while self._commands or self._open_plan is not None or self.scheduler.has_work:
            assert count < max_steps, f"still busy after {count} steps: {self.plan().describe()}"
            self.step()
            count += 1
        self.checks.check_drained()
        return count

    def run_until_unheld_are_done(self) -> None:
        """Go on until only held requests are left."""
        while self._commands or self._open_plan is not None or self.scheduler.has_work:
            self.step()

    def _flush(self) -> None:
        commands, self._commands = self._commands, []
        for command in commands:
            if isinstance(command, Submit) and command.spec.request_id not in self.scheduler.requests:
                self.specs[command.spec.request_id] = command.spec
                self.tokens[command.spec.request_id] = []
                self.checks.expect(command.spec)
        events = self.scheduler.accept(commands, self.now_s)
        self._record(events)

    def _record(self, events: Iterable[StepEvent]) -> None:
        for event in events:
            self.events.append(event)
            if isinstance(event, TokenEmitted):
                self.tokens[event.request_id].append(event.token_id)
            self.checks.check_event(event, self._expected_to_fail)

    @property
    def _expected_to_fail(self) -> frozenset[str]:
        return frozenset(self.backend.poison) | frozenset(self.backend.faults) | self.backend.failed_alone

    # What can be asked

    def request(self, name: str) -> Request:
        """An unfinished request."""
        return self.scheduler.requests[RequestId(name)]

    def state_of(self, name: str) -> RequestState:
        """Where an unfinished request is."""
        return self.request(name).state

    def events_of(self, name: str, kind: type[AnyEvent]) -> list[AnyEvent]:
        """Everything of one kind that happened to a request."""
        return [event for event in self.events if isinstance(event, kind) and event.request_id == name]

    def finished(self, name: str) -> Finished:
        """The terminal event of a request."""
        (event,) = self.events_of(name, Finished)
        return event

    def is_finished(self, name: str) -> bool:
        """Whether the request has ended."""
        return bool(self.events_of(name, Finished))

    def num_preemptions(self, name: str) -> int:
        """How often a request gave way."""
        return len(self.events_of(name, Preempted))

    def blocks_of(self, name: str) -> BlockTable:
        """The device blocks of a resident; empty for anybody else."""
        return self.scheduler.state.kv.tables.get(RequestId(name), ())

    def num_found(self, num_computed: int, num_known: int) -> int:
        """Tokens that a request finds again after its blocks were dropped, if nobody has overwritten them."""
        if self.scheduler.state.kv.index is None:
            return 0
        return min(num_computed, num_known - 1) // self.block_size * self.block_size

    @property
    def num_device_blocks_owned(self) -> int:
        """Device blocks in use."""
        return self.scheduler.state.kv.device.num_owned

    @property
    def num_host_blocks_owned(self) -> int:
        """Host blocks in use."""
        return self.scheduler.state.kv.host.num_owned


def victims(plan: StepPlan) -> list[str]:
    """Who gives way in a plan."""
    return [preemption.victim for preemption in plan.preemptions]


def served(plan: StepPlan) -> set[str]:
    """Who computes in a plan."""
    return set(plan.request_ids())


def why_not(plan: StepPlan, name: str) -> DeferralReason | None:
    """Why a request is not served in a plan; None: served, or not looked at."""
    for deferral in plan.deferrals:
        if deferral.request_id == name:
            return deferral.reason
    return None
