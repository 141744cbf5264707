"""The trace tells what happened: compared with the scheduler itself, in worlds of the worst kind."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from giveway.build import BuiltEngine, build_engine
from giveway.core.config import CacheConfig, PreemptionChoice, SchedulerConfig, SchedulingPolicy, VictimOrder
from giveway.core.cost_model import choose_mode
from giveway.core.cost_profile import SHIPPED
from giveway.core.errors import ConfigError, KVCacheFullError
from giveway.core.ids import RequestId
from giveway.core.kv_cache import BlockCopy
from giveway.core.plan import PreemptionMode, StepPlan
from giveway.core.request import FinishReason, RequestState
from giveway.core.sampling import SamplingParams
from giveway.engine.clock import StepClock
from giveway.engine.trace import Trace, TraceWriter, UnservedReason, read_trace
from giveway.engine.trace.causes import Causes
from giveway.engine.trace.content import TracedStep
from giveway.engine.trace.situation import Situation
from giveway.llm import LLM
from giveway.options import EngineOptions
from giveway.runtime.dry.scripted_copies import CopyFate
from giveway.runtime.model_executor import ModelExecutor
from tests.engine.traced_world import TracedWorld, Truth
from tests.faulty_disk import FaultyDisk
from tests.properties import test_state_machine as machine

SEEDS = range(60)
COPYING = (RequestState.SWAPPING_OUT, RequestState.SWAPPING_IN)


def dry(path: Path, **options: Any) -> BuiltEngine:
    values = {"device": "dry", "check_invariants": True, "seed": 1, "trace": str(path), **options}
    return build_engine(EngineOptions(**values), StepClock())


def compare(world: TracedWorld) -> Trace:
    """Walk through the trace beside what was really known: nobody without a reason, no reason that was not so.

    Returns the trace.
    """
    trace = world.read()
    unserved: Counter[RequestId] = Counter()
    situation = Situation(trace.content.config)
    for step in trace.steps:
        situation.begin(step)
        if step.step_id is not None:
            truth = world.truths[step.step_id]
            assert step.has_failed == (step.step_id in world.failed)
            assert step.costs == truth.costs
            assert situation.standings.keys() == truth.states.keys()
            causes = Causes(situation, step)
            for name, standing in situation.standings.items():
                assert situation.rank_of(standing, step.start_s) == truth.ranks[name]
                assert standing.is_newcomer == (truth.states[name] not in (RequestState.RUNNING, *COPYING))
                if check_reason(causes, step, truth, name) is not None:
                    unserved[name] += 1
        situation.end(step)
    assert situation.standings.keys() == world.scheduler.requests.keys()
    for name in {request.request_id for request in trace.requests}:
        spans = trace.explain(name)
        assert sum(span.num_steps for span in spans) == unserved[name]
        assert all(earlier.last_step < later.first_step for earlier, later in pairwise(spans))
    check_decisions(trace)
    trace.totals()
    trace.as_chrome_trace()
    return trace


def check_reason(causes: Causes, step: TracedStep, truth: Truth, name: RequestId) -> UnservedReason | None:
    cause, plan = causes.of(name), truth.plan
    if name in plan.request_ids():
        assert (None if cause is None else cause.reason) == (UnservedReason.STEP_FAILED if step.has_failed else None)
        return None if cause is None else cause.reason
    assert cause is not None
    deferral = next((each for each in plan.deferrals if each.request_id == name), None)
    preemption = next((each for each in plan.preemptions if each.victim == name), None)
    if name in {lost.request_id for lost in plan.given_up}:
        assert cause.reason is UnservedReason.GIVEN_UP
    elif deferral is not None:
        assert cause.reason.value == deferral.reason.value
        assert cause.num_lacking_blocks == deferral.lacking_blocks
    elif step.has_failed and preemption is not None:
        assert cause.reason is UnservedReason.STEP_FAILED
    elif preemption is not None:
        assert cause.reason is (UnservedReason.PREEMPTED if preemption.is_resident else UnservedReason.GIVES_WAY)
        assert cause.beneficiary == preemption.beneficiary
    elif name in plan.dropped or name in {move.request_id for move in plan.moves}:
        assert cause.reason in (UnservedReason.GIVES_WAY, UnservedReason.STEP_FAILED)
    elif truth.states[name] in COPYING or name in {swap_in.copy.request_id for swap_in in plan.swap_ins}:
        assert cause.reason in (UnservedReason.COPY_IN_FLIGHT, UnservedReason.STEP_FAILED)
    elif name in truth.held:
        assert cause.reason is UnservedReason.HELD
    elif truth.suspects:
        assert cause.reason is UnservedReason.FAULT_ISOLATION
    else:
        assert cause.reason is UnservedReason.BEHIND_DEFERRED
        assert cause.beneficiary in {each.request_id for each in plan.deferrals}
        assert truth.ranks[cause.beneficiary] < truth.ranks[name]
    return cause.reason


def check_decisions(trace: Trace) -> int:
    """Make every decision again from what the trace says of it."""
    count = 0
    for step, preemption in trace.preemptions():
        again = choose_mode(
            preemption.giving, step.costs, preemption.wanted, block_size=trace.content.cache_config.block_size
        )
        assert again == preemption.cost
        count += 1
    return count


def random_world(path: Path, rng: random.Random) -> TracedWorld:
    block_size, seats = rng.choice([2, 4]), rng.randint(2, 6)
    disk_blocks = rng.choice([0, 16])

    def fate_of(_: BlockCopy) -> CopyFate:
        return CopyFate(delay_steps=rng.choice([0, 1, 4]), fails=rng.random() < 0.05, is_lost=rng.random() < 0.03)

    return TracedWorld(
        path,
        device_blocks=rng.randint(10, 16),
        block_size=block_size,
        host_blocks=rng.choice([0, 4, 16]),
        seats=seats,
        budget=seats + rng.choice([0, 2, 20]),
        policy=rng.choice([SchedulingPolicy.PRIORITY, SchedulingPolicy.PRIORITY, SchedulingPolicy.FCFS]),
        mode=rng.choice(list(PreemptionChoice)),
        prefix_caching=rng.random() < 0.5,
        copies=fate_of if rng.random() < 0.6 else None,
        copy_timeout_s=8.0,
        max_guest_looks=rng.choice([1, 32]),
        vocab_size=50,
        tails=rng.random() < 0.6,
        victim_order=rng.choice([None, *VictimOrder]),
        aging_s=rng.choice([None, None, 1.0, 7.0]),
        target_step_s=rng.choice([1e6, None]),
        disk_blocks=disk_blocks,
        disk=FaultyDisk(disk_blocks, block_size) if disk_blocks else None,
    )


def live(world: TracedWorld, rng: random.Random, num_steps: int, *, has_holds: bool = False) -> None:
    """Arrivals with branches and shared beginnings, aborts, orders to give way, holds, faults and failed steps."""
    for step in range(num_steps):
        unfinished = list(world.scheduler.requests)
        if rng.random() < 0.4 and len(unfinished) < 10:
            name, num_branches = f"r{step}", rng.choice([1, 1, 1, 3])
            prompt = [1] * rng.randint(1, 16) + [rng.randint(1, 3)]
            priority, max_tokens = rng.choice([0, 5, 10]), rng.randint(1, 7)
            for branch in range(num_branches):
                world.submit(
                    f"{name}/{branch}" if branch else name,
                    priority=priority,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    branch_of=name if num_branches > 1 else None,
                    seed=step + branch,
                )
            if rng.random() < 0.05:
                world.backend.poison[name] = rng.randint(0, 20)
            if rng.random() < 0.05:
                world.backend.faults[name] = rng.randint(0, 20)
        if unfinished and rng.random() < 0.1:
            world.give_way(rng.choice(unfinished), rng.choice(list(PreemptionChoice)))
        if unfinished and rng.random() < 0.03:
            world.abort(rng.choice(unfinished))
        if has_holds and unfinished and rng.random() < 0.03:
            world.hold(rng.choice(unfinished))
        for name in sorted(world.scheduler.state.held):
            if rng.random() < 0.2:
                world.let_go(name)
        if rng.random() < 0.01:
            world.backend.fails_next = True
        world.step()
    world.let_go_all()


SEEN_IN_RANDOM_RUNS = ("overdue", "set_back", "suspects", "dropped", "moving", "moved", "given_up", "copies", "aborted")


def test_in_random_runs_everybody_is_served_or_has_exactly_one_reason(tmp_path: Path) -> None:
    # Goal: faults, lost copies, branches, aging, disks: the trace alone says who was where, and why nobody served it.
    reasons: set[UnservedReason] = set()
    fields: Counter[str] = Counter()
    for seed in SEEDS:
        rng = random.Random(seed)
        world = random_world(tmp_path / "trace.jsonl", rng)
        live(world, rng, 120, has_holds=seed % 2 == 1)
        world.run_until_idle()
        world.writer.close()
        trace = compare(world)
        reasons |= {reason for totals in trace.totals() for reason in totals.num_unserved_steps}
        for step in trace.steps:
            fields.update(name for name in SEEN_IN_RANDOM_RUNS if getattr(step, name))
    # Who has paid is rare: it takes a long storm of one class.
    assert reasons >= set(UnservedReason) - {UnservedReason.NO_ROOM_TO_STAY}
    assert fields.keys() == set(SEEN_IN_RANDOM_RUNS)


@pytest.mark.long
def test_whatever_happens_everybody_is_served_or_has_exactly_one_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Goal: the same, in whatever world the search for the worst one comes upon.
    monkeypatch.setattr(machine, "World", lambda **settings: TracedWorld(tmp_path / "trace.jsonl", **settings))

    class Traced(machine.AnythingMayHappen):
        def teardown(self) -> None:
            super().teardown()
            if hasattr(self, "world"):
                assert isinstance(self.world, TracedWorld)
                self.world.writer.close()
                compare(self.world)

    run_state_machine_as_test(Traced, settings=settings(max_examples=1000, stateful_step_count=60))


def test_every_decision_can_be_made_again_from_the_trace_alone(tmp_path: Path) -> None:
    # Goal: also with a profile that changes from step to step, of which a line holds what is new only.
    world = TracedWorld(
        tmp_path / "trace.jsonl", device_blocks=12, host_blocks=6, mode=PreemptionChoice.AUTO, tails=True
    )
    for number in range(24):
        world.submit(f"r{number}", priority=number * 7 % 5, prompt_tokens=3 + number % 9, max_tokens=12)
        world.steps(2)
        costs = world.scheduler.state.costs
        world.scheduler.state.costs = replace(costs, token_s=costs.token_s * 0.8, slot_in_s=costs.slot_in_s * 1.01)
    world.run_until_idle()
    world.writer.close()
    compare(world)
    trace = world.read()
    assert check_decisions(trace) > 20
    assert {preemption.mode for _, preemption in trace.preemptions()} >= {PreemptionMode.SWAP, PreemptionMode.RECOMPUTE}
    assert len({step.costs for step in trace.steps}) > 20


def test_totals_are_those_of_the_results(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    llm = LLM(device="dry", num_kv_blocks=12, block_size=4, max_num_seqs=4, trace=str(path), check_invariants=True)
    params = [SamplingParams(temperature=0, max_tokens=1 + 3 * number) for number in range(8)]
    results = llm.generate([[number + 1] * 9 for number in range(8)], params, priorities=[9, 9, 9, 5, 5, 5, 0, 0])
    llm.engine.close()
    totals = read_trace(path).totals()
    assert [each.request.request_id for each in totals] == [result.request_id for result in results]
    assert any(each.preemptions for each in totals)
    for each, result in zip(totals, results, strict=True):
        assert dict(each.preemptions) == result.stats.preemptions
        assert each.finish_reason is result.finish_reason is FinishReason.LENGTH
        assert each.end is not None
        assert each.end.num_output_tokens == len(result.token_ids) <= each.num_served_steps


def test_a_trace_holds_no_text_and_no_tokens(tmp_path: Path) -> None:
    # Goal: prompts, answers, stop strings and salts are nobody's business.
    path = tmp_path / "trace.jsonl"
    built = dry(path)
    sampling = SamplingParams(temperature=0, max_tokens=5, stop=("SECRET-STOP",), min_tokens=5)
    built.engine.submit("SECRET-PROMPT", sampling, cache_salt="SECRET-SALT")
    built.engine.submit([77_777 % 256] * 3, SamplingParams(temperature=0, max_tokens=1))
    while built.engine.has_work:
        built.engine.step()
    built.engine.close()
    content = path.read_text()
    assert "SECRET" not in content
    assert not {"token_ids", "text", "detail", "prompt"} & set(json.dumps(content).split('\\"'))


def test_a_steady_step_takes_a_short_line(tmp_path: Path) -> None:
    # Goal: who decodes is said when it changes, not with every token.
    path = tmp_path / "trace.jsonl"
    built = dry(path, enable_prefix_caching=False)
    for number in range(16):
        built.engine.submit([number + 1] * 4, SamplingParams(temperature=0, max_tokens=9))
    for _ in range(8):
        built.engine.step()
    built.engine.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 9
    assert "decodes" in lines[2]
    assert max(len(line) for line in lines[3:]) < 120
    assert [len(step.decodes) for step in read_trace(path).steps] == [0] + [16] * 7


def test_a_request_taken_back_before_any_step_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    built = dry(path)
    gone = built.engine.submit([1, 2], SamplingParams(max_tokens=3))
    built.engine.abort(gone)
    built.engine.step()
    kept = built.engine.submit([1, 2], SamplingParams(max_tokens=3))
    built.engine.step()
    built.engine.abort(kept)
    built.engine.step()
    built.engine.close()
    (totals,) = read_trace(path).totals()
    assert (totals.request.request_id, totals.finish_reason) == (kept, FinishReason.ABORT)


def test_the_control_policy_is_traced_up_to_its_loss(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    llm = LLM(device="dry", scheduling_policy="none", num_kv_blocks=20, block_size=1, trace=str(path))
    with pytest.raises(KVCacheFullError):
        llm.generate([[i] * 5 for i in range(8)], SamplingParams(temperature=0, max_tokens=8))
    llm.engine.close()
    assert {totals.finish_reason for totals in read_trace(path).totals()} == {FinishReason.ABORT}


def test_a_step_that_is_broken_off_sets_back_who_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.jsonl"
    built = dry(path)
    names = [built.engine.submit([n + 1] * 4, SamplingParams(temperature=0, max_tokens=6)) for n in range(3)]
    built.engine.step()
    execute = ModelExecutor.execute

    def interrupted(self: ModelExecutor, plan: StepPlan, requests: Any) -> Any:
        monkeypatch.setattr(ModelExecutor, "execute", execute)
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelExecutor, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        built.engine.step()
    while built.engine.has_work:
        built.engine.step()
    built.engine.close()
    trace = read_trace(path)
    assert set(trace.steps[1].set_back_before) == set(names)
    assert trace.steps[1].step_id == 2  # the number of the step that was broken off is missing
    for totals in trace.totals():
        assert totals.preemptions == {PreemptionMode.RECOMPUTE: 1}
        assert totals.finish_reason is FinishReason.LENGTH


# The file


def writer_of(path: Path) -> TraceWriter:
    return TraceWriter(path, SchedulerConfig(), CacheConfig(4))


def test_an_older_trace_is_replaced_but_nothing_else(tmp_path: Path) -> None:
    # Goal: a mistyped --trace does not cost anybody a file.
    path = tmp_path / "file"
    for _ in range(2):
        writer_of(path).close()
    path.write_text('{"prompt": "precious"}\n')
    with pytest.raises(ConfigError, match="holds something that is not a trace"):
        writer_of(path)
    assert path.read_text() == '{"prompt": "precious"}\n'
    path.write_text("")
    writer_of(path).close()
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        writer_of(tmp_path / "nowhere" / "file")
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        writer_of(tmp_path)


def test_a_full_disk_ends_the_trace_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "giveway"):
        built = dry(Path("/dev/full"))
        name = built.engine.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
        results = [update.result for _ in range(4) for update in built.engine.step()]
        built.engine.close()
    assert results[-1] is not None
    assert (results[-1].request_id, len(results[-1].token_ids)) == (name, 4)
    (notice,) = [record.getMessage() for record in caplog.records if "trace" in record.getMessage()]
    assert notice == (
        "trace /dev/full: cannot be written (No space left on device); the trace ends here, the work goes on"
    )


def test_a_reader_that_goes_away_harms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Goal: a trace into a pipe whose other end is closed in the middle.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    built = dry(pipe)
    built.engine.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
    built.engine.step()
    assert os.read(reader, 1 << 16).count(b"\n") == 2
    os.close(reader)
    with caplog.at_level(logging.WARNING, "giveway"):
        while built.engine.has_work:
            built.engine.step()
    built.engine.close()
    assert [record.getMessage().split("(")[1][:11] for record in caplog.records] == ["Broken pipe"]


KILLED = """
import os, signal, sys
from giveway.llm import LLM
from giveway.core.sampling import SamplingParams
llm = LLM(device="dry", trace=sys.argv[1])
llm.engine.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=50))
for _ in range(20):
    llm.engine.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_every_step_that_it_made(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    trace = read_trace(path)
    assert len(trace.steps) == 20
    assert not trace.is_cut_off
    (totals,) = trace.totals()
    assert totals.finish_reason is None


def small_trace(path: Path) -> Path:
    """A trace with everything in it that the dry run can bring about in a few steps."""
    world = TracedWorld(
        path, device_blocks=8, host_blocks=2, disk_blocks=8, disk_dir=path.parent, tails=True, aging_s=9.0, seats=3
    )
    world.backend.poison["r3"] = 5
    for number in range(6):
        branch, prompt = ("r4", [7] * 6) if number > 3 else (None, [number] * 6)
        world.submit(f"r{number}", priority=9 - 2 * (number % 4), prompt=prompt, max_tokens=9, branch_of=branch)
        world.step()
    world.give_way("r0", PreemptionChoice.AUTO)
    world.step()
    world.abort("r1")
    world.run_until_idle()
    world.writer.close()
    compare(world)
    return path


def test_a_last_line_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    path = small_trace(tmp_path / "trace.jsonl")
    content = path.read_bytes()
    whole = read_trace(path)
    assert not whole.is_cut_off
    start = content.rstrip().rfind(b"\n") + 1
    for stop in range(start + 1, len(content)):
        path.write_bytes(content[:stop])
        cut = read_trace(path)
        assert cut.is_cut_off
        assert cut.steps == whole.steps[:-1]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "is empty"),
        ('{"prompt": "x"}\n', "line 1: not a trace of format 1"),
        ('{"giveway_trace": 2}\n', "line 1: not a trace of format 1 (giveway_trace is 2)"),
        ("[1]\n", "line 1: a JSON object is needed, found [1]"),
        ("{\n", "line 1 is not valid JSON"),
        ("[" * 100_000 + "\n", "line 1 is not valid JSON"),
        ('{"giveway_trace": 1}\n', "line 1: scheduler: a JSON object is needed, found None"),
        ('{"giveway_trace": 1, "scheduler": {"max_num_seqs": 0}}\n', "line 1: scheduler: max_num_seqs is 0"),
        ('{"giveway_trace": 1, "scheduler": {"policy": "none of these"}}\n', "policy is 'none of these'; it must be"),
        ('{"giveway_trace": 1, "scheduler": {}, "cache": {}}\n', "line 1: cache: settings are missing"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert complaint in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"step": -1}', "line 3: step is -1; it must be a whole number from 0"),
        ('{"step": 1}', "line 3: start_s is None; it must be a number of seconds"),
        ('{"step": 1, "start_s": NaN, "end_s": 1}', "line 3 is not valid JSON: NaN is no number"),
        ('{"step": 1, "start_s": 1e999, "end_s": 1}', "line 3: start_s is inf; it must be a number of seconds"),
        ('{"step": 0, "start_s": 9, "end_s": 9, "pools": [1, 2, 3, 4, 5]}', "line 3: step 0 comes after step 0"),
        ('{"step": 1, "start_s": 9, "end_s": 8, "pools": [1, 2, 3, 4, 5]}', "line 3: ends at 8.0 s, before its start"),
        ('{"step": 1, "start_s": -9, "end_s": 8, "pools": [1, 2, 3, 4, 5]}', "line 3: starts at -9.0 s, before"),
        ('{"step": 1, "start_s": 9, "end_s": 9, "pools": [1]}', "line 3: pools is [1]; it must be 5 whole numbers"),
        ('{"step": 1, "start_s": 9, "end_s": 9, "decodes": [1]}', "line 3: decodes has 1; a list of request ids"),
        ('{"step": 1, "start_s": 9, "end_s": 9, "costs": {"step_s": -1}}', "line 3: costs: cost profile: step_s is -1"),
        (
            '{"step": 1, "start_s": 9, "end_s": 9, "pools": [1, 2, 3, 4, 5], "decodes": ["who"]}',
            "line 3: request 'who' is not there: it was never accepted, or has ended",
        ),
        (
            '{"step": 1, "start_s": 9, "end_s": 9, "pools": [1, 2, 3, 4, 5], "chunks": [["a", 0, "all", true]]}',
            "line 3: chunks has 'all' where int is needed",
        ),
    ],
)
def test_nonsense_is_named_with_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    built = dry(path)
    built.engine.submit([1], SamplingParams(max_tokens=1))
    built.engine.step()
    built.engine.close()
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert complaint in str(caught.value)


