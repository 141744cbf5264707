"""Runs the requests in one mode on a loaded model, counts what happened to them, and compares their answers."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from giveway.build import BuiltEngine, Model, build_on
from giveway.core.config import PreemptionChoice
from giveway.core.errors import GiveWayError
from giveway.core.events import Admitted, ParkedMoved, Preempted, StepEvent
from giveway.core.plan import PreemptionMode, StepPlan, Tier
from giveway.core.request import RequestState
from giveway.engine.engine import Engine
from giveway.engine.interrupts import Interrupt
from giveway.engine.outputs import RequestOutput
from giveway.options import EngineOptions
from giveway.verify.compare import Difference, first_difference
from giveway.verify.modes import CheckedRequest, Kind, Mode, class_of

_STEPS_BETWEEN_ORDERS = 3
_SHARE_OF_SCARCE_POOL_PCT = 40  # of what all requests take in the end
_MOST_ORDERS = 12  # enough to be seen; who is told to give way all the time gets nowhere

_KINDS = {
    (PreemptionMode.SWAP, Tier.HOST): (Kind.HOST, Kind.HOST_TAIL),
    (PreemptionMode.SWAP, Tier.DISK): (Kind.DISK, Kind.DISK_TAIL),
    (PreemptionMode.RECOMPUTE, None): (Kind.RECOMPUTE, Kind.RECOMPUTE_TAIL),
    (PreemptionMode.PAUSE, None): (Kind.PAUSE, Kind.PAUSE),
    (PreemptionMode.UN_ADMIT, None): (Kind.UN_ADMIT, Kind.UN_ADMIT),
}


@dataclass(frozen=True, slots=True)
class ModeResult:
    """What one mode gave."""

    mode: Mode
    num_answers: int  # expected: of all requests in all rounds
    num_equal: int
    kinds: Mapping[Kind, int]  # how often each thing happened
    largest_batch: int  # requests in one step
    seconds: float
    difference: Difference | None = None  # the first
    error: str | None = None  # what ended the run

    @property
    def missing(self) -> tuple[frozenset[Kind], ...]:
        """What the mode is there to show and did not."""
        return tuple(wanted for wanted in self.mode.wanted if not any(self.kinds.get(kind) for kind in wanted))

    @property
    def is_as_promised(self) -> bool:
        """Whether everything was seen and no answer differs."""
        return self.error is None and self.num_equal == self.num_answers and not self.missing


@dataclass(slots=True)
class _Tally:
    """Counts over one run, taken from plans and events."""

    kinds: Counter[Kind] = field(default_factory=Counter)
    largest_batch: int = 0

    def listen(self, plan: StepPlan | None, events: Sequence[StepEvent]) -> None:
        """Add one step."""
        if plan is not None:
            self.largest_batch = max(self.largest_batch, len(plan.request_ids()))
        for event in events:
            if isinstance(event, Preempted):
                whole, tail = _KINDS[event.mode, event.tier]
                self.kinds[tail if event.num_kept else whole] += 1
            elif isinstance(event, ParkedMoved) and event.tier is Tier.DISK:
                self.kinds[Kind.HOST_TO_DISK] += 1
            elif isinstance(event, Admitted) and event.num_hit_tokens:
                self.kinds[Kind.CACHE_HIT] += 1


def answer_undisturbed(
    model: Model, options: EngineOptions, requests: Sequence[CheckedRequest], mode: Mode
) -> tuple[RequestOutput, ...]:
    """Answer each request alone. Raises GiveWayError if one of them ends with an error."""
    answers = _serve(_build(model, options, requests, mode).engine, requests, mode, "alone")
    for request, answer in zip(requests, answers, strict=True):
        if answer.error is not None:
            raise GiveWayError(f"{request.name} fails also when nothing disturbs it: {answer.error}")
    return tuple(answers)


def run_mode(
    model: Model,
    options: EngineOptions,
    requests: Sequence[CheckedRequest],
    undisturbed: Sequence[RequestOutput],
    mode: Mode,
) -> ModeResult:
    """Run the first `mode.num_requests` of the requests; undisturbed: the answers to compare with, one each.

    What ends the run as a whole is told in the result.
    """
    requests, tally, started_s = requests[: mode.num_requests], _Tally(), time.perf_counter()
    answers: list[RequestOutput] = []
    error = None
    try:
        engine = _build(model, options, requests, mode).engine
        engine.add_listener(tally.listen)
        for number in range(mode.num_rounds):
            answers += _serve(engine, requests, mode, f"round {number}")
    except GiveWayError as failed:
        error = f"{type(failed).__name__}: {failed}"
    compared = zip(list(requests) * mode.num_rounds, list(undisturbed[: len(requests)]) * mode.num_rounds, strict=True)
    differences = [
        first_difference(request.name, expected, found)
        for (request, expected), found in zip(compared, answers, strict=False)
    ]
    return ModeResult(
        mode=mode,
        num_answers=len(requests) * mode.num_rounds,
        num_equal=differences.count(None),
        kinds=tally.kinds,
        largest_batch=tally.largest_batch,
        seconds=time.perf_counter() - started_s,
        difference=next((difference for difference in differences if difference is not None), None),
        error=error,
    )


def _build(model: Model, options: EngineOptions, requests: Sequence[CheckedRequest], mode: Mode) -> BuiltEngine:
    block_bytes = options.block_size * model.backend.kv_bytes_per_token
    blocks = [request.num_blocks(options.block_size) for request in requests]
    everything = sum(blocks)
    settings = {
        "max_num_seqs": len(requests),
        "num_kv_blocks": max(*blocks, everything * _SHARE_OF_SCARCE_POOL_PCT // 100) if mode.is_scarce else everything,
        "kv_cache_memory_bytes": None,
        "swap_space": mode.host.num_blocks(everything, options.block_size) * block_bytes,
        "swap_disk": mode.disk.num_blocks(everything, options.block_size) * block_bytes,
        "max_model_len": max(request.num_tokens for request in requests),
        **mode.settings,
    }
    return build_on(model, replace(options, **settings))


def _serve(engine: Engine, requests: Sequence[CheckedRequest], mode: Mode, round_name: str) -> list[RequestOutput]:
    """Hand the requests in as the mode says and step to the end; answers in their order."""
    run, answers = _Run(engine, requests, mode, round_name), {}
    with Interrupt() as interrupt:
        while run.is_open:
            if interrupt.is_wanted:
                raise KeyboardInterrupt
            answers.update(run.step())
    return [answers[name] for name in run.names]


class _Run:
    """One round under way."""

    def __init__(self, engine: Engine, requests: Sequence[CheckedRequest], mode: Mode, round_name: str) -> None:
        self._engine = engine
        self._mode = mode
        self.names = [f"{round_name}, {request.name}" for request in requests]
        at_once = mode.arrivals_at_once or len(requests)
        pairs = list(zip(self.names, requests, strict=True))
        self._groups = deque(pairs[start : start + at_once] for start in range(0, len(pairs), at_once))
        # Output tokens after which the next group comes: the first has got somewhere and is far from its end.
        self._tokens_between_groups = 0 if mode.arrives_every_step else (requests[0].sampling.max_tokens or 1) // 4
        self._num_groups = 0  # handed in
        self._num_tokens = 0
        self._num_steps = 0
        self._num_orders = 0

    @property
    def is_open(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._groups) or self._engine.has_work

    def step(self) -> dict[str, RequestOutput]:
        """Make one step; return the answers that are complete, by name."""
        is_due = self._num_tokens >= self._num_groups * self._tokens_between_groups or not self._engine.has_work
        if self._groups and is_due:
            for name, request in self._groups.popleft():
                self._engine.submit(
                    request.token_ids, request.sampling, priority=class_of(self._num_groups), request_id=name
                )
            self._num_groups += 1
        if self._mode.is_ordered:
            self._order()
        updates = self._engine.step()
        self._num_steps += 1
        self._num_tokens += sum(len(update.token_ids) for update in updates)
        return {update.request_id: update.result for update in updates if update.result is not None}

    def _order(self) -> None:
        """Every few steps another resident is told to give way, by swap and by recompute in turn."""
        if self._num_steps % _STEPS_BETWEEN_ORDERS != 1 or self._num_orders == _MOST_ORDERS:
            return
        residents = [r for r in self._engine.scheduler.state.residents if r.state is RequestState.RUNNING]
        if residents:
            choice = (PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE)[self._num_orders % 2]
            self._engine.give_way(residents[self._num_orders % len(residents)].request_id, choice)
            self._num_orders += 1
