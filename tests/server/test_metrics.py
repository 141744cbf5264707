"""Prometheus metrics against what an independent count over results and events gives."""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.events import Admitted, Finished, ParkedMoved, Preempted, TokenEmitted
from giveway.core.ids import RequestId
from giveway.core.kv_cache import Tier
from giveway.core.plan import PreemptionMode
from giveway.core.request import FinishReason, RequestState
from giveway.core.sampling import SamplingParams
from giveway.server.classes import PriorityClasses
from giveway.server.metric_families import Rejection
from giveway.server.metrics import ServerMetrics
from tests.server.busy_engine import (
    BLOCK_BYTES,
    PRIORITIES,
    Samples,
    Work,
    busy,
    dry,
    overlapped,
    samples_of,
    total,
    value,
)

NAMES = ("priority", "default", "flex", "batch")
SEEDS = range(3)
PROMISED = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_swapped",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:iteration_tokens_total_bucket",
    "giveway:preemptions_total",
    "giveway:recomputed_tokens_total",
    "giveway:swapped_bytes_total",
    "giveway:stall_seconds_total",
    "giveway:deferrals_total",
    "giveway:step_time_seconds_bucket",
    "giveway:http_responses_total",
    "giveway:requests_rejected_total",
]


def metrics_of(work: Work) -> ServerMetrics:
    metrics = ServerMetrics(work.engine, model_name="dry")
    work.engine.add_listener(metrics)
    return metrics


@pytest.fixture(scope="module", params=SEEDS)
def finished_work(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Work, Samples]:
    """Random work that has come to its end, and the metrics of it."""
    work = busy(request.param, tmp_path_factory.mktemp("swap"))
    metrics = metrics_of(work)
    work.run(250)
    return work, samples_of(metrics)


def class_of(work: Work, request_id: RequestId) -> str:
    return PriorityClasses().name_of(work.specs[request_id].priority)


def by_class(work: Work, counted: Iterable[tuple[RequestId, float]]) -> dict[str, float]:
    sums = dict.fromkeys(NAMES, 0.0)
    for request_id, number in counted:
        sums[class_of(work, request_id)] += number
    return sums


def told(samples: Samples, name: str, **labels: str) -> dict[str, float]:
    return {each: total(samples, name, priority_class=each, **labels) for each in NAMES}


def events_of(work: Work) -> Iterable[object]:
    return [event for step in work.told for event in step.events]


# Everything from the start


def test_every_promised_series_is_there_at_0_before_the_first_step() -> None:
    # Goal: rate() and alerts see a first increase; a series that appears at 1 has none.
    metrics = ServerMetrics(dry().engine, model_name="dry", routes=("/v1/completions",))
    samples = samples_of(metrics)
    assert set(PROMISED) <= {name for name, _ in samples}
    ours = {key: number for key, number in samples.items() if key[0].startswith(("vllm:", "giveway:"))}
    idle = {key for key, number in ours.items() if number}
    assert {name for name, _ in idle} == {"giveway:kv_blocks"}, "free blocks are the only thing there is"
    assert value(samples, "vllm:request_success_total", finished_reason="abort", priority_class="flex") == 0
    assert value(samples, "giveway:http_responses_total", route="/v1/completions", status="429") == 0


def test_no_series_appears_later(finished_work: tuple[Work, Samples]) -> None:
    # Goal: memory is bounded, and no label comes from a client.
    start = samples_of(ServerMetrics(dry().engine, model_name="dry"))
    ours = {key for key in finished_work[1] if key[0].startswith(("vllm:", "giveway:"))}
    assert ours == {key for key in start if key[0].startswith(("vllm:", "giveway:"))}


def test_every_series_says_which_model_and_engine_it_is_of() -> None:
    text = ServerMetrics(dry().engine, model_name='a "name"\n', engine_label="3").exposition().decode()
    lines = [line for line in text.splitlines() if line.startswith(("vllm:", "giveway:"))]
    assert lines
    assert all('engine="3"' in line and r'model_name="a \"name\"\n"' in line for line in lines)


