"""When requests are sent, and how a run ends: in virtual time, so every moment is exact."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from giveway.bench.serve.answer_parts import AnswerPart, Usage
from giveway.bench.serve.bodies import BodyMaker, Wishes
from giveway.bench.serve.driver import PAUSE_AFTER_FAILURE_S, Driver, Run
from giveway.bench.serve.load_class import ClassDefaults, TokenRange, parse_class
from giveway.bench.serve.prompts import PromptFormat, PromptMaker, Vocabulary
from giveway.bench.serve.records import FailureKind, Outcome, RequestFailure, RequestRecord, Sighting
from giveway.bench.serve.traces import TraceFormat, look_through
from giveway.bench.serve.workload import PlannedRequest, Trace, Workload
from tests.bench.serve.virtual_time import run_virtually

FIRST_S, GAP_S = 0.5, 0.1
BODIES = BodyMaker("m", is_chat=False, ignores_eos=True)


class Server:
    """The first token after FIRST_S, the others every GAP_S, of as many requests as there are."""

    def __init__(self, now_s: Callable[[], float], *, fails: Callable[[PlannedRequest], bool]) -> None:
        self._now_s = now_s
        self._fails = fails
        self.num_now = self.most_at_once = 0

    async def exchange(self, request: PlannedRequest, sighting: Sighting) -> None:
        sighting.sent_s = self._now_s()
        self.num_now += 1
        self.most_at_once = max(self.most_at_once, self.num_now)
        try:
            if self._fails(request):
                raise RequestFailure(FailureKind.STATUS, "busy", 503)
            for number in range(request.output_tokens):
                await asyncio.sleep(GAP_S if number else FIRST_S)
                sighting.see(AnswerPart(num_tokens=1), self._now_s())
            sighting.see(AnswerPart(usage=Usage(request.prompt_tokens, request.output_tokens)), self._now_s())
            sighting.end_s = self._now_s()
        finally:
            self.num_now -= 1


def workload(*classes: str, duration_s: float | None = None, trace: Trace | None = None) -> Workload:
    defaults = ClassDefaults(TokenRange(8, 8), TokenRange(3, 3))
    return Workload(
        classes=tuple(parse_class(text, defaults) for text in classes),
        trace=trace,
        duration_s=duration_s,
        seed=1,
        prompts=PromptMaker(PromptFormat.IDS, Vocabulary(100, 999), seed=1),
        name_prefix="t-",
    )


def drive(
    load: Workload,
    *,
    max_concurrency: int | None = None,
    fails: Callable[[PlannedRequest], bool] = lambda request: False,
    interrupt_s: float | None = None,
) -> tuple[Run, Server]:
    async def work(now_s: Callable[[], float]) -> tuple[Run, Server]:
        server, stop = Server(now_s, fails=fails), asyncio.Event()
        if interrupt_s is not None:
            asyncio.get_running_loop().call_later(interrupt_s, stop.set)
        driver = Driver(server, now_s, max_concurrency=max_concurrency)
        run = await driver.run(load.sources(BODIES), duration_s=load.duration_s, stop=stop)
        return run, server

    return run_virtually(work)


def of(run: Run, name: str) -> list[RequestRecord]:
    return sorted((record for record in run.records if record.class_name == name), key=lambda record: record.due_s)


def test_a_burst_is_sent_at_once_and_every_moment_is_seen_exactly() -> None:
    run, server = drive(workload("a:burst=4,start=2"))
    assert server.most_at_once == 4
    for record in of(run, "a"):
        assert (record.due_s, record.sent_s) == (2.0, 2.0)
        assert record.token_times_s == pytest.approx((2.5, 2.6, 2.7))
        assert record.outcome is Outcome.COMPLETED
    assert run.ended_s == pytest.approx(2.7)
    assert not run.is_interrupted


def test_an_open_loop_sends_at_its_moments_however_slow_the_server_is() -> None:
    run, server = drive(workload("a:rate=10,burstiness=inf,num=20"))
    assert [record.due_s for record in of(run, "a")] == pytest.approx([0.1 * (number + 1) for number in range(20)])
    assert all(record.lag_s == pytest.approx(0) for record in of(run, "a"))
    assert server.most_at_once == 7  # 0.7 s each, ten a second


def test_waiting_for_a_place_of_max_concurrency_is_part_of_ttft() -> None:
    # Goal: due-time TTFT. The second of two at once waits 0.7 s for the first; a client that hides it would say 0.5.
    run, server = drive(workload("a:burst=2"), max_concurrency=1)
    first, second = of(run, "a")
    assert server.most_at_once == 1
    assert (first.ttft_s, first.lag_s) == pytest.approx((0.5, 0.0))
    assert (second.ttft_s, second.lag_s) == pytest.approx((1.2, 0.7))


def test_a_closed_loop_keeps_its_number_until_the_open_loop_is_done_and_is_cut_off_then() -> None:
    run, server = drive(workload("open:burst=1,output=21,start=1", "closed:concurrency=3,output=3"))
    # The open one: due at 1, first token at 1.5, 20 more: over at 3.5.
    assert run.ended_s == pytest.approx(3.5)
    closed = of(run, "closed")
    assert [record.outcome for record in closed].count(Outcome.CUT_OFF) == 3
    # 3.5 s of requests of 0.7 s: each place completes 4 or 5, the fifth ends in the same moment as the run.
    assert [record.outcome for record in closed].count(Outcome.COMPLETED) in (12, 15)
    assert all(record.failure is None for record in closed)
    assert server.most_at_once == 4
    # Each was due in the moment in which the one before it ended.
    assert sorted({round(record.due_s, 3) for record in closed})[:5] == pytest.approx([0.0, 0.7, 1.4, 2.1, 2.8])


def test_what_was_cut_off_keeps_the_tokens_that_it_had() -> None:
    run, _ = drive(workload("open:burst=1,output=1", "closed:concurrency=2,output=100,start=0"))
    run_longer, _ = drive(workload("open:burst=1,output=11", "closed:concurrency=2,output=100"))
    assert [record.num_output_tokens for record in of(run, "closed")] in ([0, 0], [1, 1])
    for record in of(run_longer, "closed"):
        assert record.outcome is Outcome.CUT_OFF
        assert record.num_output_tokens in (10, 11)
        assert record.usage_output_tokens is None
        assert record.end_s == pytest.approx(run_longer.ended_s)


def test_a_closed_loop_with_a_number_ends_by_itself_and_the_endless_one_with_it() -> None:
    run, _ = drive(workload("counted:concurrency=2,num=5", "endless:concurrency=1"))
    assert [record.outcome for record in of(run, "counted")] == [Outcome.COMPLETED] * 5
    assert run.ended_s == pytest.approx(2.1)  # 2 + 2 + 1
    assert of(run, "endless")[-1].outcome is Outcome.CUT_OFF


def test_only_endless_loops_run_for_the_duration() -> None:
    run, _ = drive(workload("closed:concurrency=2", duration_s=3.0))
    assert run.ended_s == pytest.approx(3.0)
    assert [record.outcome for record in of(run, "closed")].count(Outcome.COMPLETED) == 8


def test_after_the_duration_nothing_new_begins_and_what_is_under_way_is_finished() -> None:
    run, _ = drive(workload("open:rate=2,burstiness=inf", "counted:concurrency=1,num=100", duration_s=2.0))
    assert [record.due_s for record in of(run, "open")] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert len(of(run, "counted")) == 3  # at 0, 0.7 and 1.4; the next would begin at 2.1
    assert all(record.outcome is Outcome.COMPLETED for record in run.records)
    assert run.ended_s == pytest.approx(2.7)


def test_a_refused_request_is_replaced_after_a_pause_not_at_once() -> None:
    # Goal: a server that sheds load is not hammered, and the loop does not die.
    run, _ = drive(workload("a:concurrency=1,num=4"), fails=lambda request: request.name in ("t-a-0", "t-a-1"))
    records = of(run, "a")
    assert [record.outcome.value for record in records] == ["failed", "failed", "completed", "completed"]
    assert [record.failure for record in records[:2]] == ["http 503", "http 503"]
    assert [record.due_s for record in records[:3]] == pytest.approx(
        [0, PAUSE_AFTER_FAILURE_S, 2 * PAUSE_AFTER_FAILURE_S]
    )


def test_an_interrupt_ends_the_run_and_keeps_what_was_seen() -> None:
    run, server = drive(workload("open:rate=1,burstiness=inf,num=1000", "closed:concurrency=2"), interrupt_s=3.6)
    assert run.is_interrupted
    assert run.ended_s == pytest.approx(3.6)
    assert [record.outcome.value for record in of(run, "open")] == ["completed", "completed", "cut off"]
    assert [record.outcome for record in of(run, "closed")].count(Outcome.CUT_OFF) == 2
    assert server.num_now == 0


def test_a_fault_of_our_own_ends_the_run_loudly() -> None:
    def fails(request: PlannedRequest) -> bool:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ExceptionGroup) as caught:
        drive(workload("a:burst=1", "b:concurrency=1"), fails=fails)
    assert caught.group_contains(ZeroDivisionError)


def test_warm_ups_are_like_the_classes_one_after_another_and_no_part_of_the_run() -> None:
    load = workload("a:burst=1,prompt=5", "b:burst=1,prompt=6")

    async def work(now_s: Callable[[], float]) -> list[RequestRecord]:
        return await Driver(Server(now_s, fails=lambda _: False), now_s).warm_up(load.warm_ups(3, BODIES))

    records = run_virtually(work)
    assert [record.num_prompt_tokens for record in records] == [5, 6, 5]
    assert [record.due_s for record in records] == pytest.approx([0.0, 0.7, 1.4])


# Workloads


def bodies_of(load: Workload) -> list[dict[str, Any]]:
    return [json.loads(request.body) for source in load.sources(BODIES) for request in source.requests]


def test_lengths_follow_from_the_seed_and_no_two_prompts_of_a_run_begin_alike() -> None:
    texts = ("a:burst=40,prompt=4-9,output=2-5,priority=3", "b:concurrency=2,num=40,service_tier=flex")
    bodies = bodies_of(workload(*texts))
    assert bodies == bodies_of(workload(*texts))
    warm = [request.body for request in workload(*texts).warm_ups(10, BODIES)]
    beginnings = [body["prompt"][0] for body in [*bodies, *map(json.loads, warm)]]
    assert len(set(beginnings)) == len(beginnings) == 90
    assert {len(body["prompt"]) for body in bodies[:40]} == set(range(4, 10))
    assert {body["max_tokens"] for body in bodies[:40]} == {2, 3, 4, 5}
    assert all(body["min_tokens"] == body["max_tokens"] and body["ignore_eos"] is True for body in bodies)
    assert all(body["priority"] == 3 and "service_tier" not in body for body in bodies[:40])
    assert all("priority" not in body and body["service_tier"] == "flex" for body in bodies[40:])
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in bodies)


def test_fields_of_the_caller_win_and_null_takes_one_out() -> None:
    extra = {"min_tokens": None, "absent": None, "temperature": 0.5, "top_p": 0.9}
    maker = BodyMaker("m", is_chat=True, ignores_eos=True, temperature=0.0, extra=extra)
    assert json.loads(maker.make("hello", Wishes(4, is_streamed=False))) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "stream": False,
        "ignore_eos": True,
        "temperature": 0.5,
        "top_p": 0.9,
    }


def test_a_trace_is_replayed_at_its_scaled_moments_with_shared_blocks_and_priorities(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 1000, "input_length": 1000, "output_length": 2, "hash_ids": [1, 2]}\n'
        '{"timestamp": 1500, "input_length": 900, "output_length": 3, "hash_ids": [1, 3], "priority": 20}\n'
        '{"timestamp": 9000, "input_length": 4, "output_length": 1, "hash_ids": [9], "priority": 0}\n'
    )
    summary = look_through(path, TraceFormat.MOONCAKE, limit=None)
    trace = Trace(path, TraceFormat.MOONCAKE, summary, limit=None, time_scale=2.0)
    run, _ = drive(workload("batch:concurrency=1", trace=trace))
    by_class = {name: of(run, name) for name in ("trace", "trace-p20", "trace-p0")}
    assert {name: [record.due_s for record in found] for name, found in by_class.items()} == {
        "trace": [0.0],
        "trace-p20": [1.0],
        "trace-p0": [16.0],
    }
    assert workload(trace=trace).class_names() == ["trace", "trace-p20", "trace-p0"]
    first, second, third = bodies_of(workload(trace=trace))
    assert (len(first["prompt"]), len(second["prompt"]), len(third["prompt"])) == (1000, 900, 4)
    assert first["prompt"][:512] == second["prompt"][:512]
    assert first["prompt"][512:900] != second["prompt"][512:]
    assert ("priority" in first, second["priority"], third["priority"]) == (False, 20, 0)
    # A duration ends the trace early.
    short, _ = drive(workload(trace=trace, duration_s=5.0))
    assert len(short.records) == 2
