"""The demo's workloads and runs, apart from any display."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from giveway.build import Model, load_model
from giveway.core.plan import PreemptionMode
from giveway.demo.report import Row, closing_sentence, make_row
from giveway.demo.run import SCENARIOS, RunResult, count_equal, run_scenario, run_undisturbed
from giveway.demo.view import PoolView, Story, look
from giveway.demo.workload import Workload, urgent_among_background, write_up
from giveway.options import EngineOptions

DRY = EngineOptions(device="dry", check_invariants=True)
# Blocks of all sizes, which PyTorch takes.
TINY = EngineOptions(model="tiny", device="cpu", backend="torch", exact=True, check_invariants=True)
BY_POLICY = {scenario.policy: scenario for scenario in SCENARIOS}


@pytest.fixture(scope="module", params=[DRY, TINY], ids=["dry", "tiny"])
def options(request: pytest.FixtureRequest) -> EngineOptions:
    assert isinstance(request.param, EngineOptions)
    return request.param


@pytest.fixture(scope="module")
def model(options: EngineOptions) -> Iterator[Model]:
    # One thread: two of them wait for each other on a busy machine, for work as small as this.
    num_threads = torch.get_num_threads()
    model = load_model(options)
    torch.set_num_threads(1)
    yield model
    model.backend.close()
    torch.set_num_threads(num_threads)


def run_all(model: Model, options: EngineOptions, workload: Workload) -> tuple[RunResult, dict[str, RunResult]]:
    reference = run_undisturbed(model, options, workload)
    return reference, {name: run_scenario(model, options, workload, scenario) for name, scenario in BY_POLICY.items()}


def test_urgent_questions_among_background_work(model: Model, options: EngineOptions) -> None:
    workload = urgent_among_background(model, num_background_tokens=24)
    reference, results = run_all(model, options, workload)
    assert len(reference.answers) == len(workload.requests) == 11
    assert not reference.tally.preemptions
    assert results["none"].error is not None
    assert results["none"].error.startswith("KV cache full: used ")
    assert len(results["none"].answers) < 11
    for name in ("fcfs", "priority-recompute", "priority-swap"):
        assert count_equal(results[name], reference) == 11
        assert results[name].error is None
    by_mode = {name: result.tally.preemptions for name, result in results.items()}
    assert by_mode["priority-recompute"][PreemptionMode.RECOMPUTE] > 0
    assert by_mode["priority-recompute"][PreemptionMode.SWAP] == 0
    assert by_mode["priority-swap"][PreemptionMode.SWAP] > 0
    assert results["priority-recompute"].tally.num_recomputed_tokens > 0
    assert results["priority-recompute"].tally.swapped_bytes == 0
    assert results["priority-swap"].tally.swapped_bytes > 0
    assert results["priority-swap"].tally.num_recomputed_tokens == 0


def test_the_write_up_without_preemption_fails_and_with_it_all_eight_finish(
    model: Model, options: EngineOptions
) -> None:
    workload = write_up(model)
    assert [len(request.token_ids) for request in workload.requests] == [5] * 8
    assert (workload.block_size, workload.num_blocks) == (1, 20)
    reference, results = run_all(model, options, workload)
    assert str(results["none"].error).startswith("KV cache full: used 20 of 20 slots")
    for name in ("fcfs", "priority-recompute", "priority-swap"):
        assert count_equal(results[name], reference) == 8
        assert results[name].tally.preemptions.total() > 0
        assert [len(answer.token_ids) for answer in results[name].answers.values()] == [8] * 8


def test_urgent_questions_wait_for_nobody_when_there_are_priorities() -> None:
    # Goal: counted in steps, so that the machine's speed is no matter. With priorities, each question gets a token in
    # the step after it was handed in; in order of arrival it waits for somebody to finish.
    model = load_model(DRY)
    workload = urgent_among_background(model)

    def steps_waited(policy: str) -> list[int]:
        waited = dict.fromkeys((r.name for r in workload.requests if r.is_urgent), 0)

        def watch(scheduler: object, plan: object, events: object) -> None:
            view = look(scheduler)  # type: ignore[arg-type]
            for name in view.waiting:
                if name in waited:
                    waited[name] += 1

        run_scenario(model, DRY, workload, BY_POLICY[policy], watch)
        return list(waited.values())

    assert steps_waited("priority-swap") == steps_waited("priority-recompute") == [0, 0, 0]
    assert max(steps_waited("fcfs")) > 5


def test_requests_arrive_by_progress_of_the_background_not_by_time() -> None:
    model = load_model(DRY)
    workload = urgent_among_background(model)
    arrivals = [request.after_tokens for request in workload.requests if request.is_urgent]
    assert arrivals == sorted(set(arrivals))
    assert arrivals[0] > 0
    assert arrivals[-1] < 8 * 48


def test_a_changed_answer_is_seen() -> None:
    # Goal: "answers equal" is computed, not assumed.
    model = load_model(DRY)
    workload = write_up(model)
    reference = run_undisturbed(model, DRY, workload)
    result = run_scenario(model, DRY, workload, BY_POLICY["fcfs"])
    answer = result.answers["delta"]
    for changed in (
        replace(answer, token_ids=(*answer.token_ids[:-1], answer.token_ids[-1] + 1)),
        replace(answer, token_ids=answer.token_ids[:-1]),
    ):
        row = make_row(replace(result, answers={**result.answers, "delta": changed}), reference)
        assert (row.finished, row.answers_equal) == (8, 7)
        assert not row.is_as_promised
        assert "1 answers differ from the undisturbed run, which is a fault" in closing_sentence([row])


def test_an_unfinished_run_is_a_fault_unless_the_policy_is_the_control() -> None:
    model = load_model(DRY)
    workload = write_up(model)
    reference = run_undisturbed(model, DRY, workload)
    lost = run_scenario(model, DRY, workload, BY_POLICY["none"])
    row = make_row(lost, reference)
    assert row.is_as_promised
    assert (row.urgent_ttft_p50_s, row.urgent_ttft_max_s, row.background_tok_s) == (None, None, None)
    same_elsewhere = replace(row, policy="fcfs", must_finish=True)
    assert not same_elsewhere.is_as_promised
    assert "which is a fault" in closing_sentence([row, same_elsewhere])


def test_the_picture_shows_who_owns_what_and_who_waits() -> None:
    model = load_model(DRY)
    workload = urgent_among_background(model)
    story, views = Story(6), list[PoolView]()

    def watch(scheduler: object, plan: object, events: object) -> None:
        story.add(0, events)  # type: ignore[arg-type]
        views.append(look(scheduler))  # type: ignore[arg-type]

    run_scenario(model, DRY, workload, BY_POLICY["priority-swap"], watch)
    assert any(view.swapped and view.num_host_blocks_used for view in views)
    assert any("urgent-1" in view.running for view in views)
    for view in views:
        assert {owner for owner in view.owners if owner is not None} <= set(view.running)
        assert len(view.owners) == workload.num_blocks
    assert story.num_finished == 11
    assert story.preemptions[PreemptionMode.SWAP] > 0
    assert len(story.lines) == 6


def test_a_row_without_waiting_people_says_nothing_of_them() -> None:
    model = load_model(DRY)
    workload = write_up(model)
    reference = run_undisturbed(model, DRY, workload)
    rows: list[Row] = [make_row(run_scenario(model, DRY, workload, s), reference) for s in SCENARIOS]
    sentence = closing_sentence(rows)
    assert sentence == (
        "Without preemption the pool ran full and 8 of 8 requests were lost; with it every run finished all 8; every "
        "answer is token for token that of the undisturbed run."
    )
