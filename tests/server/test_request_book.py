"""What became of each request, against the scheduler's own state and against the trace of every decision."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.errors import InvalidRequestError
from giveway.core.events import StepEvent
from giveway.core.ids import RequestId
from giveway.core.plan import StepPlan
from giveway.core.request import NEWCOMER_STATES
from giveway.core.sampling import SamplingParams
from giveway.engine.async_engine import AsyncEngine
from giveway.engine.engine import Engine, Listener
from giveway.engine.intake import Submission
from giveway.engine.trace import read_trace
from giveway.server.metrics import ServerMetrics
from giveway.server.request_book import RequestBook
from giveway.server.request_record import MAX_PREEMPTIONS
from giveway.server.request_story import MAX_TOLD
from tests.server.busy_engine import BLOCK_BYTES, Work, busy, dry, overlapped

ME = "me"
SHORT = SamplingParams(temperature=0, max_tokens=4)
LONG = SamplingParams(temperature=0, max_tokens=24)


def book_of(engine: Engine, **settings: Any) -> RequestBook:
    book = RequestBook(engine, **settings)
    engine.add_listener(book)
    return book


def api_id_of(submission: Submission) -> str:
    return f"api-{submission.request_id}"


def registering(book: RequestBook, engine: Engine) -> Callable[[Submission], RequestId]:
    """Hand requests in as a server does, each as an API request of its own."""

    def hand_in(submission: Submission) -> RequestId:
        book.register(api_id_of(submission), submission.request_ids, ME, None)
        return engine.hand_in(submission)

    return hand_in


def submit(engine: Engine, book: RequestBook, api_id: str, prompt: Sequence[int], **settings: Any) -> RequestId:
    sampling = settings.pop("sampling", LONG)
    submission = engine.prepare(prompt, sampling, request_id=f"engine-{api_id}", **settings)
    book.register(api_id, submission.request_ids, settings.pop("owner", ME), None)
    return engine.hand_in(submission)


def told(book: RequestBook, api_id: str, index: int = 0) -> dict[str, Any]:
    """Return what is told of one answer; it must be JSON."""
    described = book.describe(api_id, ME)
    assert described is not None, api_id
    json.dumps(described, allow_nan=False)
    answer: dict[str, Any] = described["answers"][index]
    return answer


def answers_of(book: RequestBook, work: Work) -> dict[RequestId, dict[str, Any]]:
    """Return what is told of every answer that any step has seen."""
    found = {}
    for name, spec in work.specs.items():
        described = book.describe(f"api-{spec.branch_of or name}", ME)
        assert described is not None
        place = 0 if name == (spec.branch_of or name) else int(name.rpartition("/")[2])
        found[name] = described["answers"][place]
    return found


# Random work


def test_what_is_told_of_ended_requests_is_what_their_results_say(tmp_path: Path) -> None:
    work = busy(1, tmp_path)
    book = book_of(work.engine)
    work.hand_in = registering(book, work.engine)
    work.run(150)
    answers = answers_of(book, work)
    assert len(answers) == len(work.results) > 40
    for name, result in work.results.items():
        answer, stats = answers[name], result.stats
        assert answer["state"] == "finished"
        assert answer["finish_reason"] == result.finish_reason.value
        assert answer["prompt_tokens"] == len(result.prompt_token_ids)
        assert answer["output_tokens"] == len(result.token_ids)
        for key, seconds in (("queue_s", stats.queue_s), ("ttft_s", stats.ttft_s), ("age_s", stats.e2e_s)):
            assert answer[key] == (None if seconds is None else pytest.approx(seconds, abs=1e-5)), key
        assert answer["cached_tokens"] == stats.num_cached_tokens
        assert answer["recomputed_tokens"] == stats.num_recomputed_tokens
        assert (answer["swapped_out_bytes"], answer["swapped_in_bytes"]) == (
            stats.swapped_out_bytes,
            stats.swapped_in_bytes,
        )
        assert answer["num_preemptions"] == {mode.value: count for mode, count in stats.preemptions.items()}
        assert len(answer["preemptions"]) == min(sum(stats.preemptions.values()), MAX_PREEMPTIONS)
        assert sum(answer["waited_s"].values()) <= answer["age_s"] + 1e-4
        assert answer["waits_for"] is None
        assert answer["queue_position"] is None


def check_states(book: RequestBook, work: Work) -> None:
    state = work.engine.scheduler.state
    ranks = [request.rank for request in state.newcomers]
    for name, answer in answers_of(book, work).items():
        request = state.requests.get(name)
        assert answer["state"] == ("finished" if request is None else request.state.name.lower())
        if request is not None:
            assert answer["output_tokens"] == len(request.output_token_ids)
            assert answer["is_held"] == (name in state.held)
            better = sum(rank < request.rank for rank in ranks)
            assert answer["queue_position"] == (better if request.state in NEWCOMER_STATES else None)
            assert (answer["waits_for"] is not None) >= (request.state in NEWCOMER_STATES), "it waits, for no reason"


def test_states_and_places_in_the_queue_are_those_of_the_scheduler(tmp_path: Path) -> None:
    work = busy(2, tmp_path)
    book = book_of(work.engine)
    work.hand_in = registering(book, work.engine)
    work.run(60, lambda: None if len(work.told) % 4 else check_states(book, work))


def test_states_are_right_also_while_copies_are_under_way() -> None:
    engine = overlapped(3)
    work = Work(engine, random.Random(3), engine.hand_in)
    engine.add_listener(work.listen)
    book = book_of(engine)
    work.hand_in = registering(book, engine)
    seen: set[str] = set()

    def check() -> None:
        check_states(book, work)
        seen.update(answer["state"] for answer in answers_of(book, work).values())

    work.run(40, check)
    assert seen >= {"swapping_in", "swapping_out", "swapped", "running", "waiting", "finished"}


def test_reasons_are_those_that_the_trace_gives_for_the_same_steps(tmp_path: Path) -> None:
    # Goal: who asks while it happens and who reads the trace later are told the same.
    compared = {reason for seed in (4, 5, 6) for reason in compare_with_trace(seed, tmp_path)}
    assert compared >= {None, "no_device_blocks", "no_tokens", "preempted", "gives_way", "held", "step_failed"}


def compare_with_trace(seed: int, directory: Path) -> set[str | None]:
    """Return the reasons that were compared."""
    work = busy(seed, directory, trace=str(directory / "trace.jsonl"))
    book = book_of(work.engine)
    work.hand_in = registering(book, work.engine)
    reasons: dict[RequestId, dict[int, str | None]] = defaultdict(dict)

    def note() -> None:
        plan = work.told[-1].plan
        if plan is not None:
            for name, answer in answers_of(book, work).items():
                if answer["state"] != "finished":
                    reasons[name][plan.step_id] = None if answer["waits_for"] is None else answer["waits_for"]["reason"]

    work.run(60, note)
    work.engine.close()
    trace = read_trace(directory / "trace.jsonl")
    compared = set[str | None]()
    for name, by_step in reasons.items():
        expected: dict[int, str] = {}
        for span in trace.explain(name):
            expected.update(dict.fromkeys(range(span.first_step, span.last_step + 1), span.reason.value))
        for step_id, reason in by_step.items():
            # Whoever stands behind another is not looked at again while a failed step is repeated in parts.
            found, wanted = (
                "behind_deferred" if each == "fault_isolation" else each for each in (reason, expected.get(step_id))
            )
            assert found == wanted, (name, step_id)
            compared.add(reason)
    return compared


# One story


def test_whoever_stands_behind_another_is_told_what_the_first_in_the_queue_waits_for() -> None:
    engine = dry(num_kv_blocks=12, max_num_seqs=1).engine
    book = book_of(engine)
    for name in ("seated", "first", "second"):
        submit(engine, book, name, [1] * 8)
    engine.step()
    first, second = told(book, "first"), told(book, "second")
    assert (first["waits_for"]["reason"], first["waits_for"]["behind"]) == ("no_seat", None)
    assert second["waits_for"]["reason"] == "behind_deferred"
    assert second["waits_for"]["behind"]["reason"] == "no_seat"
    assert "The first in the queue waits because of this: every seat is taken" in " ".join(second["explanation"])


def test_a_victim_is_told_for_which_class_it_gave_way_what_and_at_which_price() -> None:
    engine = dry(num_kv_blocks=12, max_num_seqs=4, swap_space=64 * BLOCK_BYTES).engine
    book = book_of(engine)
    submit(engine, book, "essay", [1] * 24, priority=20)
    for _ in range(5):
        engine.step()
    submit(engine, book, "question", [2] * 28, priority=0, sampling=SHORT)
    engine.step()
    answer = told(book, "essay")
    (loss,) = answer["preemptions"]
    assert (loss["cause"], loss["mode"], loss["tier"]) == ("more_urgent", "swap", "host")
    assert loss["beneficiary_class"] == {"number": 0, "name": "priority"}
    assert loss["blocks"] > 0
    assert loss["price_ms"]["host"] < loss["price_ms"]["recompute"]
    assert loss["price_ms"]["disk"] is None
    assert answer["class"] == {"number": 20, "name": "flex"}
    assert answer["waits_for"]["reason"] == "preempted"
    engine.step()
    answer = told(book, "essay")
    assert answer["waits_for"]["reason"] == "no_device_blocks"
    assert answer["waits_for"]["lacking_blocks"] > 0
    assert answer["queue_position"] == 0
    text = " ".join(answer["explanation"])
    assert "It gave way once (swap 1), last for a request of class priority: swap to host" in text
    assert "instead of recompute" in text
    assert "no room in the pool, and nobody whom it may displace would free enough; blocks lacking: " in text
    assert "question" not in json.dumps(book.describe("essay", ME)), "the id of another request is not shown"
    while engine.has_work:
        engine.step()
    answer = told(book, "essay")
    assert "It ended (length) after 24 tokens." in answer["explanation"]
    assert set(answer["waited_s"]) >= {"preempted", "no_device_blocks"}


@pytest.mark.parametrize(
    ("disturb", "cause", "sentence"),
    [
        (lambda engine, name: engine.give_way(name, PreemptionChoice.RECOMPUTE), "command", "by command"),
        (lambda engine, name: engine.hold(name), "held", "because its reader is too slow"),
    ],
)
def test_who_gives_way_for_nobody_is_told_why(
    disturb: Callable[[Engine, RequestId], None], cause: str, sentence: str
) -> None:
    engine = dry().engine
    book = book_of(engine)
    name = submit(engine, book, "a", [1] * 9)
    engine.step()
    disturb(engine, name)
    engine.step()
    answer = told(book, "a")
    assert (answer["preemptions"][0]["cause"], answer["preemptions"][0]["beneficiary_class"]) == (cause, None)
    assert any(sentence in each for each in answer["explanation"])


def test_a_held_request_grows_older_although_no_step_is_made() -> None:
    engine = dry().engine
    book = book_of(engine)
    name = submit(engine, book, "a", [1])
    engine.hold(name)
    engine.step()
    first = told(book, "a")
    for _ in range(100):
        engine.clock.now()
    later = told(book, "a")
    assert first["waits_for"]["reason"] == later["waits_for"]["reason"] == "held"
    assert later["age_s"] >= first["age_s"] + 0.1
    assert later["waits_for"]["for_s"] >= first["waits_for"]["for_s"] + 0.1


def test_only_the_newest_preemptions_are_listed_and_all_are_counted() -> None:
    engine = dry().engine
    book = book_of(engine)
    name = submit(engine, book, "a", [1] * 9, sampling=SamplingParams(temperature=0, max_tokens=200))
    for _ in range(50):
        engine.step()
        engine.give_way(name)
        engine.step()
    answer = told(book, "a")
    assert sum(answer["num_preemptions"].values()) == 50
    assert len(answer["preemptions"]) == MAX_PREEMPTIONS
    moments = [loss["at_s"] for loss in answer["preemptions"]]
    assert moments == sorted(moments)


def test_several_prompts_with_several_answers_are_one_request() -> None:
    engine = dry(max_num_seqs=2).engine
    book = book_of(engine)
    two = SamplingParams(temperature=0, max_tokens=8, n=2)
    submissions = [engine.prepare([number] * 5, two, request_id=f"x.{number}") for number in (1, 2)]
    book.register("x", [name for each in submissions for name in each.request_ids], ME, "mine")
    described = book.describe("x", ME)
    assert described is not None
    assert (described["state"], described["num_answers"]) == ("arriving", 4)
    for each in submissions:
        engine.hand_in(each)
    engine.step()
    described = book.describe("mine", ME)
    assert described is not None
    assert (described["id"], described["alias"], described["state"]) == ("x", "mine", "running")
    assert [answer["index"] for answer in described["answers"]] == [0, 1, 2, 3]
    assert {answer["state"] for answer in described["answers"]} == {"running", "waiting"}
    assert "Answer 3: " in described["explanation"]
    engine.abort(RequestId("x.1"))
    while engine.has_work:
        engine.step()
    described = book.describe("x", ME)
    assert described is not None
    assert described["state"] == "finished"
    assert [answer["finish_reason"] for answer in described["answers"]] == ["abort", "abort", "length", "length"]


def test_of_very_many_answers_the_first_are_told() -> None:
    # Goal: a question takes the engine's time between two steps, and must not take much of it.
    engine = dry().engine
    book = book_of(engine)
    book.register("x", [RequestId(f"x.{number}") for number in range(5000)], ME, None)
    described = book.describe("x", ME)
    assert described is not None
    assert (described["num_answers"], len(described["answers"])) == (5000, MAX_TOLD)


# Who may ask


def test_a_stranger_is_told_nothing_not_even_that_the_request_exists() -> None:
    engine = dry().engine
    book = book_of(engine)
    book.register("chatcmpl-1", [RequestId("chatcmpl-1")], ME, "job")
    assert book.describe("chatcmpl-1", "somebody else") is None
    assert book.describe("job", "somebody else") is None
    assert book.describe("chatcmpl-2", ME) is None
    assert book.describe("job", ME) is not None


def test_two_owners_may_use_one_alias_and_an_alias_hides_nobodys_request() -> None:
    engine = dry().engine
    book = book_of(engine)
    book.register("a", [RequestId("a")], ME, "job")
    book.register("b", [RequestId("b")], "other", "job")
    book.register("c", [RequestId("c")], "other", "a")  # named as another's id

    def found(name: str, owner: str) -> str | None:
        described = book.describe(name, owner)
        return None if described is None else described["id"]

    assert (found("job", ME), found("job", "other")) == ("a", "b")
    assert (found("a", ME), found("a", "other")) == ("a", "c")
    book.register("d", [RequestId("d")], ME, "job")
    assert found("job", ME) == "d", "the newest that bears the name"
    book.withdraw("a")
    assert (found("a", ME), found("job", ME)) == (None, "d")


def test_an_id_in_use_is_refused_and_one_that_has_ended_may_be_used_again() -> None:
    engine = dry().engine
    book = book_of(engine)
    submit(engine, book, "a", [1], sampling=SHORT)
    with pytest.raises(InvalidRequestError, match="already in use"):
        book.register("a", [RequestId("other")], ME, None)
    with pytest.raises(InvalidRequestError, match="already in use"):
        book.register("b", [RequestId("new"), RequestId("engine-a")], ME, None)
    assert book.describe("b", ME) is None
    while engine.has_work:
        engine.step()
    assert told(book, "a")["finish_reason"] == "length"
    submit(engine, book, "a", [1], sampling=SHORT)
    assert told(book, "a")["state"] == "arriving"
    engine.step()
    assert told(book, "a")["state"] == "running"


def test_requests_that_nobody_registered_are_let_be() -> None:
    engine = dry(num_kv_blocks=10).engine
    book = book_of(engine)
    for priority in (20, 0):
        engine.submit([priority] * 12, LONG, priority=priority)
    submit(engine, book, "a", [3] * 12, priority=10)
    while engine.has_work:
        engine.step()
    assert told(book, "a")["state"] == "finished"


def test_a_request_taken_back_before_any_step_saw_it_has_ended() -> None:
    engine = dry().engine
    book = book_of(engine)
    engine.abort(submit(engine, book, "a", [1]))
    engine.step()
    answer = told(book, "a")
    assert (answer["state"], answer["finish_reason"], answer["queue_s"]) == ("finished", "abort", None)


# Bounds


def held_by(book: RequestBook) -> list[int]:
    return [len(each) for each in (book._entries, book._aliases, book._entry_of, book._finished, book._told)]


def test_of_those_that_ended_only_the_latest_are_remembered() -> None:
    engine = dry().engine
    book = book_of(engine, max_finished=10)
    for number in range(100):
        submission = engine.prepare([1], SHORT, request_id=f"r{number}")
        book.register(f"api-{number}", submission.request_ids, ME, f"alias-{number}")
        engine.hand_in(submission)
        while engine.has_work:
            engine.step()
    assert book.describe("api-89", ME) is book.describe("alias-89", ME) is None
    assert told(book, "api-90")["state"] == told(book, "alias-99")["state"] == "finished"
    assert held_by(book) == [10, 10, 0, 10, 0]


def test_what_is_withdrawn_leaves_nothing_behind() -> None:
    engine = dry().engine
    book = book_of(engine)
    book.register("a", [RequestId("a"), RequestId("a/1")], ME, "alias")
    book.withdraw("a")
    book.withdraw("never registered")
    assert held_by(book) == [0] * 5
    assert book.describe("a", ME) is None


def test_a_giant_among_the_ended_makes_room_by_forgetting_many() -> None:
    engine = dry().engine
    book = book_of(engine)
    for number in range(3):
        submission = engine.prepare([1], SamplingParams(max_tokens=1, n=100), request_id=f"r{number}")
        book.register(f"api-{number}", submission.request_ids, ME, None)
        engine.hand_in(submission)
    while engine.has_work:
        engine.step()
    assert len(book._finished) == 3
    assert book._num_finished_answers == 300


def calls_made(listener: Listener, plan: StepPlan | None, events: Sequence[StepEvent]) -> int:
    """Count the Python functions that a listener calls for one step."""
    count = 0

    def profile(_: FrameType, what: str, __: object) -> None:
        nonlocal count
        count += what == "call"

    sys.setprofile(profile)
    try:
        listener(plan, events)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kind", ["metrics", "book"])
def test_a_step_costs_no_more_with_ten_thousand_waiting(kind: str) -> None:
    # Goal: counted, not timed: the listeners are in the way of every token.
    costs = {}
    for num_waiting in (200, 10_000):
        engine = dry(check_invariants=False, max_num_seqs=8).engine
        book = RequestBook(engine)
        listener: Listener = book if kind == "book" else ServerMetrics(engine, model_name="dry")
        counted: list[int] = []
        engine.add_listener(lambda plan, events: counted.append(calls_made(listener, plan, events)))  # noqa: B023
        for number in range(num_waiting):
            submission = engine.prepare([number % 256], LONG, request_id=f"r{number}")
            book.register(f"api-{number}", submission.request_ids, ME, None)
            engine.hand_in(submission)
        for _ in range(12):
            engine.step()
        costs[num_waiting] = counted[-1]
    assert costs[10_000] == costs[200]


def test_a_question_is_answered_between_two_steps_of_a_running_server() -> None:
    async def main() -> None:
        engine = dry(max_num_seqs=1).engine
        book = book_of(engine)
        async with AsyncEngine(engine) as serving:
            streams = []
            for number in range(3):
                submission = engine.prepare([number], SamplingParams(temperature=0, max_tokens=4000))
                book.register(f"api-{number}", submission.request_ids, ME, None)
                streams.append(serving.open(submission))
            await streams[0].next()
            described = await serving.ask(lambda _: book.describe("api-2", ME))
            assert described is not None
            assert described["state"] == "waiting"
            assert described["answers"][0]["queue_position"] == 1
            for stream in streams:
                stream.close()
        assert told(book, "api-2")["state"] in ("finished", "waiting")  # also when the engine has stopped

    asyncio.run(main())