def test_two_servers_in_one_process_do_not_share_a_number() -> None:
    first, second = (ServerMetrics(dry().engine, model_name="dry") for _ in range(2))
    first.count_rejection(Rejection.QUEUE_FULL)
    assert value(samples_of(first), "giveway:requests_rejected_total", reason="queue_full") == 1
    assert value(samples_of(second), "giveway:requests_rejected_total", reason="queue_full") == 0


def test_a_class_number_of_a_client_is_never_a_label(finished_work: tuple[Work, Samples]) -> None:
    seen = {content for _, labels in finished_work[1] for label, content in labels if label == "priority_class"}
    assert seen == set(NAMES)
    ours = [labels for name, labels in finished_work[1] if name.startswith(("vllm:", "giveway:"))]
    everything = {content for labels in ours for label, content in labels if label != "le"}
    assert not everything & {str(priority) for priority in PRIORITIES}


# Requests and tokens


def test_the_work_has_everything_that_is_counted(finished_work: tuple[Work, Samples]) -> None:
    # Goal: the comparisons below compare something.
    work, samples = finished_work
    for mode in PreemptionMode:
        assert total(samples, "giveway:preemptions_total", mode=mode.value) > 0, mode
    for cause in ("more_urgent", "own_class", "command", "held", "failed_step"):
        assert total(samples, "giveway:preemptions_total", cause=cause) > 0, cause
    for name in ("prefix_cache_hits", "num_preemptions"):
        assert total(samples, f"vllm:{name}_total") > 0
    for name in ("recomputed_tokens", "moved_bytes", "failed_steps", "further_losses", "stall_seconds"):
        assert total(samples, f"giveway:{name}_total") > 0
    assert any(spec.branch_of for spec in work.specs.values())


def test_ends_are_counted_by_reason_and_class(finished_work: tuple[Work, Samples]) -> None:
    work, samples = finished_work
    for reason in FinishReason:
        ended = [(name, 1.0) for name, result in work.results.items() if result.finish_reason is reason]
        assert told(samples, "vllm:request_success_total", finished_reason=reason.value) == by_class(work, ended)
    assert told(samples, "giveway:requests_accepted_total") == by_class(work, [(name, 1.0) for name in work.specs])


def test_prompt_tokens_count_once_however_often_they_are_computed(finished_work: tuple[Work, Samples]) -> None:
    # Goal: recomputed tokens are never counted as prompt tokens, nor found ones twice as prefix hits.
    work, samples = finished_work
    results = work.results.items()
    prompts = [(name, len(result.prompt_token_ids)) for name, result in results if result.token_ids]
    assert told(samples, "vllm:prompt_tokens_total") == by_class(work, prompts)
    output = [(name, len(result.token_ids)) for name, result in results]
    assert told(samples, "vllm:generation_tokens_total") == by_class(work, output)
    seated = [(name, len(result.prompt_token_ids)) for name, result in results if result.stats.queue_s is not None]
    assert told(samples, "vllm:prefix_cache_queries_total") == by_class(work, seated)
    hits = [(name, result.stats.num_cached_tokens) for name, result in results]
    assert told(samples, "vllm:prefix_cache_hits_total") == by_class(work, hits)
    again = [(name, result.stats.num_recomputed_tokens) for name, result in results]
    assert told(samples, "giveway:recomputed_tokens_total") == by_class(work, again)


def test_computed_tokens_are_those_of_the_steps_that_were_carried_out(finished_work: tuple[Work, Samples]) -> None:
    work, samples = finished_work
    steps = [step.plan.num_tokens for step in work.told if step.plan is not None and step.is_done]
    assert value(samples, "giveway:computed_tokens_total") == sum(steps)
    assert value(samples, "vllm:iteration_tokens_total_sum") == sum(steps)
    assert value(samples, "vllm:iteration_tokens_total_count") == sum(number > 0 for number in steps)
    failed = sum(step.plan is not None and not step.is_done for step in work.told)
    assert value(samples, "giveway:failed_steps_total") == failed


# Times


