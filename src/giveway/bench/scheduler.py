"""What scheduling itself costs: state changes alone, the whole path of a preemption, and plan + commit of a step.

No model and no clock: an executor that answers at once stands in, and only calls of the scheduler are timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from giveway.bench.instant_executor import InstantExecutor
from giveway.bench.measure import Report
from giveway.core.commands import Abort, GiveWay, Submit
from giveway.core.config import CacheConfig, PreemptionChoice, SchedulerConfig
from giveway.core.ids import RequestId
from giveway.core.plan import StepPlan
from giveway.core.request import Request, RequestSpec
from giveway.core.sampling import SamplingParams
from giveway.core.scheduler import Scheduler
from giveway.core.state import RankedRequests

BLOCK_SIZE = 16
CONTEXT_TOKENS = 512
BACKGROUND, URGENT = 20, 0
_GREEDY = SamplingParams(temperature=0.0, top_p=1.0)


def bench_scheduler(*, num_rounds: int = 200) -> Report:
    """Measure everything; times are medians over `num_rounds`."""
    rows = _state_changes(max(num_rounds * 10, 100))
    rows += [row for blocks in (2, 32, 512) for row in _whole_path(blocks, max(num_rounds // 4, 5))]
    for running in (1, 16, 64, 256):
        for waiting in (0, 100, 10_000):
            rows.append(_step(running, waiting, num_rounds))
    rows += [_preempting_step(running, 100, max(num_rounds // 4, 5)) for running in (16, 64, 256)]
    settings = {
        "block_size": BLOCK_SIZE,
        "context_tokens": CONTEXT_TOKENS,
        "rounds": num_rounds,
        "invariants": "off",
        "plan_us, commit_us": "medians; every step of 16 rounds, one request in 16 grows its table",
    }
    return Report("Cost of scheduling", settings, rows)


class _Bench:
    """A scheduler in steady decode, driven by hand."""

    def __init__(
        self,
        *,
        seats: int,
        num_blocks: int,
        num_host_blocks: int,
        max_new_tokens: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self._max_new_tokens = max_new_tokens  # of every request
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=1 << 20, max_model_len=1 << 20),
            CacheConfig(num_blocks, num_host_blocks, BLOCK_SIZE, enable_prefix_caching),
        )
        self._number = 0
        self._now_s = 0.0
        self._executor = InstantExecutor()

    def submit(self, count: int, *, num_tokens: int = CONTEXT_TOKENS, priority: int = BACKGROUND) -> list[RequestId]:
        """Hand in requests whose lengths differ by one, so that an equal share of them grows in every step."""
        names = []
        for _ in range(count):
            names.append(RequestId(f"r{self._number}"))
            prompt = (self._number, *(1,) * (num_tokens + self._number % BLOCK_SIZE - 1))  # shared with nobody
            spec = RequestSpec(names[-1], prompt, self._max_new_tokens, priority, sampling=_GREEDY)
            self.scheduler.check_request(spec)
            self.scheduler.accept([Submit(spec)], 0.0)
            self._number += 1
        return names

    def step(self) -> tuple[StepPlan, float, float]:
        """Plan, pretend to execute, commit. Returns the plan and the seconds of plan and commit."""
        self.scheduler.accept([], self._now_s)
        started = time.perf_counter()
        plan = self.scheduler.plan()
        planned = time.perf_counter()
        outcome = self._executor.execute(plan, self.scheduler.requests)
        self._now_s = outcome.now_s
        executed = time.perf_counter()
        self.scheduler.commit(plan, outcome)
        return plan, planned - started, time.perf_counter() - executed


def _step(running: int, waiting: int, num_rounds: int) -> dict[str, Any]:
    bench = _steady(running, waiting, num_rounds)
    times = [bench.step()[1:] for _ in range(num_rounds)]
    return {
        "operation": "steady decode",
        "running": running,
        "waiting": waiting,
        "plan_us": 1e6 * median(plan_s for plan_s, _ in times),
        "commit_us": 1e6 * median(commit_s for _, commit_s in times),
    }


def _steady(running: int, waiting: int, num_rounds: int) -> _Bench:
    max_new_tokens = num_rounds + 2 * BLOCK_SIZE
    per_request = (CONTEXT_TOKENS + BLOCK_SIZE + max_new_tokens) // BLOCK_SIZE + 1
    bench = _Bench(
        seats=running,
        num_blocks=(running + 1) * per_request,
        num_host_blocks=running * per_request,
        max_new_tokens=max_new_tokens,
    )
    bench.submit(running)
    bench.step()
    bench.submit(waiting)
    for _ in range(3):
        bench.step()
    return bench


def _preempting_step(running: int, waiting: int, num_rounds: int) -> dict[str, Any]:
    """Time the step in which an urgent request takes a seat from a full house, over and over."""
    bench = _steady(running, waiting, 10 * num_rounds)
    times = []
    for _ in range(num_rounds):
        (urgent,) = bench.submit(1, num_tokens=64, priority=URGENT)
        plan, plan_s, commit_s = bench.step()
        if [preemption.beneficiary for preemption in plan.preemptions] != [urgent]:
            raise AssertionError(f"the urgent request did not displace anybody: {plan.describe()}")
        times.append((plan_s, commit_s))
        _abort(bench, urgent)
        for _ in range(3):
            bench.step()  # the victim comes back
    return {
        "operation": "preempting step",
        "running": running,
        "waiting": waiting,
        "plan_us": 1e6 * median(plan_s for plan_s, _ in times),
        "commit_us": 1e6 * median(commit_s for _, commit_s in times),
    }


def _abort(bench: _Bench, request_id: RequestId) -> None:
    bench.scheduler.accept([Abort(request_id)], 0.0)


def _whole_path(num_blocks: int, num_rounds: int) -> list[dict[str, Any]]:
    """Plan + commit of a forced swap out, and of the swap in that follows, of a request that owns `num_blocks`."""
    bench = _Bench(
        seats=1,
        num_blocks=num_blocks,
        num_host_blocks=num_blocks,
        max_new_tokens=2,
        enable_prefix_caching=False,  # all of its blocks are to be copied back: none is found on the device
    )
    (name,) = bench.submit(1, num_tokens=num_blocks * BLOCK_SIZE - 2)
    bench.step()
    out_s, in_s = [], []
    for _ in range(num_rounds):
        bench.scheduler.accept([GiveWay(name, PreemptionChoice.SWAP)], 0.0)
        plan, plan_s, commit_s = bench.step()
        assert plan.copies_out
        out_s.append(plan_s + commit_s)
        plan, plan_s, commit_s = bench.step()
        assert plan.swap_ins
        in_s.append(plan_s + commit_s)
    return [
        {"operation": f"whole path, swap out, {num_blocks} blocks", "median_ns": 1e9 * median(out_s)},
        {"operation": f"whole path, swap in, {num_blocks} blocks", "median_ns": 1e9 * median(in_s)},
    ]


def _state_changes(num_rounds: int) -> list[dict[str, Any]]:
    """The change of containers and state alone, of one request among 64 residents, as the published write-up timed it.

    The ids of its two blocks change hands; no choice, no copy, no accounting, no events.
    """
    residents, newcomers = RankedRequests(), RankedRequests()
    for number in range(63):
        residents.add(Request(RequestSpec(RequestId(f"r{number}"), (1,), 8), (BACKGROUND, number)))
    request = Request(RequestSpec(RequestId("it"), (1,), 8), (BACKGROUND, 63))
    tables: dict[RequestId, tuple[int, ...]] = {request.request_id: (5, 6)}
    host_tables: dict[RequestId, tuple[int, ...]] = {}
    newcomers.add(request)

    def admit() -> None:
        newcomers.remove(request)
        request.admit(num_hit_tokens=0, is_guest=False)
        residents.add(request)

    def un_admit() -> None:
        residents.remove(request)
        request.un_admit()
        newcomers.add(request)

    def swap_out() -> None:
        residents.remove(request)
        request.begin_swap_out()
        host_tables[request.request_id] = tables.pop(request.request_id)
        request.finish_swap_out()
        newcomers.add(request)

    def swap_in() -> None:
        newcomers.remove(request)
        request.begin_swap_in(is_guest=False)
        tables[request.request_id] = host_tables.pop(request.request_id)
        request.finish_swap_in()
        residents.add(request)

    times: dict[str, list[float]] = {}
    for _ in range(num_rounds):
        for operation in (admit, un_admit, admit, swap_out, swap_in, un_admit):
            times.setdefault(operation.__name__, []).append(_seconds(operation))
    return [
        {"operation": f"state change, {name.replace('_', ' ')}", "median_ns": 1e9 * median(seconds)}
        for name, seconds in times.items()
    ]


def _seconds(operation: Callable[[], None]) -> float:
    started = time.perf_counter()
    operation()
    return time.perf_counter() - started
