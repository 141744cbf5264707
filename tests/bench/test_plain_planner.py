"""The plain planner does what the real one does while nothing is lacking, and says so when something is."""

from __future__ import annotations

import pytest

from giveway.bench.instant_executor import InstantExecutor
from giveway.bench.plain_planner import plan_in_arrival_order
from giveway.core.commands import GiveWay, Submit
from giveway.core.config import CacheConfig, PreemptionChoice, SchedulerConfig, SchedulingPolicy
from giveway.core.errors import ConfigError, InvariantError, KVCacheFullError
from giveway.core.ids import RequestId
from giveway.core.request import RequestSpec
from giveway.core.sampling import SamplingParams
from giveway.core.scheduler import Scheduler
from giveway.runtime.dry.dry_backend import DryBackend
from giveway.runtime.model_executor import ModelExecutor

GREEDY = SamplingParams(temperature=0.0, top_p=1.0)


def plain_scheduler(*, num_blocks: int = 32, seats: int = 4, tokens: int = 16, policy: str = "none") -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=seats, max_num_batched_tokens=tokens, policy=SchedulingPolicy(policy), check_invariants=True
    )
    return Scheduler(config, CacheConfig(num_blocks, 0, block_size=4), planner=plan_in_arrival_order)


def submit(scheduler: Scheduler, name: str, *, prompt: int = 5, output: int = 6, priority: int = 10) -> None:
    spec = RequestSpec(RequestId(name), tuple(range(prompt)), output, priority, sampling=GREEDY)
    scheduler.accept([Submit(spec)], 0.0)


def test_newcomers_sit_down_in_the_order_of_arrival_whatever_their_class() -> None:
    scheduler = plain_scheduler(seats=2)
    for name, priority in (("late class", 90), ("middle", 10), ("urgent", 0)):
        submit(scheduler, name, priority=priority)
    plan = scheduler.plan()
    assert [admission.request_id for admission in plan.admissions] == ["late class", "middle"]
    assert not plan.preemptions


def test_a_long_prompt_is_cut_to_the_token_budget_and_decodes_go_on_beside_it() -> None:
    scheduler, executor = plain_scheduler(tokens=8), InstantExecutor()
    submit(scheduler, "short")
    scheduler.commit(plan := scheduler.plan(), executor.execute(plan, scheduler.requests))
    submit(scheduler, "long", prompt=20)
    plan = scheduler.plan()
    assert plan.decodes.request_ids == ("short",)
    chunk = plan.chunk_of(RequestId("long"))
    assert chunk is not None
    assert (chunk.start, chunk.num_tokens, chunk.samples) == (0, 7, False)


def test_everybody_finishes_on_the_dry_run_where_every_slot_is_checked() -> None:
    # Goal: its admissions and growths name blocks that are really free; one wrong block stops the dry run.
    scheduler, backend = plain_scheduler(), DryBackend()
    backend.allocate(num_device_blocks=32, num_host_blocks=0, block_size=4)
    executor = ModelExecutor(backend, lambda: 0.0)
    for number in range(8):
        submit(scheduler, f"r{number}", prompt=3 + number)
    while scheduler.has_work:
        plan = scheduler.plan()
        scheduler.commit(plan, executor.execute(plan, scheduler.requests))
    assert scheduler.state.kv.device.num_available == 32


def test_a_pool_that_does_not_suffice_is_an_error() -> None:
    scheduler, executor = plain_scheduler(num_blocks=4), InstantExecutor()
    for name in ("a", "b"):
        submit(scheduler, name, prompt=6, output=8)
    scheduler.commit(plan := scheduler.plan(), executor.execute(plan, scheduler.requests))
    assert len(plan.admissions) == 2
    for _ in range(2):  # the second block of each is filled
        scheduler.commit(plan := scheduler.plan(), executor.execute(plan, scheduler.requests))
    with pytest.raises(KVCacheFullError, match="'a' needs one more"):
        scheduler.plan()


def test_what_it_cannot_plan_for_is_refused() -> None:
    scheduler = plain_scheduler(policy="priority")
    submit(scheduler, "a")
    with pytest.raises(ConfigError, match="policy 'none' or 'fcfs'"):
        scheduler.plan()
    scheduler, executor = plain_scheduler(), InstantExecutor()
    submit(scheduler, "a")
    scheduler.commit(plan := scheduler.plan(), executor.execute(plan, scheduler.requests))
    scheduler.accept([GiveWay(RequestId("a"), PreemptionChoice.RECOMPUTE)], 0.0)
    with pytest.raises(InvariantError, match="give way"):
        scheduler.plan()