def check_histogram(samples: Samples, name: str, work: Work, seconds: list[tuple[RequestId, float]]) -> None:
    assert told(samples, f"{name}_count") == by_class(work, [(each, 1.0) for each, _ in seconds])
    assert told(samples, f"{name}_sum") == pytest.approx(by_class(work, seconds))
    edges = {dict(labels)["le"] for known, labels in samples if known == f"{name}_bucket"}
    for edge in edges:
        within = by_class(work, [(each, 1.0) for each, number in seconds if number <= float(edge)])
        assert told(samples, f"{name}_bucket", le=edge) == within


def test_times_of_requests_are_those_of_their_results(finished_work: tuple[Work, Samples]) -> None:
    work, samples = finished_work
    stats = [(name, result.stats) for name, result in work.results.items()]
    queue = [(name, each.queue_s) for name, each in stats if each.queue_s is not None]
    check_histogram(samples, "vllm:request_queue_time_seconds", work, queue)
    first = [(name, each.ttft_s) for name, each in stats if each.ttft_s is not None]
    check_histogram(samples, "vllm:time_to_first_token_seconds", work, first)
    by_themselves = {
        name for name, each in work.results.items() if each.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    }
    whole = [(name, each.e2e_s) for name, each in stats if each.e2e_s is not None and name in by_themselves]
    check_histogram(samples, "vllm:e2e_request_latency_seconds", work, whole)


@pytest.mark.parametrize("name", ["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"])
def test_gaps_between_tokens_include_stalls(name: str, finished_work: tuple[Work, Samples]) -> None:
    work, samples = finished_work
    times: dict[RequestId, list[float]] = defaultdict(list)
    for event in events_of(work):
        if isinstance(event, TokenEmitted):
            times[event.request_id].append(event.time_s)
    gaps = [(each, later - one) for each, moments in times.items() for one, later in pairwise(moments)]
    check_histogram(samples, name, work, gaps)


def test_stall_seconds_are_those_between_losing_a_seat_and_sitting_again_or_ending(
    finished_work: tuple[Work, Samples],
) -> None:
    work, samples = finished_work
    lost_s: dict[RequestId, float] = {}
    stalls: list[tuple[RequestId, float]] = []
    for event in events_of(work):
        if isinstance(event, Preempted) and not event.is_again:
            lost_s[event.request_id] = event.time_s
        elif isinstance(event, Admitted | Finished) and event.request_id in lost_s:
            stalls.append((event.request_id, event.time_s - lost_s.pop(event.request_id)))
    assert told(samples, "giveway:stall_seconds_total") == pytest.approx(by_class(work, stalls))


def test_a_stall_shows_while_it_lasts() -> None:
    # Goal: an alert on a frozen stream fires before the stream goes on.
    engine = dry(num_kv_blocks=8, max_num_seqs=1, swap_space=0).engine
    metrics = ServerMetrics(engine, model_name="dry")
    engine.add_listener(metrics)
    engine.submit([1] * 5, SamplingParams(temperature=0, max_tokens=20), priority=20)
    engine.step()
    engine.submit([2] * 5, SamplingParams(temperature=0, max_tokens=20), priority=0)
    readings = []
    for _ in range(6):
        engine.step()
        readings.append(value(samples_of(metrics), "giveway:stall_seconds_total", priority_class="flex"))
    assert readings[0] == 0
    assert all(earlier < later for earlier, later in pairwise(readings))


def test_step_time_is_counted_by_part(finished_work: tuple[Work, Samples]) -> None:
    work, samples = finished_work
    num_steps = sum(step.is_done for step in work.told)
    for part in ("schedule", "forward", "copy", "other"):
        assert value(samples, "giveway:step_time_seconds_count", part=part) == num_steps
    assert total(samples, "giveway:step_time_seconds_sum") > 0


# Giving way


def test_preemptions_are_counted_by_mode_and_class_and_un_admissions_are_none(
    finished_work: tuple[Work, Samples],
) -> None:
    work, samples = finished_work
    lost = [event for event in events_of(work) if isinstance(event, Preempted) and not event.is_again]
    for mode in PreemptionMode:
        of_mode = [(event.request_id, 1.0) for event in lost if event.mode is mode]
        assert told(samples, "giveway:preemptions_total", mode=mode.value) == by_class(work, of_mode)
    ends = [event for event in events_of(work) if isinstance(event, Finished)]
    counted = [(event.request_id, event.num_preemptions) for event in ends]
    assert told(samples, "vllm:num_preemptions_total") == by_class(work, counted)
    more = [event.request_id for event in events_of(work) if isinstance(event, Preempted) and event.is_again]
    more += [event.request_id for event in events_of(work) if isinstance(event, ParkedMoved) and event.tier is None]
    assert told(samples, "giveway:further_losses_total") == by_class(work, [(name, 1.0) for name in more])


