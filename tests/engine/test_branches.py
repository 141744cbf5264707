"""Several answers to one prompt: each is what it would be alone, and all are one request to whoever asked."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from giveway.build import BuiltEngine, build_engine
from giveway.core.errors import InvalidRequestError, RequestTooLargeError
from giveway.core.ids import RequestId
from giveway.core.plan import PreemptionMode
from giveway.core.request import FinishReason
from giveway.core.sampling import MAX_N, SamplingParams
from giveway.engine.clock import StepClock
from giveway.engine.intake import MAX_CACHE_SALT_CHARS, branch_id, branch_seed
from giveway.engine.outputs import RequestOutput, RequestUpdate
from giveway.llm import LLM
from giveway.options import EngineOptions

PROMPT = [5, 6, 7, 8, 9]


def dry(**options: Any) -> BuiltEngine:
    return build_engine(EngineOptions(**{"device": "dry", "check_invariants": True, "seed": 1, **options}), StepClock())


def wishes(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": 12, **fields})


def drain(built: BuiltEngine) -> list[RequestUpdate]:
    updates: list[RequestUpdate] = []
    for _ in range(2000):
        if not built.engine.has_work:
            return updates
        updates += built.engine.step()
    raise AssertionError("still busy")


def wholes(updates: list[RequestUpdate]) -> dict[str, RequestOutput]:
    return {update.submission_id: update.whole for update in updates if update.whole is not None}


def said(output: RequestOutput) -> tuple[Any, ...]:
    """Everything that a caller sees of an answer but its name and its times."""
    return output.text, output.token_ids, output.finish_reason, output.stop, output.logprobs


# What the answers are


@pytest.mark.parametrize("model", [{"device": "dry"}, {"model": "tiny", "device": "cpu", "num_kv_blocks": 64}])
def test_three_branches_are_three_separate_requests_with_the_derived_seeds(model: dict[str, Any]) -> None:
    with LLM(**model) as llm:
        (together,) = llm.generate([PROMPT], wishes(n=3, logprobs=2))
        seeds = [branch_seed(7, index) for index in range(3)]
        apart = llm.generate([PROMPT] * 3, [wishes(seed=seed, logprobs=2) for seed in seeds])
    assert [said(choice) for choice in together.choices] == [said(answer) for answer in apart]
    assert len({choice.token_ids for choice in together.choices}) == 3


def test_more_branches_change_no_branch_nor_a_later_request_also_when_the_seed_is_drawn() -> None:
    def run(n: int) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        llm = LLM(device="dry", seed=5)
        (first,) = llm.generate([PROMPT], wishes(seed=None, n=n))
        (later,) = llm.generate([PROMPT], wishes(seed=None))
        return [choice.token_ids for choice in first.choices], later.token_ids

    one, two, five = run(1), run(2), run(5)
    assert one[0] == five[0][:1]
    assert two[0] == five[0][:2]
    assert one[1] == two[1] == five[1]


def test_seeds_of_branches_never_change_and_do_not_meet_those_of_neighbours() -> None:
    # Goal: an answer of today can be had again with a later version.
    assert branch_seed(7, 0) == 7
    assert branch_seed(7, 1) == 9053793261304975173
    assert branch_seed(2**64 - 1, 127) < 2**64
    assert len({branch_seed(seed, index) for seed in range(50) for index in range(128)}) == 50 * 128


def test_three_greedy_answers_are_equal() -> None:
    (output,) = LLM(device="dry").generate([PROMPT], wishes(temperature=0, seed=None, n=3))
    assert len(output.choices) == 3
    assert len({said(choice) for choice in output.choices}) == 1


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_more_branches_than_seats_with_others_who_are_more_urgent_change_no_answer(mode: str) -> None:
    (calm,) = LLM(device="dry").generate([PROMPT], wishes(n=7, max_tokens=30))
    llm = LLM(
        device="dry",
        max_num_seqs=3,
        num_kv_blocks=20,
        block_size=4,
        swap_space="1MiB",
        preemption_mode=mode,
        check_invariants=True,
    )
    urgent = llm.engine.prepare([3] * 20, wishes(n=2, max_tokens=40), priority=0)

    arrived: list[str] = []

    def arrive(*_: object) -> None:
        if llm.engine.num_unfinished == 6 and not arrived:  # a branch has ended, others run
            arrived.append(llm.engine.hand_in(urgent))

    llm.engine.add_listener(arrive)
    (tight,) = llm.generate([PROMPT], wishes(n=7, max_tokens=30), priorities=[20])
    assert [said(choice) for choice in tight.choices] == [said(choice) for choice in calm.choices]
    taken = {PreemptionMode.SWAP, PreemptionMode.RECOMPUTE}
    assert any(taken & set(choice.stats.preemptions) for choice in tight.choices)


def test_a_stop_string_ends_the_branch_that_says_it_and_no_other() -> None:
    llm = LLM(device="dry")
    (whole,) = llm.generate([PROMPT], wishes(n=3, max_tokens=24))
    texts = [choice.text for choice in whole.choices]
    stop = next(mark for mark in texts[1] if mark.isascii() and mark not in texts[0])
    (cut,) = llm.generate([PROMPT], wishes(n=3, max_tokens=24, stop=(stop,)))
    assert cut.text == texts[0]
    assert cut.finish_reason is FinishReason.LENGTH
    assert (cut.choices[1].finish_reason, cut.choices[1].stop) == (FinishReason.STOP, stop)
    assert cut.choices[1].text == texts[1][: texts[1].index(stop)]
    assert len(cut.token_ids) == 24 > len(cut.choices[1].token_ids)


def test_log_probabilities_of_the_prompt_are_asked_for_once() -> None:
    llm = LLM(device="dry")
    (alone,) = llm.generate([PROMPT], wishes(prompt_logprobs=1))
    (output,) = llm.generate([PROMPT], wishes(prompt_logprobs=1, n=3))
    assert output.prompt_logprobs == alone.prompt_logprobs
    assert [choice.prompt_logprobs for choice in output.others] == [None, None]


def test_an_answer_alone_is_its_only_choice_and_several_do_not_hold_themselves() -> None:
    llm = LLM(device="dry")
    alone, several = llm.generate([PROMPT] * 2, [wishes(), wishes(n=3)])
    assert alone.choices == (alone,)
    assert several.choices[0] is several
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert [len(choice.choices) for choice in several.others] == [1, 1]
    assert repr(several).count("RequestOutput(") == 3


# Names, and what is told of each branch


def test_every_branch_has_its_own_name_and_index_and_knows_the_first() -> None:
    built = dry()
    name = built.engine.submit(PROMPT, wishes(n=3), request_id="a")
    other = built.engine.submit(PROMPT, wishes())
    updates = drain(built)
    assert {(u.request_id, u.index, u.branch_of, u.submission_id) for u in updates} == {
        ("a", 0, "a", "a"),
        ("a/1", 1, "a", "a"),
        ("a/2", 2, "a", "a"),
        (other, 0, None, other),
    }
    results = {update.request_id: update.result for update in updates if update.result is not None}
    assert [results[branch_id(name, index)] for index in (1, 2)] == list(wholes(updates)[name].others)
    assert wholes(updates)[other] is results[other]
    assert built.engine.num_unfinished == 0


def test_the_text_of_a_prompt_is_tokenized_once_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    built = dry()
    encode, texts = built.engine.tokenizer.encode, []

    def counting(text: str, **settings: Any) -> Any:
        texts.append(text)
        return encode(text, **settings)

    monkeypatch.setattr(built.engine.tokenizer, "encode", counting)
    submission = built.engine.prepare("hello", wishes(n=4))
    assert texts == ["hello"]
    assert submission.prompt == "hello"
    assert all(spec.prompt_token_ids is submission.branches[0].prompt_token_ids for spec in submission.branches)
    assert [spec.branch_of for spec in submission.branches] == [submission.request_id] * 4
    assert [spec.branch_of for spec in built.engine.prepare("hello", wishes()).branches] == [None]


@pytest.mark.parametrize(("first", "second"), [(("a", 3), ("a/2", 1)), (("a/2", 1), ("a", 3)), (("a", 2), ("a", 1))])
def test_a_name_that_a_branch_has_is_taken_and_nothing_of_the_second_is_kept(
    first: tuple[str, int], second: tuple[str, int]
) -> None:
    built = dry()
    late = built.engine.prepare(PROMPT, wishes(n=second[1]), request_id=second[0])
    built.engine.submit(PROMPT, wishes(n=first[1]), request_id=first[0])
    with pytest.raises(InvalidRequestError, match=r"request id 'a(/2)?'.* is already in use"):
        built.engine.submit(PROMPT, wishes(n=second[1]), request_id=second[0])
    with pytest.raises(InvalidRequestError, match="already in use"):
        built.engine.hand_in(late)  # taken since it was checked
    assert built.engine.num_unfinished == first[1]
    assert list(wholes(drain(built))) == [first[0]]
    built.engine.hand_in(late)  # free again
    assert list(wholes(drain(built))) == [second[0]]


def test_names_stay_taken_until_the_last_branch_has_ended() -> None:
    # Goal: an abort by the name of an ended branch must not meet a stranger.
    built = dry()
    name = built.engine.submit(PROMPT, wishes(n=3), request_id="a")
    built.engine.step()
    built.engine.abort(RequestId("a/1"))
    (aborted,) = [update for update in built.engine.step() if update.request_id == "a/1"]
    assert aborted.result is not None
    assert aborted.whole is None
    with pytest.raises(InvalidRequestError, match="'a/1' is already in use"):
        built.engine.submit(PROMPT, wishes(), request_id="a/1")
    whole = wholes(drain(built))[name]
    assert [choice.finish_reason for choice in whole.choices] == [
        FinishReason.LENGTH,
        FinishReason.ABORT,
        FinishReason.LENGTH,
    ]
    built.engine.submit(PROMPT, wishes(), request_id="a/1")


# Taking back


@pytest.mark.parametrize("num_seats", [1, 8])
def test_aborting_the_request_ends_all_its_branches_seated_or_not(num_seats: int) -> None:
    built = dry(max_num_seqs=num_seats)
    name = built.engine.submit(PROMPT, wishes(n=4))
    other = built.engine.submit(PROMPT, wishes(), request_id=f"{name}/x")
    for _ in range(3):
        built.engine.step()
    built.engine.abort(name)
    updates = drain(built)
    assert {choice.finish_reason for choice in wholes(updates)[name].choices} == {FinishReason.ABORT}
    assert wholes(updates)[other].finish_reason is FinishReason.LENGTH
    assert built.engine.num_unfinished == built.engine.scheduler.state.kv.device.num_owned == 0


def test_all_that_is_left_is_aborted_when_choice_0_has_ended() -> None:
    built = dry()
    (calm,) = LLM(device="dry").generate([PROMPT], wishes(n=2))
    end = next(token for token in calm.token_ids if token not in calm.others[0].token_ids)
    name = built.engine.submit(PROMPT, wishes(n=2, max_tokens=500, stop_token_ids=(end,)))
    while not any(update.request_id == name and update.result is not None for update in built.engine.step()):
        pass
    assert built.engine.num_unfinished == 1
    built.engine.abort(name)
    whole = wholes(drain(built))[name]
    assert [choice.finish_reason for choice in whole.choices] == [FinishReason.STOP, FinishReason.ABORT]


# Refusals


def test_a_request_that_can_never_fit_leaves_no_branch_behind() -> None:
    built = dry(num_kv_blocks=4, block_size=4)
    with pytest.raises(RequestTooLargeError):
        built.engine.submit([1] * 10, wishes(n=3, max_tokens=8))
    assert not built.engine.has_work
    assert built.engine.num_unfinished == 0


def test_as_many_answers_as_are_allowed_come_from_a_few_seats() -> None:
    (output,) = LLM(device="dry", max_num_seqs=16).generate([PROMPT], wishes(n=MAX_N, max_tokens=6))
    assert [choice.index for choice in output.choices] == list(range(MAX_N))


def test_prompts_handed_in_from_several_threads_are_all_answered_once() -> None:
    # Goal: while one thread steps, names are taken and given back by others; a race would lose or mix branches.
    built = dry(max_num_seqs=8)
    wanted = {n: LLM(device="dry").generate([PROMPT], wishes(n=n))[0].choices for n in (1, 3)}
    before, names = sys.getswitchinterval(), []

    def hand_in(thread: int) -> None:
        for number in range(20):
            n = 1 + 2 * (number % 2)
            names.append((built.engine.submit(PROMPT, wishes(n=n), request_id=f"{thread}.{number}"), n))

    threads = [threading.Thread(target=hand_in, args=(thread,)) for thread in range(4)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        updates = []
        while any(thread.is_alive() for thread in threads):
            updates += built.engine.step()
        updates += drain(built)
    finally:
        sys.setswitchinterval(before)
    results = wholes(updates)
    assert len(results) == len(names) == 80
    for name, n in names:
        assert [said(choice) for choice in results[name].choices] == [said(choice) for choice in wanted[n]]


# Salts


def test_a_salt_reaches_every_branch_as_bytes_and_changes_no_answer() -> None:
    built = dry(enable_prefix_caching=True)
    submission = built.engine.prepare(PROMPT, wishes(n=2), cache_salt="tenant é")
    assert [spec.cache_salt for spec in submission.branches] == ["tenant é".encode()] * 2
    assert built.engine.prepare(PROMPT, wishes()).branches[0].cache_salt == b""
    salted = built.engine.hand_in(submission)
    plain = built.engine.submit(PROMPT, wishes(n=2))
    results = wholes(drain(built))
    assert [said(choice) for choice in results[salted].choices] == [said(choice) for choice in results[plain].choices]


@pytest.mark.parametrize("salt", ["", "x" * (MAX_CACHE_SALT_CHARS + 1), b"bytes", 5, True, "\ud800"])
def test_a_salt_that_is_no_short_text_is_refused_by_name(salt: Any) -> None:
    built = dry()
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        built.engine.submit(PROMPT, wishes(n=2), cache_salt=salt)
    assert not built.engine.has_work
    built.engine.submit(PROMPT, wishes(), cache_salt="x" * MAX_CACHE_SALT_CHARS)
