"""The promise on the real model: whoever gives way, however often and in whatever mode, gets the answer of a calm run.

Undisturbed means alone in an ample pool, so these tests also compare batch sizes and chunk sizes with each other.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import pytest

from giveway.build import Model, build_on, load_model
from giveway.core.config import PreemptionChoice
from giveway.core.ids import RequestId
from giveway.core.plan import BlockCopy, PreemptionMode
from giveway.core.request import RequestState
from giveway.core.sampling import SamplingParams
from giveway.core.scheduler import Scheduler
from giveway.engine.clock import MonotonicClock
from giveway.engine.engine import Engine
from giveway.engine.intake import Intake
from giveway.engine.outputs import RequestOutput
from giveway.options import EngineOptions
from giveway.runtime.dry.scripted_copies import CopyFate, ScriptedCopies
from giveway.runtime.model_executor import ModelExecutor
from tests.backends import OPTIONS

NUM_TOKENS = 20
STORIES = (
    "The lighthouse keeper wrote in his diary that",
    "Once upon a time, in a village between two rivers,",
    "def fibonacci(n):",
    "The three most important rules of cooking are",
    "List the planets of the solar system in order:",
    "Dear customer, we are sorry that your parcel",
)


def params_of(index: int) -> SamplingParams:
    """Greedy and seeded requests in turn; penalties, stop strings and log-probabilities among them."""
    base = SamplingParams(temperature=0, top_p=1.0, max_tokens=NUM_TOKENS)
    kinds = (
        base,
        replace(base, temperature=0.8, top_p=0.95, seed=41 + index),
        replace(base, logprobs=3, prompt_logprobs=1),
        replace(base, temperature=1.0, top_k=40, seed=7, frequency_penalty=1.5, presence_penalty=0.5, min_tokens=10),
        replace(base, repetition_penalty=1.3, stop=("\n\n", "the end")),
        replace(base, temperature=0.7, min_p=0.05, seed=index, logprobs=0, ignore_eos=True),
    )
    return kinds[index % len(kinds)]


@dataclass(frozen=True)
class Workload:
    """Prompts of different lengths with their wishes, and the answers of the calm run."""

    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    answers: tuple[RequestOutput, ...]


@pytest.fixture(scope="module", params=OPTIONS)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    loaded = load_model(request.param)
    yield loaded
    loaded.backend.close()


@pytest.fixture(scope="module")
def workload(model: Model) -> Workload:
    rng = random.Random(3)
    prompts, params, answers = [], [], []
    for index in range(16):
        story = tuple(model.tokenizer.encode(STORIES[index % len(STORIES)]))
        prompts.append((story * 12)[: rng.choice((5, 11, 16, 17, 31, 63, 64, 65))])
        params.append(params_of(index))
    for prompt, each in zip(prompts, params, strict=True):
        engine = build_on(model, EngineOptions(num_kv_blocks=32, swap_space=0)).engine
        engine.submit(prompt, each)
        answers.append(run(engine)[0])
    assert len({answer.token_ids for answer in answers}) > 10  # not one degenerate text
    return Workload(tuple(prompts), tuple(params), tuple(answers))


def run(
    engine: Engine,
    rng: random.Random | None = None,
    choice: PreemptionChoice = PreemptionChoice.SWAP,
    probability: float = 0.0,
) -> list[RequestOutput]:
    """Step to the end, telling a random resident to give way now and then; results in order of submission.

    With `rng` it happens at two random steps in any case, and at every other with `probability`.
    """
    results: dict[RequestId, RequestOutput] = {}
    certain = rng.sample(range(2, 18), 2) if rng is not None else []
    for step in count():
        if not engine.has_work:
            break
        residents = [r for r in engine.scheduler.state.residents if r.state is RequestState.RUNNING]
        if rng is not None and residents and (rng.random() < probability or step in certain):
            engine.give_way(rng.choice(residents).request_id, choice)
        for update in engine.step():
            if update.result is not None:
                results[update.request_id] = update.result
    return [results[name] for name in sorted(results, key=lambda name: int(name.rpartition("-")[2]))]


def same(left: RequestOutput, right: RequestOutput) -> bool:
    """Whether everything a caller can see of the answer is equal, log-probabilities to the bit."""
    return all(
        getattr(left, name) == getattr(right, name)
        for name in ("token_ids", "text", "finish_reason", "stop", "logprobs", "prompt_logprobs", "error")
    )


def check(workload: Workload, results: list[RequestOutput]) -> Counter[PreemptionMode]:
    """Compare with the calm run; return how often each mode was used."""
    modes: Counter[PreemptionMode] = Counter()
    for index, result in enumerate(results):
        assert same(result, workload.answers[index]), f"request {index} changed its answer: {result.stats}"
        modes.update(result.stats.preemptions)
    return modes


def num_of(choice: PreemptionChoice, modes: Counter[PreemptionMode]) -> int:
    """Count the preemptions of the mode that was asked for; the choice is free with `auto`."""
    if choice is PreemptionChoice.AUTO:
        return modes[PreemptionMode.SWAP] + modes[PreemptionMode.RECOMPUTE]
    return modes[PreemptionMode(choice.value)]


def forced(
    model: Model, workload: Workload, *, choice: PreemptionChoice, chunk: int, batch: int, seed: int
) -> Counter[PreemptionMode]:
    options = EngineOptions(
        num_kv_blocks=200, swap_space=1 << 30, max_num_seqs=min(batch, chunk), max_num_batched_tokens=chunk,
        check_invariants=True,
    )  # fmt: skip
    engine = build_on(model, options).engine
    for prompt, params in zip(workload.prompts[:batch], workload.params[:batch], strict=True):
        engine.submit(prompt, params)
    # With tiny chunks a context takes many steps to come back: whoever is evicted more often than that never ends.
    probability = min(0.3, chunk / 150)
    return check(workload, run(engine, random.Random(seed), choice, probability))


# Every choice and a small, a middle and a large chunk; the long round has every two of choice, chunk and batch with
# each other.
@pytest.mark.parametrize(
    ("choice", "chunk", "batch"),
    [(PreemptionChoice.RECOMPUTE, 16, 3), (PreemptionChoice.SWAP, 64, 16), (PreemptionChoice.AUTO, 512, 6)],
)
def test_forced_at_random_steps(
    model: Model, workload: Workload, choice: PreemptionChoice, chunk: int, batch: int
) -> None:
    modes = forced(model, workload, choice=choice, chunk=chunk, batch=batch, seed=chunk)
    assert num_of(choice, modes) >= 3


CHUNKS, BATCHES = (1, 7, 16, 33, 64, 512), (1, 2, 5, 16)


@pytest.mark.long
@pytest.mark.parametrize(
    ("choice", "chunk", "batch"),
    [
        (list(PreemptionChoice)[(CHUNKS.index(chunk) + BATCHES.index(batch)) % len(PreemptionChoice)], chunk, batch)
        for chunk in CHUNKS
        for batch in BATCHES
    ],
)
def test_forced_at_random_steps_over_all_chunk_and_batch_sizes(
    model: Model, workload: Workload, choice: PreemptionChoice, chunk: int, batch: int
) -> None:
    modes = forced(model, workload, choice=choice, chunk=chunk, batch=batch, seed=100 * chunk + batch)
    assert num_of(choice, modes) >= 1


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_urgent_arrivals_in_a_small_pool(model: Model, workload: Workload, mode: str) -> None:
    # Goal: nobody is told to give way; the scheduler itself must preempt, by the mode asked for.
    options = EngineOptions(
        num_kv_blocks=14, swap_space=1 << 30, max_num_seqs=8, max_num_batched_tokens=64, preemption_mode=mode,
        check_invariants=True,
    )  # fmt: skip
    engine = build_on(model, options).engine
    for index in range(8):
        engine.submit(workload.prompts[index], workload.params[index], priority=20 - 2 * index)
    modes = check(workload, run(engine))
    assert modes[PreemptionMode(mode)] >= 2


def test_an_admission_taken_back_before_it_computed_anything(model: Model, workload: Workload) -> None:
    # Goal: a step budget spent on the first request leaves the others seated with nothing computed; they are told to
    # give way, which is free, and their answers do not change.
    options = EngineOptions(num_kv_blocks=200, max_num_seqs=8, max_num_batched_tokens=8, check_invariants=True)
    engine = build_on(model, options).engine
    for index in range(4):
        engine.submit(workload.prompts[index], workload.params[index])
    engine.step()
    seated = [r for r in engine.scheduler.state.residents if not r.num_own_computed_tokens]
    assert seated
    for request in seated:
        engine.give_way(request.request_id)
    modes = check(workload, run(engine))
    assert modes == Counter({PreemptionMode.UN_ADMIT: len(seated)})


def test_swap_out_then_swap_in_brings_back_the_same_bytes_mid_prefill(model: Model, workload: Workload) -> None:
    # Goal: a victim caught in the middle of its prompt goes on where it was, in both modes.
    for choice in (PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE):
        options = EngineOptions(num_kv_blocks=64, max_num_batched_tokens=8, max_num_seqs=8, check_invariants=True)
        engine = build_on(model, options).engine
        longest = max(range(16), key=lambda index: len(workload.prompts[index]))
        name = engine.submit(workload.prompts[longest], workload.params[longest])
        for _ in range(3):
            engine.step()
        engine.give_way(name, choice)
        (result,) = run(engine)
        assert same(result, workload.answers[longest])
        assert sum(result.stats.preemptions.values()) == 1
        assert (result.stats.num_recomputed_tokens > 0) == (choice is PreemptionChoice.RECOMPUTE)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_with_the_prefix_cache_blocks_are_reused_and_never_hold_another_context(
    model: Model, workload: Workload, mode: str
) -> None:
    # Goal: the same prompts twice on a pool so small that cached blocks are overwritten all the time; the second time
    # finds what the first left. Prompt log-probabilities of a warm prompt are those of the cold one.
    options = EngineOptions(
        num_kv_blocks=16, swap_space=1 << 30, max_num_seqs=8, max_num_batched_tokens=64, preemption_mode=mode,
        enable_prefix_caching=True, check_invariants=True,
    )  # fmt: skip
    engine = build_on(model, options).engine
    modes: Counter[PreemptionMode] = Counter()
    num_cached = 0
    for _ in range(2):
        for index in range(8):
            engine.submit(workload.prompts[index], workload.params[index], priority=20 - 2 * index)
        results = run(engine, random.Random(5), PreemptionChoice(mode), 0.1)
        modes += check(workload, results)
        num_cached += sum(result.stats.num_cached_tokens for result in results)
    assert modes[PreemptionMode(mode)] >= 2
    assert num_cached > 0


def test_blocks_are_not_used_again_while_a_late_copy_still_reads_them(model: Model, workload: Workload) -> None:
    # Goal: copies move their bytes up to four steps after the plan, every fifth fails; no answer changes.
    num_copies = 0

    def fate(_: BlockCopy) -> CopyFate:
        nonlocal num_copies
        num_copies += 1
        return CopyFate(delay_steps=num_copies % 5, fails=num_copies % 5 == 4)

    options = EngineOptions(num_kv_blocks=14, swap_space=1 << 30, max_num_seqs=8, max_num_batched_tokens=64)
    built = build_on(model, options)
    config = replace(built.scheduler_config, overlapped_copies=True, check_invariants=True)
    clock = MonotonicClock()
    engine = Engine(
        Scheduler(config, built.cache_config),
        ModelExecutor(model.backend, clock.now, ScriptedCopies(model.backend, fate)),
        model.tokenizer,
        Intake(model.tokenizer, config, built.cache_config, eos_token_ids=model.eos_token_ids),
        clock,
        block_bytes=built.engine.block_bytes,
    )
    for index in range(8):
        engine.submit(workload.prompts[index], workload.params[index], priority=20 - 2 * index)
    modes = check(workload, run(engine, random.Random(9), PreemptionChoice.SWAP, 0.1))
    assert modes[PreemptionMode.SWAP] >= 4
    assert num_copies >= 8


@pytest.mark.long
def test_eight_copies_of_one_prompt_say_the_same_alone_together_and_evicted(model: Model) -> None:
    # Goal: recomputing replays decodes as one prefill; where that changed a float, a near-tie would flip in 200 tokens.
    prompt = tuple(model.tokenizer.encode(STORIES[0]))
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, logprobs=2)
    options = EngineOptions(num_kv_blocks=128, swap_space=1 << 30, max_num_batched_tokens=64, max_num_seqs=8)
    alone = build_on(model, options).engine
    alone.submit(prompt, params)
    (expected,) = run(alone)
    margins = [entry.top[0][1] - entry.top[1][1] for entry in expected.logprobs or ()]
    print(f"smallest margin between the two best tokens: {min(margins):.2e}")
    for choice in (None, *PreemptionChoice):
        engine = build_on(model, options).engine
        for _ in range(8):
            engine.submit(prompt, params)
        rng = random.Random(11) if choice else None
        results = run(engine, rng, choice or PreemptionChoice.SWAP, 0.2)
        assert all(same(result, expected) for result in results)
        if choice:
            assert sum(result.stats.num_preemptions for result in results) >= 10