def test_causes_tell_for_whom_somebody_gave_way(finished_work: tuple[Work, Samples]) -> None:
    work, samples = finished_work
    causes: Counter[str] = Counter()
    for step in work.told:
        for event in step.events:
            if not isinstance(event, Preempted) or event.is_again:
                continue
            if event.beneficiary is None:
                deferrals = {} if step.plan is None else {each.request_id: each.reason for each in step.plan.deferrals}
                planned = step.is_done and event.request_id in deferrals
                word = "held" if planned and deferrals[event.request_id].value == "held" else "command"
                causes[word if planned else "failed_step"] += 1
            elif work.specs[event.beneficiary].priority == work.specs[event.request_id].priority:
                causes["own_class"] += 1
            else:
                assert work.specs[event.beneficiary].priority < work.specs[event.request_id].priority
                causes["more_urgent"] += 1
    found = {cause: total(samples, "giveway:preemptions_total", cause=cause) for cause in causes}
    # The beneficiary that is named is the first of several, of whom another may be of the victim's own class.
    both = ("more_urgent", "own_class")
    assert sum(found.pop(cause) for cause in both) == sum(causes.pop(cause) for cause in both)
    assert found == causes


def test_swapped_bytes_are_those_of_the_results_each_way(finished_work: tuple[Work, Samples]) -> None:
    work, samples = finished_work
    stats = [(name, result.stats) for name, result in work.results.items()]
    out, back = [(n, s.swapped_out_bytes) for n, s in stats], [(n, s.swapped_in_bytes) for n, s in stats]
    assert told(samples, "giveway:swapped_bytes_total", direction="out") == by_class(work, out)
    assert told(samples, "giveway:swapped_bytes_total", direction="in") == by_class(work, back)
    assert total(samples, "giveway:swapped_bytes_total", tier="disk") > 0
    moves = [event for event in events_of(work) if isinstance(event, ParkedMoved) and event.tier is Tier.DISK]
    assert value(samples, "giveway:moved_bytes_total") == BLOCK_BYTES * sum(event.num_blocks for event in moves)


def test_deferrals_are_counted_by_reason(finished_work: tuple[Work, Samples]) -> None:
    work, samples = finished_work
    plans = [step.plan for step in work.told if step.plan is not None and step.is_done]
    deferrals = Counter(each.reason.value for plan in plans for each in plan.deferrals)
    reasons = {dict(labels)["reason"] for name, labels in samples if name == "giveway:deferrals_total"}
    found = {reason: total(samples, "giveway:deferrals_total", reason=reason) for reason in reasons}
    assert {reason: number for reason, number in found.items() if number} == deferrals


# Gauges


PLACES = {
    RequestState.WAITING: "waiting",
    RequestState.PREEMPTED: "waiting",
    RequestState.RUNNING: "running",
    RequestState.SWAPPING_IN: "running",
    RequestState.SWAPPED: "swapped",
    RequestState.SWAPPING_OUT: "swapped",
}


def check_places(samples: Samples, work: Work) -> None:
    """Compare the gauges of requests with the states that the scheduler knows."""
    requests = work.engine.scheduler.requests.values()
    found = Counter((PLACES[request.state], class_of(work, request.request_id)) for request in requests)
    for place in ("running", "waiting", "swapped"):
        assert told(samples, f"vllm:num_requests_{place}") == {name: found[place, name] for name in NAMES}


