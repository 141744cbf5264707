"""Answers that must have a form: complete where they end, the same under every preemption, no concern of others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from giveway.build import BuiltEngine, build_engine
from giveway.core.config import PreemptionChoice
from giveway.core.constraint import Constraint, ConstraintFactory, TokenMask
from giveway.core.errors import InvalidRequestError, RequestFailedError
from giveway.core.ids import RequestId, TokenId
from giveway.core.request import FinishReason
from giveway.core.sampling import SamplingParams, StructuredOutput
from giveway.engine.clock import StepClock
from giveway.engine.intake import Intake
from giveway.engine.outputs import RequestOutput
from giveway.llm import LLM
from giveway.options import EngineOptions
from giveway.runtime import native
from tests.backends import needs_kernels
from tests.sample_inputs import mask_of

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["rot", "grün", 'a"b\\c\n']}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = [5, 6, 7]


def wishes(form: StructuredOutput, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": 400, "structured_output": form, **fields})


def check_person(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 8
    assert 0 <= value["age"] <= 150
    assert 1 <= len(value["tags"]) <= 2
    assert set(value["tags"]) <= {"rot", "grün", 'a"b\\c\n'}


MODELS = [
    pytest.param({"device": "dry", "num_kv_blocks": 200}, id="dry"),
    pytest.param(
        {"model": "tiny", "device": "cpu", "backend": "torch", "num_kv_blocks": 200},
        id="torch",
        marks=[pytest.mark.long] if native.is_installed() else [],
    ),
    pytest.param(
        {"model": "tiny", "device": "cpu", "backend": "native", "num_kv_blocks": 200}, id="native", marks=needs_kernels
    ),
]


@pytest.fixture(scope="module", params=MODELS)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(**request.param, check_invariants=True, seed=1) as made:
        yield made


# What the answers are


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_an_answer_keeps_its_schema_and_ends_with_it(llm: LLM, temperature: float) -> None:
    for seed in range(4):
        (answer,) = llm.generate(
            [PROMPT], wishes(StructuredOutput(json_schema=PERSON), temperature=temperature, seed=seed)
        )
        assert (answer.finish_reason, answer.stop, answer.error) == (FinishReason.STOP, None, None)
        check_person(answer.text)


def test_branches_are_each_somewhere_else_in_the_grammar_and_what_they_would_be_alone(llm: LLM) -> None:
    (together,) = llm.generate([PROMPT], wishes(StructuredOutput(json_schema=PERSON), n=3, logprobs=1))
    texts = [choice.text for choice in together.choices]
    assert len(set(texts)) == 3
    for text in texts:
        check_person(text)
    (alone,) = llm.generate([PROMPT], wishes(StructuredOutput(json_schema=PERSON), logprobs=1))
    assert (alone.text, alone.logprobs) == (texts[0], together.logprobs)


def test_mates_in_the_batch_with_and_without_a_form_do_not_change_each_other(llm: LLM) -> None:
    forms = [StructuredOutput(json_schema=PERSON), None, StructuredOutput(choice=("yes", "no")), None]
    params = [
        wishes(form, max_tokens=120, seed=i) if form else SamplingParams(seed=i, max_tokens=30)
        for i, form in enumerate(forms)
    ]
    alone = [llm.generate([[i + 1, 2]], each)[0] for i, each in enumerate(params)]
    together = llm.generate([[i + 1, 2] for i in range(4)], params)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert together[2].text in ("yes", "no")


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    # Goal: a caller sees how likely the model found what it was made to say.
    (answer,) = llm.generate([PROMPT], wishes(StructuredOutput(choice=("yes",)), temperature=0, logprobs=1))
    assert answer.text == "yes"
    assert answer.logprobs is not None
    if llm.built.model.backend.device != "dry":
        assert answer.logprobs[0].rank > 1
        assert answer.logprobs[0].logprob < 0


# Where an answer ends


def test_a_complete_grammar_ends_the_answer_without_waiting_for_a_token_that_says_so(llm: LLM) -> None:
    (answer,) = llm.generate([PROMPT], wishes(StructuredOutput(regex="[a-z]{5}")))
    assert len(answer.text) == len(answer.token_ids) == 5
    assert answer.finish_reason is FinishReason.STOP


def test_neither_min_tokens_nor_ignore_eos_keeps_a_complete_answer_open(llm: LLM) -> None:
    for changes in ({"min_tokens": 50}, {"ignore_eos": True}, {"min_tokens": 50, "ignore_eos": True}):
        (answer,) = llm.generate([PROMPT], wishes(StructuredOutput(choice=("yes", "no")), **changes))
        assert answer.finish_reason is FinishReason.STOP, answer.error
        assert answer.text in ("yes", "no")


def test_where_the_grammar_may_go_on_min_tokens_and_ignore_eos_count() -> None:
    def answers(tiny: LLM, **changes: Any) -> list[RequestOutput]:
        form = StructuredOutput(regex="[a-c]{1,40}")
        return tiny.generate([PROMPT] * 8, [wishes(form, seed=seed, max_tokens=30, **changes) for seed in range(8)])

    with LLM(model="tiny", device="cpu", num_kv_blocks=64) as tiny:
        free, longer, longest = answers(tiny), answers(tiny, min_tokens=20), answers(tiny, ignore_eos=True)
    assert all(set(answer.text) <= set("abc") for answer in (*free, *longer, *longest))
    assert min(len(answer.text) for answer in free) < 15  # the end was chosen by the model
    assert all(len(answer.text) >= 19 for answer in longer)  # the end-of-sequence token is one of the twenty
    assert {(len(answer.text), answer.finish_reason) for answer in longest} == {(30, FinishReason.LENGTH)}


def test_a_grammar_of_the_empty_text_ends_with_the_first_token() -> None:
    with LLM(model="tiny", device="cpu", num_kv_blocks=64) as llm:
        for changes in ({}, {"min_tokens": 9}, {"ignore_eos": True}, {"skip_special_tokens": False}):
            (answer,) = llm.generate([PROMPT], wishes(StructuredOutput(regex=""), **changes))
            assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("", FinishReason.STOP, 1)


def test_a_stop_string_ends_an_answer_before_its_grammar_is_complete(llm: LLM) -> None:
    (answer,) = llm.generate([PROMPT], wishes(StructuredOutput(json_schema=PERSON), stop=('"age"',)))
    assert answer.stop == '"age"'
    assert answer.text.lstrip().startswith("{")


def test_max_tokens_ends_an_answer_in_the_middle(llm: LLM) -> None:
    (answer,) = llm.generate([PROMPT], wishes(StructuredOutput(json_schema=PERSON), max_tokens=6))
    assert (answer.finish_reason, len(answer.token_ids)) == (FinishReason.LENGTH, 6)


def test_a_bad_word_that_is_the_only_way_on_fails_its_request_alone(llm: LLM) -> None:
    good, bad = llm.generate(
        [PROMPT, PROMPT],
        [wishes(StructuredOutput(choice=("yes",))), wishes(StructuredOutput(choice=("yes",)), bad_words=("yes",))],
    )
    assert good.text == "yes"
    assert bad.finish_reason is FinishReason.ERROR
    assert "tokens are forbidden at output position 2" in (bad.error or "")


# Preemption

STORY = RequestId("story")
MODES: dict[str, tuple[dict[str, Any], PreemptionChoice]] = {
    "swap": ({"swap_space": 1 << 26, "preemption_mode": "swap", "partial_preemption": False}, PreemptionChoice.SWAP),
    "recompute": ({"swap_space": 0, "preemption_mode": "recompute"}, PreemptionChoice.RECOMPUTE),
}


def run(built: BuiltEngine, force: PreemptionChoice | None) -> RequestOutput:
    """Answer, and after each token tell the request to give way."""
    engine = built.engine
    engine.submit(PROMPT, wishes(StructuredOutput(json_schema=PERSON), logprobs=1), request_id=STORY)
    for _ in range(5000):
        for update in engine.step():
            if update.result is not None:
                return update.result
            if update.token_ids and force is not None:
                engine.give_way(STORY, force)
    raise AssertionError("no end")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", [{"device": "dry"}, {"model": "tiny", "device": "cpu"}], ids=["dry", "tiny"])
def test_preempted_after_each_token_the_answer_is_the_undisturbed_one(model: dict[str, Any], mode: str) -> None:
    settings, force = MODES[mode]
    options: dict[str, Any] = {"num_kv_blocks": 40, "check_invariants": True, "seed": 1, **model}
    calm_built = build_engine(EngineOptions(**options), StepClock())
    calm = run(calm_built, None)
    calm_built.engine.close()
    disturbed_built = build_engine(EngineOptions(**options, **settings), StepClock())
    disturbed = run(disturbed_built, force)
    disturbed_built.engine.close()
    check_person(calm.text)
    assert (disturbed.token_ids, disturbed.text, disturbed.logprobs) == (calm.token_ids, calm.text, calm.logprobs)
    assert disturbed.finish_reason is calm.finish_reason is FinishReason.STOP
    assert disturbed.stats.num_preemptions >= len(calm.token_ids) - 2


def test_a_step_that_fails_and_is_repeated_does_not_move_the_grammar_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # Goal: the grammar had seen the tokens of a step that was then abandoned.
    built = build_engine(EngineOptions(device="dry", seed=1, check_invariants=True), StepClock())
    expected = run(built, None)
    engine, review, count = built.engine, built.engine._review, 0

    def interrupted(outcome: Any) -> Any:
        nonlocal count
        count += 1
        stops = review(outcome)
        if count % 3 == 0:
            raise KeyboardInterrupt
        return stops

    monkeypatch.setattr(engine, "_review", interrupted)
    engine.submit(PROMPT, wishes(StructuredOutput(json_schema=PERSON), logprobs=1), request_id=STORY)
    tracker = engine._tracked[STORY]
    result = None
    for _ in range(3000):
        detokenizer = tracker._detokenizer
        saved = {name: getattr(detokenizer, name) for name in ("text", "num_tokens")}
        try:
            result = next((update.result for update in engine.step() if update.result), None)
        except KeyboardInterrupt:
            for name, value in saved.items():  # not what this test is about
                setattr(detokenizer, name, value)
        if result is not None:
            break
    assert result is not None
    assert result.token_ids == expected.token_ids


# Faults


class Broken:
    """A grammar that fails after some tokens, or whose masks say something else than it does."""

    end_token_ids: frozenset[TokenId] = frozenset()

    def __init__(self, fails_at: int, *, in_review: bool) -> None:
        self._fails_at, self._in_review = fails_at, in_review

    def allowed_after(self, output_token_ids: Sequence[TokenId]) -> TokenMask | None:
        if not self._in_review and len(output_token_ids) >= self._fails_at:
            raise RequestFailedError("response_format: too much work")
        return mask_of([65, 66])

    def is_complete_after(self, output_token_ids: Sequence[TokenId]) -> bool:
        if self._in_review and len(output_token_ids) > self._fails_at:
            raise RequestFailedError("response_format: the grammar does not allow token 65")
        return False


@pytest.mark.parametrize("in_review", [False, True])
def test_a_grammar_that_fails_ends_its_own_request_with_its_message(in_review: bool) -> None:
    built = build_engine(EngineOptions(device="dry", seed=1, check_invariants=True), StepClock())

    def compile_broken(wish: StructuredOutput) -> ConstraintFactory:
        def make() -> Constraint:
            return Broken(3, in_review=in_review)

        return make

    built.engine._intake._compile_constraint = compile_broken
    broken = built.engine.submit(PROMPT, wishes(StructuredOutput(json_object=True)))
    mate = built.engine.submit([9, 9], SamplingParams(temperature=0, max_tokens=12))
    results: dict[str, RequestOutput] = {}
    while built.engine.has_work:
        results |= {update.request_id: update.result for update in built.engine.step() if update.result is not None}
    assert results[broken].finish_reason is FinishReason.ERROR
    assert (results[broken].error or "").startswith("response_format: ")
    assert set(results[broken].text) <= {"A", "B"}
    assert results[mate].finish_reason is FinishReason.LENGTH
    assert results[mate].stats.num_recomputed_tokens == 0


def test_what_cannot_be_kept_is_refused_at_submission_and_nothing_is_left_of_it(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"^response_format.*'not' is not supported"):
        llm.engine.submit(PROMPT, wishes(StructuredOutput(json_schema={"not": {}})), request_id="a")
    assert llm.engine.num_unfinished == 0
    llm.engine.submit(PROMPT, wishes(StructuredOutput(choice=("x",))), request_id="a")
    llm.engine.abort(RequestId("a"))
    while llm.engine.has_work:
        llm.engine.step()


def test_an_engine_without_a_compiler_says_so() -> None:
    built = build_engine(EngineOptions(device="dry"))
    model = built.model
    intake = Intake(model.tokenizer, built.scheduler_config, built.cache_config, eos_token_ids=frozenset())
    with pytest.raises(InvalidRequestError, match="built without structured output"):
        intake.resolve(
            STORY, PROMPT, wishes(StructuredOutput(json_object=True)), priority=None, cache_salt=None, arrival_s=0
        )