NONSENSE: tuple[Any, ...] = (None, True, -1, 1.5, 10**30, "x", "r0", [], [None], {}, {"x": 1})


def spoilt(value: Any) -> list[Any]:
    """Every way to replace one part of a JSON value by nonsense, or to leave it out."""
    ways = list(NONSENSE)
    if isinstance(value, dict):
        for name, part in value.items():
            ways += [{**value, name: way} for way in spoilt(part)]
            ways.append({key: part for key, part in value.items() if key != name})
    elif isinstance(value, list):
        for place, part in enumerate(value[:2]):
            ways += [[*value[:place], way, *value[place + 1 :]] for way in spoilt(part)]
    return ways


def test_no_nonsense_is_worse_than_an_error_with_a_line(tmp_path: Path) -> None:
    # Goal: a trace comes from anywhere; whatever stands in it, it is refused or read, and everything can be asked.
    path = small_trace(tmp_path / "trace.jsonl")
    lines = path.read_text().splitlines()
    seen: set[str] = set()
    num_refused = num_unplaced = 0
    for place, line in enumerate(lines):
        value = json.loads(line)
        fresh = {name: part for name, part in value.items() if name not in seen or name in ("scheduler", "cache")}
        seen |= fresh.keys()
        for name, part in fresh.items():
            for way in spoilt(part):
                path.write_text(
                    "\n".join([*lines[:place], json.dumps({**value, name: way}), *lines[place + 1 :]]) + "\n"
                )
                try:
                    trace = read_trace(path)
                except ConfigError as error:
                    num_refused += f"{path}: line " in str(error)
                    num_unplaced += f"{path}: line " not in str(error)
                else:
                    for totals in trace.totals():
                        trace.explain(totals.request.request_id)
                    trace.as_chrome_trace()
    assert num_refused > 500
    assert num_unplaced == 0
    assert seen >= {"preemptions", "deferrals", "swap_ins", "admissions", "copies", "set_back", "suspects", "aborted"}


def test_the_profile_that_is_shipped_is_in_the_first_line_with_a_step(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    built = dry(path)
    built.engine.submit([1], SamplingParams(max_tokens=1))
    built.engine.step()
    built.engine.close()
    assert read_trace(path).steps[0].costs == SHIPPED