@pytest.mark.parametrize("seed", [1, 2])
def test_gauges_and_ends_are_right_when_copies_are_late_fail_or_get_lost(seed: int) -> None:
    # Goal: requests that end, or lose their KV, while it is being copied, leave no gauge behind.
    engine = overlapped(seed)
    work = Work(engine, random.Random(seed), engine.hand_in)
    engine.add_listener(work.listen)
    metrics = metrics_of(work)
    work.run(80, lambda: None if len(work.told) % 10 else check_places(samples_of(metrics), work))
    samples = samples_of(metrics)
    assert value(samples, "giveway:failed_copies_total") > 0
    assert total(samples, "vllm:request_success_total", finished_reason="abort") > 0
    assert not sum(total(samples, f"vllm:num_requests_{place}") for place in ("running", "waiting", "swapped"))
    check_totals(samples, work)


def check_totals(samples: Samples, work: Work) -> None:
    ended = [(name, 1.0) for name in work.results]
    assert told(samples, "vllm:request_success_total") == by_class(work, ended)
    output = [(name, len(result.token_ids)) for name, result in work.results.items()]
    assert told(samples, "vllm:generation_tokens_total") == by_class(work, output)
    out = [(name, result.stats.swapped_out_bytes) for name, result in work.results.items()]
    assert told(samples, "giveway:swapped_bytes_total", direction="out") == by_class(work, out)


def test_gauges_tell_the_state_of_the_scheduler_between_steps(tmp_path: Path) -> None:
    work = busy(5, tmp_path)
    metrics = metrics_of(work)

    def check() -> None:
        if len(work.told) % 5:  # reading takes longer than the step
            return
        samples, state = samples_of(metrics), work.engine.scheduler.state
        check_places(samples, work)
        device = state.kv.device
        assert value(samples, "vllm:kv_cache_usage_perc") == device.num_owned / device.size
        assert value(samples, "vllm:gpu_cache_usage_perc") == device.num_owned / device.size
        for tier, pool in (("device", device), ("host", state.kv.host), ("disk", state.kv.disk)):
            assert value(samples, "giveway:kv_blocks", tier=tier, state="owned") == pool.num_owned
            assert value(samples, "giveway:kv_blocks", tier=tier, state="free") == pool.num_free
            assert total(samples, "giveway:kv_blocks", tier=tier) == pool.size
        assert value(samples, "giveway:num_requests_held") == len(state.held)

    work.run(60, check)


def assert_nothing_is_left(samples: Samples) -> None:
    for place in ("running", "waiting", "swapped"):
        assert not total(samples, f"vllm:num_requests_{place}")
    assert not value(samples, "vllm:kv_cache_usage_perc")
    assert not value(samples, "giveway:num_requests_held")
    assert not total(samples, "giveway:kv_blocks", state="owned")


def test_gauges_return_to_0_when_the_work_is_done(finished_work: tuple[Work, Samples]) -> None:
    assert_nothing_is_left(finished_work[1])


def test_gauges_return_to_0_after_aborts_in_every_state() -> None:
    engine = dry(num_kv_blocks=64, max_num_seqs=4, swap_space=32 * BLOCK_BYTES).engine
    metrics = ServerMetrics(engine, model_name="dry")
    engine.add_listener(metrics)
    long = SamplingParams(temperature=0, max_tokens=12)
    for name in ("swapped", "dropped", "held", "running", "waiting"):
        engine.submit([1] * 11, long, request_id=name)
    engine.step()
    engine.give_way(RequestId("swapped"), PreemptionChoice.SWAP)
    engine.give_way(RequestId("dropped"), PreemptionChoice.RECOMPUTE)
    for name in ("swapped", "dropped", "held"):
        engine.hold(RequestId(name))
    for name in ("seated", "also seated", "newest"):
        engine.submit([2] * 11, long, request_id=name)
    engine.step()
    requests = engine.scheduler.requests
    states = {request.state for request in requests.values()}
    assert states >= {RequestState.WAITING, RequestState.RUNNING, RequestState.SWAPPED, RequestState.PREEMPTED}
    samples = samples_of(metrics)
    assert (total(samples, "vllm:num_requests_swapped"), value(samples, "giveway:num_requests_held")) == (2, 3)
    for name in (*requests, engine.submit([1], long)):  # the last one is taken back before any step has seen it
        engine.abort(name)
    engine.step()
    samples = samples_of(metrics)
    assert_nothing_is_left(samples)
    assert total(samples, "vllm:request_success_total", finished_reason="abort") == 9


