"""The loop as its users see it: on the dry device, where one wrong slot changes the answer."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from giveway.build import BuiltEngine, build_engine
from giveway.core.config import PreemptionChoice
from giveway.core.cost_profile import SHIPPED
from giveway.core.errors import (
    ConfigError,
    DeviceFaultError,
    GiveWayError,
    InvalidRequestError,
    InvariantError,
    KVCacheFullError,
    RequestTooLargeError,
)
from giveway.core.executor import Executor, RequestFacts
from giveway.core.ids import RequestId
from giveway.core.plan import PreemptionMode, StepOutcome, StepPlan
from giveway.core.request import FinishReason
from giveway.core.sampling import SamplingParams
from giveway.engine.clock import StepClock
from giveway.engine.outputs import RequestOutput
from giveway.llm import LLM
from giveway.options import EngineOptions, parse_size


def dry(**options: object) -> BuiltEngine:
    settings = {"device": "dry", "check_invariants": True, "seed": 1, **options}
    return build_engine(EngineOptions(**settings), StepClock())  # type: ignore[arg-type]


def drain(built: BuiltEngine) -> dict[str, RequestOutput]:
    """Step until nothing is left; also check that the updates are the ends of the results."""
    results: dict[str, RequestOutput] = {}
    texts: dict[str, str] = {}
    tokens: dict[str, tuple[int, ...]] = {}
    for _ in range(10_000):
        if not built.engine.has_work:
            break
        for update in built.engine.step():
            texts[update.request_id] = texts.get(update.request_id, "") + update.text
            tokens[update.request_id] = tokens.get(update.request_id, ()) + update.token_ids
            if update.result is not None:
                assert update.request_id not in results
                results[update.request_id] = update.result
    assert not built.engine.has_work
    for name, result in results.items():
        assert result.text.endswith(texts[name])
        assert result.token_ids[len(result.token_ids) - len(tokens[name]) :] == tokens[name]
    return results


GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_answers_under_pressure_are_those_of_an_ample_pool(mode: str) -> None:
    prompts = [[i + 1] * (5 + i) for i in range(8)]
    params = [SamplingParams(temperature=0.9 if i % 2 else 0, max_tokens=20 + i, seed=i, logprobs=2) for i in range(8)]
    calm = LLM(device="dry", num_kv_blocks=200, block_size=4).generate(prompts, params)
    tight = LLM(
        device="dry", num_kv_blocks=12, swap_space="1MiB", block_size=4, preemption_mode=mode, check_invariants=True
    ).generate(prompts, params, priorities=[20, 0, 20, 0, 10, 10, 5, 5])
    assert [r.token_ids for r in tight] == [r.token_ids for r in calm]
    assert [r.text for r in tight] == [r.text for r in calm]
    assert [r.logprobs for r in tight] == [r.logprobs for r in calm]
    assert sum(r.stats.num_preemptions for r in tight) > 0
    assert sum(r.stats.num_preemptions for r in calm) == 0
    if mode == "swap":
        assert sum(r.stats.swapped_in_bytes for r in tight) > 0
    else:
        assert sum(r.stats.num_recomputed_tokens for r in tight) > 0


def test_requests_join_and_leave_between_any_two_steps() -> None:
    built = dry()
    engine = built.engine
    first = engine.submit([1, 2, 3], GREEDY)
    engine.step()
    second = engine.submit([4, 5], GREEDY, priority=0)
    engine.step()
    engine.abort(first)
    results = drain(built)
    assert results[first].finish_reason is FinishReason.ABORT
    assert 0 < len(results[first].token_ids) < 24
    assert results[second].finish_reason is FinishReason.LENGTH


def test_an_urgent_arrival_takes_the_only_seat_in_the_same_step() -> None:
    built = dry(max_num_seqs=1, partial_preemption=False)
    slow = built.engine.submit([1] * 4, GREEDY, priority=20)
    built.engine.step()
    urgent = built.engine.submit([2] * 4, SamplingParams(temperature=0, max_tokens=1), priority=0)
    updates = {update.request_id: update for update in built.engine.step()}
    assert updates[urgent].result is not None
    assert slow not in updates
    result = drain(built)[slow]
    assert len(result.token_ids) == 24
    assert result.stats.preemptions == {PreemptionMode.SWAP: 1}


def test_the_control_policy_loses_the_batch_and_says_how_full_the_pool_was() -> None:
    llm = LLM(device="dry", scheduling_policy="none", num_kv_blocks=20, block_size=1)
    with pytest.raises(KVCacheFullError, match=r"KV cache full: used \d+ of 20 slots"):
        llm.generate([[i] * 5 for i in range(8)], SamplingParams(temperature=0, max_tokens=8))
    assert not llm.engine.has_work
    # The next call works: nothing of the lost batch is left.
    assert len(llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=4))[0].token_ids) == 4


def test_a_stop_string_ends_the_request_in_the_step_that_completes_it() -> None:
    built = dry()
    calm = LLM(device="dry").generate([[7, 7]], GREEDY)[0]
    whole = next(i for i in range(4, len(calm.text)) if calm.text[i].isascii() and calm.text.find(calm.text[i]) == i)
    stop = calm.text[whole]
    name = built.engine.submit([7, 7], SamplingParams(temperature=0, max_tokens=24, stop=(stop,)))
    result = drain(built)[name]
    assert (result.finish_reason, result.stop) == (FinishReason.STOP, stop)
    assert result.text == calm.text[:whole]


def test_a_request_without_max_tokens_fills_what_is_left_of_the_pool() -> None:
    built = dry(num_kv_blocks=4, block_size=4)
    name = built.engine.submit([1] * 10, SamplingParams(temperature=0))
    result = drain(built)[name]
    assert result.finish_reason is FinishReason.LENGTH
    assert len(result.token_ids) == 7  # 16 slots hold 10 + 6 tokens; the seventh is never stored


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ([], SamplingParams(), InvalidRequestError, "empty prompt"),
        ("", SamplingParams(), InvalidRequestError, "empty prompt"),
        ([1] * 17, SamplingParams(max_tokens=1), RequestTooLargeError, "17 tokens"),
        ([1] * 10, SamplingParams(max_tokens=8), RequestTooLargeError, "Lower max_tokens to 7"),
        ([1, 300], SamplingParams(), InvalidRequestError, "300"),
        ([1, True], SamplingParams(), InvalidRequestError, "True"),
        ([1], SamplingParams(stop_token_ids=(999,)), InvalidRequestError, "999"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_at_submission(
    prompt: object, params: SamplingParams, error: type[Exception], words: str
) -> None:
    built = dry(num_kv_blocks=4, block_size=4)
    with pytest.raises(error, match=words):
        built.engine.submit(prompt, params)  # type: ignore[arg-type]
    assert built.engine.num_unfinished == 0
    good = built.engine.submit([1] * 16, SamplingParams(temperature=0, max_tokens=1))
    assert len(drain(built)[good].token_ids) == 1


def test_a_prompt_of_eleven_requests_in_one_call_with_one_bad_one_runs_nothing() -> None:
    llm = LLM(device="dry", num_kv_blocks=4, block_size=4)
    with pytest.raises(InvalidRequestError):
        llm.generate([[1]] * 10 + [[]], SamplingParams(max_tokens=2))
    assert not llm.engine.has_work


def test_an_order_to_give_way_is_followed_once_and_loses_nothing() -> None:
    built = dry()
    calm = LLM(device="dry").generate([[3] * 9], GREEDY)[0]
    name = built.engine.submit([3] * 9, GREEDY)
    for _ in range(5):
        built.engine.step()
    built.engine.give_way(name, PreemptionChoice.SWAP)
    built.engine.step()
    built.engine.give_way(name, PreemptionChoice.RECOMPUTE)  # it is not running now: no effect
    for _ in range(4):
        built.engine.step()
    built.engine.give_way(name, PreemptionChoice.RECOMPUTE)
    result = drain(built)[name]
    assert result.token_ids == calm.token_ids
    assert result.stats.preemptions == {PreemptionMode.SWAP: 1, PreemptionMode.RECOMPUTE: 1}
    assert result.stats.swapped_in_bytes == result.stats.swapped_out_bytes > 0


def test_unseeded_requests_differ_and_an_engine_seed_makes_them_repeatable() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12)
    one = LLM(device="dry", seed=5).generate([[1]] * 3, params)
    two = LLM(device="dry", seed=5).generate([[1]] * 3, params)
    assert [r.token_ids for r in one] == [r.token_ids for r in two]
    assert len({r.token_ids for r in one}) == 3


def test_min_tokens_holds_back_the_end_and_bad_words_never_appear() -> None:
    calm = LLM(device="dry").generate([[9] * 3], GREEDY)[0]
    end = calm.token_ids[2]
    early = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(end,))
    assert len(LLM(device="dry").generate([[9] * 3], early)[0].token_ids) == 3
    late = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(end,), min_tokens=10)
    result = LLM(device="dry").generate([[9] * 3], late)[0]
    assert len(result.token_ids) >= 10
    assert end not in result.token_ids[:9]
    letter = next(t for t in calm.token_ids if 97 <= t < 123 or 33 <= t < 91)
    clean = SamplingParams(temperature=0, max_tokens=24, bad_words=(chr(letter),))
    assert letter not in LLM(device="dry").generate([[9] * 3], clean)[0].token_ids


def test_prompt_logprobs_come_whole_and_once_whatever_the_chunks_and_preemptions() -> None:
    prompt = list(range(20))
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1)
    calm = LLM(device="dry").generate([prompt], params)[0]
    assert calm.prompt_logprobs is not None
    assert len(calm.prompt_logprobs) == 20
    assert calm.prompt_logprobs[0] is None
    for stop_after in (1, 2):
        built = dry(max_num_batched_tokens=8, max_num_seqs=8, enable_prefix_caching=True, block_size=4)
        name = built.engine.submit(prompt, params)
        for _ in range(stop_after):
            built.engine.step()
        built.engine.give_way(name, PreemptionChoice.RECOMPUTE)
        result = drain(built)[name]
        assert result.prompt_logprobs == calm.prompt_logprobs
        assert result.token_ids == calm.token_ids
        warm = built.engine.submit(prompt, params)
        assert drain(built)[warm].prompt_logprobs == calm.prompt_logprobs


def test_the_prefix_cache_changes_no_answer_and_is_counted() -> None:
    llm = LLM(device="dry", enable_prefix_caching=True, block_size=4, check_invariants=True)
    prompt = list(range(16))  # exactly four blocks: at least one token must still be run
    cold, warm = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert warm.token_ids == cold.token_ids
    assert (cold.stats.num_cached_tokens, warm.stats.num_cached_tokens) == (0, 12)


def test_max_model_len_is_lowered_to_what_the_pool_holds_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    built = dry(num_kv_blocks=4, block_size=4)
    assert built.scheduler_config.max_model_len == 17
    assert [record.getMessage() for record in caplog.records] == [
        "max_model_len lowered from 8192 to 17 tokens, which is what the KV pool holds"
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_kv_blocks": 0}, "no room for even one"),
        ({"kv_cache_memory_bytes": 10}, "no room for even one"),
        ({"scheduling_policy": "lottery"}, "lottery"),
        ({"max_num_seqs": 100, "max_num_batched_tokens": 50}, "below max_num_seqs"),
        ({"max_model_len": 10**6}, "was trained for"),
        ({"default_priority": 101}, "101"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_wrong_settings_are_refused_with_the_numbers(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dry(**options)


@pytest.mark.parametrize(
    ("text", "bare_unit", "expected"),
    [("512MiB", 1, 512 << 20), ("2GiB", 1, 2 << 30), ("1.5GB", 1, 1_500_000_000), ("2", 1 << 30, 2 << 30), (7, 1, 7)],
)
def test_sizes_are_read_as_people_write_them(text: str, bare_unit: int, expected: int) -> None:
    assert parse_size(text, bare_unit=bare_unit) == expected


@pytest.mark.parametrize("text", ["", "-1", "lots", "1XB", "1e9", "nan"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_size(text)


def test_ctrl_c_during_generate_leaves_an_engine_that_works() -> None:
    # Goal: the interrupt is heeded between two steps, so no step is cut in half and nothing stays behind.
    llm = LLM(device="dry", check_invariants=True)
    num_steps = 0

    def interrupt(*_: object) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            signal.raise_signal(signal.SIGINT)

    llm.engine.add_listener(interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]] * 4, GREEDY)
    assert len(llm.generate([[5]], GREEDY)[0].token_ids) == 24
    assert llm.engine.num_unfinished == 0
    assert llm.engine.scheduler.state.kv.device.num_owned == 0


@pytest.mark.parametrize(("copy_s", "mode"), [(0.0, PreemptionMode.SWAP), (10.0, PreemptionMode.RECOMPUTE)])
def test_auto_swaps_where_copies_are_cheap_and_recomputes_where_they_are_dear(
    tmp_path: Path, copy_s: float, mode: PreemptionMode
) -> None:
    # Goal: the pinned profile decides, whatever the machine at hand would say.
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({**SHIPPED.as_dict(), "copy_s": copy_s}))
    built = dry(max_num_seqs=1, preemption_mode="auto", cost_profile=str(profile), partial_preemption=False)
    name = built.engine.submit([1] * 40, GREEDY, priority=20)
    built.engine.step()
    built.engine.submit([2], SamplingParams(temperature=0, max_tokens=1), priority=0)
    assert drain(built)[name].stats.preemptions == {mode: 1}
    assert built.engine.scheduler.state.costs.copy_s == copy_s


def test_costs_are_learned_from_real_steps_and_pinned_in_the_dry_run() -> None:
    learned = LLM("tiny", device="cpu", num_kv_blocks=32)
    learned.generate([[1, 2, 3]], GREEDY)
    assert learned.engine.scheduler.state.costs != SHIPPED
    pinned = LLM(device="dry")
    pinned.generate([[1, 2, 3]], GREEDY)
    assert pinned.engine.scheduler.state.costs == SHIPPED


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"step_s": 1}', "[" * 100_000])
def test_a_cost_profile_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(content)
    with pytest.raises(ConfigError, match="cost profile"):
        dry(cost_profile=str(profile))
    with pytest.raises(ConfigError, match="cannot be read"):
        dry(cost_profile=str(tmp_path / "absent"))


class Breaking:
    """An executor that is broken off, once, in the middle of a step."""

    def __init__(self, inner: Executor, error: BaseException) -> None:
        self._inner = inner
        self._error: BaseException | None = error

    def execute(self, plan: StepPlan, requests: Mapping[RequestId, RequestFacts]) -> StepOutcome:
        outcome = self._inner.execute(plan, requests)
        if self._error is not None and plan.decodes:
            error, self._error = self._error, None
            raise error
        return outcome

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InvariantError("a bug of ours")])
def test_a_step_that_is_broken_off_harms_nobody_and_the_cause_is_not_hidden(error: BaseException) -> None:
    # Goal: what was planned has not happened; everybody goes on and gets the answer of a calm run.
    calm = LLM(device="dry").generate([[3] * 9, [4] * 5], GREEDY)
    built = dry()
    engine = built.engine
    engine._executor = Breaking(engine._executor, error)
    names = [engine.submit([3] * 9, GREEDY), engine.submit([4] * 5, GREEDY)]
    engine.step()
    with pytest.raises(type(error)):
        engine.step()
    results = drain(built)
    assert [results[name].token_ids for name in names] == [answer.token_ids for answer in calm]


def test_running_out_of_memory_in_a_step_of_copies_only_is_told_and_leaves_the_state_whole() -> None:
    built = dry(max_num_seqs=1)
    name = built.engine.submit([3] * 9, GREEDY)
    built.engine.step()
    built.engine.give_way(name)
    inner = built.engine._executor

    class Broken(Breaking):
        def execute(self, plan: StepPlan, requests: Mapping[RequestId, RequestFacts]) -> StepOutcome:
            built.engine._executor = inner
            raise DeviceFaultError("the link is down")

    built.engine._executor = Broken(inner, ValueError())
    with pytest.raises(DeviceFaultError, match="the link is down"):
        built.engine.step()
    assert len(drain(built)[name].token_ids) == 24


def test_an_exception_of_a_backend_ends_no_request_but_the_one_that_causes_it() -> None:
    # Goal: whatever its type; here it happens once, so the step is repeated in parts and nobody is found guilty.
    calm = LLM(device="dry").generate([[3] * 9, [4] * 5], GREEDY)
    built = dry()
    built.engine._executor = Breaking(built.engine._executor, ValueError("a bug in a backend"))
    names = [built.engine.submit([3] * 9, GREEDY), built.engine.submit([4] * 5, GREEDY)]
    results = drain(built)
    assert [results[name].token_ids for name in names] == [answer.token_ids for answer in calm]
    built.engine._executor = Breaking(built.engine._executor, ValueError("a bug in a backend"))
    alone = built.engine.submit([5] * 3, GREEDY)
    assert drain(built)[alone].error == "a bug in a backend"


def test_none_in_any_field_of_the_wishes_means_its_default() -> None:
    nothing: dict[str, Any] = dict.fromkeys((field.name for field in fields(SamplingParams)), None)
    assert SamplingParams(**nothing) == SamplingParams()
    with pytest.raises(InvalidRequestError, match="temperature"):
        SamplingParams(temperature=10**400)
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompts", [None, 5, b"abc", {"prompt": "x"}, [None], [{"prompt": "x"}], [[1.5]], [b"abc"], [["a"]]]
)
def test_prompts_that_are_none_are_refused_in_our_words(prompts: Any) -> None:
    llm = LLM(device="dry")
    with pytest.raises(InvalidRequestError):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("arguments", [{"sampling": {"max_tokens": 3}}, {"priorities": 3}, {"priorities": "0"}])
def test_wishes_and_priorities_of_a_wrong_kind_are_refused_in_our_words(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        LLM(device="dry").generate(["a"], **arguments)


def test_prompts_may_come_from_a_generator_or_from_numpy_and_messages_may_not_be_text() -> None:
    llm = LLM(device="dry")
    assert len(llm.generate((text for text in ("a", "b")), GREEDY)) == 2  # type: ignore[arg-type]
    assert len(llm.generate([np.array([1, 2, 3])], GREEDY)) == 1  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="messages"):
        llm.chat("hello")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_kv_blocks": "5"}, "num_kv_blocks is '5'"),
        ({"block_size": 2.5}, "block_size is 2.5"),
        ({"block_size": True}, "block_size is True"),
        ({"default_priority": None}, "default_priority is None"),
        ({"exact": "no"}, "exact is 'no'"),
        ({"swap_space": "lots"}, "not a size"),
        ({"max_num_seq": 3}, "Did you mean 'max_num_seqs'"),
    ],
)
def test_a_setting_of_a_wrong_type_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(device="dry", **options)


def test_sizes_given_in_python_are_read_like_those_of_the_command_line() -> None:
    block_bytes = LLM(device="dry").engine.block_bytes
    small = LLM(device="dry", kv_cache_memory_bytes="8MiB").built.cache_config
    assert small.num_device_blocks == (8 << 20) // block_bytes
    assert LLM(device="dry", swap_space=1).built.cache_config.num_host_blocks == (1 << 30) // block_bytes


def test_calls_from_several_threads_wait_for_each_other() -> None:
    llm = LLM(device="dry", num_kv_blocks=64, check_invariants=True)
    expected = [llm.generate([[number, 7]], GREEDY)[0].token_ids for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda number: llm.generate([[number, 7]], GREEDY)[0].token_ids, range(8)))
    assert found == expected


def test_a_step_inside_a_step_and_a_closed_engine_are_told_clearly() -> None:
    llm = LLM(device="dry")
    said = []

    def step_again(*_: object) -> None:
        with pytest.raises(GiveWayError, match="in a step already"):
            llm.engine.step()
        said.append("yes")

    llm.engine.add_listener(step_again)
    llm.generate([[1]], SamplingParams(max_tokens=1))
    assert said
    llm.close()
    llm.close()
    with pytest.raises(GiveWayError, match="closed"):
        llm.generate([[1]], GREEDY)


def test_an_engine_that_is_not_exact_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    for exact in (True, False):
        LLM("tiny", device="cpu", backend="torch", num_kv_blocks=64, exact=exact).close()
    told = [record.getMessage() for record in caplog.records if "not exact" in record.getMessage()]
    assert told == ["not exact: an answer may depend on batch mates, chunking and preemption (--exact promises not)"]


def test_a_request_that_was_taken_back_in_a_step_that_broke_off_is_told_with_the_next() -> None:
    # Goal: its end happened before the step broke; were it lost, its caller would wait for ever.
    built = dry()
    engine = built.engine
    gone, stays = engine.submit([3] * 9, GREEDY), engine.submit([4] * 5, GREEDY)
    engine.step()
    engine.abort(gone)
    engine._executor = Breaking(engine._executor, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    results = drain(built)
    assert results[gone].finish_reason is FinishReason.ABORT
    assert len(results[stays].token_ids) == 24
    assert engine.num_unfinished == 0


def test_an_order_to_give_way_takes_the_name_of_a_choice_and_refuses_what_is_none() -> None:
    built = dry()
    name = built.engine.submit([1] * 4, GREEDY)
    built.engine.step()
    built.engine.give_way(name, "recompute")  # type: ignore[arg-type]
    assert drain(built)[name].stats.preemptions == {PreemptionMode.RECOMPUTE: 1}
    with pytest.raises(InvalidRequestError, match=r"choice is 'foo'; it must be one of auto, swap, recompute"):
        built.engine.give_way(name, "foo")  # type: ignore[arg-type]


def test_a_swap_file_larger_than_the_disk_is_refused_before_anything_is_made_for_it(tmp_path: Path) -> None:
    # Goal: tables for so many blocks would take all memory.
    with pytest.raises(ConfigError, match=r"the swap file needs .* are free"):
        dry(swap_disk=1 << 62, swap_dir=str(tmp_path))


def test_a_trace_that_another_engine_writes_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    first = dry(trace=str(path))
    with pytest.raises(ConfigError, match="another run writes its trace there"):
        dry(trace=str(path))
    first.engine.close()
    dry(trace=str(path)).engine.close()