def test_a_listener_that_comes_late_tells_the_state_as_it_is() -> None:
    engine = dry(max_num_seqs=1).engine
    for _ in range(3):
        engine.submit([1, 2], SamplingParams(temperature=0, max_tokens=8))
    engine.step()
    metrics = ServerMetrics(engine, model_name="dry")
    engine.add_listener(metrics)
    engine.step()
    samples = samples_of(metrics)
    found = [total(samples, f"vllm:num_requests_{place}") for place in ("running", "waiting", "swapped")]
    assert found == [1, 2, 0]
    while engine.has_work:
        engine.step()
    assert_nothing_is_left(samples_of(metrics))


# Other models, other threads


def test_a_real_model_is_counted_like_the_dry_run() -> None:
    engine = dry(model="tiny", device="cpu", num_kv_blocks=24, max_num_seqs=6, swap_space=1 << 20).engine
    work = Work(engine, random.Random(3), engine.hand_in)
    engine.add_listener(work.listen)
    metrics = metrics_of(work)
    work.run(40)
    samples = samples_of(metrics)
    check_totals(samples, work)
    assert_nothing_is_left(samples)
    assert total(samples, "vllm:num_preemptions_total") > 0
    prompts = [(name, len(result.prompt_token_ids)) for name, result in work.results.items() if result.token_ids]
    assert told(samples, "vllm:prompt_tokens_total") == by_class(work, prompts)


def test_a_scrape_never_sees_half_a_step(tmp_path: Path) -> None:
    # Goal: numbers that belong together agree, although another thread is counting.
    work = busy(6, tmp_path)
    metrics = metrics_of(work)
    thread = threading.Thread(target=work.run, args=(60,))
    thread.start()
    num_scrapes = 0
    while thread.is_alive() or not num_scrapes:
        samples = samples_of(metrics)
        num_scrapes += 1
        tokens = told(samples, "vllm:generation_tokens_total")
        first = told(samples, "vllm:time_to_first_token_seconds_count")
        later = told(samples, "vllm:inter_token_latency_seconds_count")
        assert tokens == {name: first[name] + later[name] for name in NAMES}
        assert value(samples, "giveway:computed_tokens_total") == value(samples, "vllm:iteration_tokens_total_sum")
    thread.join()
    assert_nothing_is_left(samples_of(metrics))


# HTTP


def test_responses_are_counted_by_route_and_status_and_strangers_make_no_series() -> None:
    # Goal: a client who walks through paths or provokes odd statuses cannot fill the memory.
    metrics = ServerMetrics(dry().engine, model_name="dry", routes=("/v1/completions", "/v1/files/{file_id}"))
    before = samples_of(metrics).keys()
    for route, status in [("/v1/completions", 200), ("/v1/completions", 200), ("/v1/files/{file_id}", 404)]:
        metrics.count_answer(route, status)
    for number in range(50):
        metrics.count_answer(f"/secret/{number}", 200)
        metrics.count_answer("/v1/completions", 430 + number)
    metrics.count_answer("none", 0)
    metrics.count_answer("none", 9999)
    metrics.count_disconnect("flex")
    samples = samples_of(metrics)
    assert {key for key in samples if not key[0].startswith(("process", "python"))} <= before
    name = "giveway:http_responses_total"
    assert value(samples, name, route="/v1/completions", status="200") == 2
    assert value(samples, name, route="/v1/completions", status="4xx") == 50
    assert value(samples, name, route="/v1/files/{file_id}", status="404") == 1
    assert value(samples, name, route="other", status="200") == 50
    assert total(samples, name, route="other") == 52
    assert value(samples, "giveway:client_disconnects_total", priority_class="flex") == 1


def test_metrics_of_the_process_are_there_too() -> None:
    metrics = ServerMetrics(dry().engine, model_name="dry")
    names = {name for name, _ in samples_of(metrics)}
    assert {"process_resident_memory_bytes", "python_gc_collections_total", "python_info"} <= names
    assert metrics.content_type.startswith("text/plain; version=")
