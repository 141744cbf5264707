"""`giveway verify`: what it looks at, and that it fails where something is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from giveway.build import Model, load_model
from giveway.core.errors import ConfigError
from giveway.core.ids import DeviceBlockId, HostBlockId, RequestId
from giveway.core.plan import PreemptionMode, TokenLogprobs
from giveway.core.request import FinishReason
from giveway.engine.outputs import RequestOutput
from giveway.options import EngineOptions
from giveway.runtime.backend import Backend, MemoryPool
from giveway.verify.check import Verdict, verify
from giveway.verify.compare import first_difference
from giveway.verify.modes import Kind, choose_modes, make_requests
from giveway.verify.report import as_json, closing_sentence, problems_of
from giveway.verify.run import ModeResult
from tests.backends import OPTIONS

TINY = EngineOptions(model="tiny", device="cpu", backend="torch", num_threads=1)
DRY = EngineOptions(device="dry")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=OPTIONS)
def on_tiny(request: pytest.FixtureRequest) -> Verdict:
    return verify(replace(request.param, model="tiny", num_threads=1), num_requests=8)


def result_of(verdict: Verdict, name: str) -> ModeResult:
    return next(result for result in verdict.results if result.mode.name == name)


def test_the_exact_backend_is_as_promised_in_every_mode(on_tiny: Verdict) -> None:
    assert on_tiny.is_as_promised, [problems_of(result) for result in on_tiny.results]
    assert sum(result.num_answers for result in on_tiny.results) > 100
    assert closing_sentence(on_tiny).startswith("All ")
    assert on_tiny.model_description.endswith(" exact")


def test_every_kind_of_preemption_happens_in_the_mode_that_is_named_after_it(on_tiny: Verdict) -> None:
    for name, kind in (
        ("swap, whole victims", Kind.HOST),
        ("swap, tails", Kind.HOST_TAIL),
        ("disk, whole victims", Kind.DISK),
        ("disk, tails", Kind.DISK_TAIL),
        ("recompute, whole victims", Kind.RECOMPUTE),
        ("recompute, tails", Kind.RECOMPUTE_TAIL),
        ("seat only", Kind.PAUSE),
        ("un-admission", Kind.UN_ADMIT),
        ("prefix cache, swap", Kind.CACHE_HIT),
    ):
        assert result_of(on_tiny, name).kinds[kind] > 0, name
    whole = result_of(on_tiny, "swap, whole victims").kinds
    assert not whole[Kind.HOST_TAIL]
    assert [result_of(on_tiny, f"batches of {size}, by order").largest_batch for size in (1, 2, 4, 8)] == [1, 2, 4, 8]
    names = [result.mode.name for result in on_tiny.results]
    assert {f"chunks of {size}, recompute" for size in (1, 7, 64, 512)} < set(names)
    assert names[-2:] == ["1 thread, auto", "2 threads, auto"]


@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize(("num_requests", "num_tokens"), [(6, 4), (17, 33)])
def test_other_sizes_preempt_as_well(block_size: int, num_requests: int, num_tokens: int) -> None:
    # Goal: what is too small to fight over is refused, so that no mode is ever without a preemption.
    options = replace(DRY, block_size=block_size)
    verdict = verify(options, num_requests=num_requests, num_tokens=num_tokens)
    assert verdict.is_as_promised, [problems_of(result) for result in verdict.results]


class Inexact:
    """A backend that brings a block back with one bit changed: in the smallest digit of one number of its KV."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def copy_in(self, pairs: Sequence[tuple[HostBlockId, DeviceBlockId]]) -> None:
        self._backend.copy_in(pairs)
        for _, block in pairs:
            content = bytearray(self._backend.read_block(MemoryPool.DEVICE, block))
            content[0] ^= 1
            self._backend.write_block(MemoryPool.DEVICE, block, memoryview(content))


def test_one_bit_changed_by_a_swap_is_found_and_told() -> None:
    def load(options: EngineOptions) -> Model:
        model = load_model(options)
        return replace(model, backend=Inexact(model.backend))

    verdict = verify(TINY, num_requests=6, load=load)
    assert not verdict.is_as_promised
    swapped = result_of(verdict, "swap, whole victims")
    assert 0 < swapped.num_equal < swapped.num_answers  # those that nobody displaced are right
    (problem,) = problems_of(swapped)
    assert problem.startswith("first difference: request ")
    assert " undisturbed, " in problem
    assert result_of(verdict, "recompute, whole victims").is_as_promised
    assert result_of(verdict, "disk, whole victims").is_as_promised
    assert "modes failed" in closing_sentence(verdict)
    row = next(row for row in as_json(verdict)["rows"] if row["mode"] == "swap, whole victims")
    assert row["first_difference"]["undisturbed"] != row["first_difference"]["found"]


def test_a_mode_in_which_nobody_gave_way_has_failed_although_all_answers_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("giveway.verify.run._SHARE_OF_SCARCE_POOL_PCT", 100)
    verdict = verify(DRY, num_requests=6)
    result = result_of(verdict, "recompute, tails")
    assert result.num_equal == result.num_answers
    assert not result.is_as_promised
    assert problems_of(result) == ["there was no recompute tail, so this mode has shown nothing"]


def test_a_run_that_breaks_off_is_told_and_the_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    # Goal: a disk without room for the tier fails the modes that need it, with the reason, and no other.
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("the disk is full")

    monkeypatch.setattr("giveway.runtime.disk_tier.make_swap_file", refuse)
    verdict = verify(DRY, num_requests=6)
    failed = {result.mode.name: problems_of(result)[0] for result in verdict.results if not result.is_as_promised}
    assert set(failed) == {"disk, whole victims", "disk, tails", "host, then disk", "auto"}
    assert set(failed.values()) == {"the run ended with ConfigError: the disk is full"}


def test_too_little_to_fight_over_is_refused() -> None:
    model = load_model(DRY)
    with pytest.raises(ConfigError, match="5 requests of 16 output tokens: at least 6 of 4 are needed"):
        make_requests(model, num_requests=5, num_tokens=16, block_size=16)
    with pytest.raises(ConfigError, match="leave 64 positions for prompts, and prompts of 65 are needed"):
        make_requests(replace(model, max_positions=80), num_requests=6, num_tokens=16, block_size=16)


def test_prompts_end_at_the_edges_of_blocks_and_wishes_differ() -> None:
    requests = make_requests(load_model(DRY), num_requests=8, num_tokens=16, block_size=16)
    assert {len(request.token_ids) % 16 for request in requests} == {0, 1, 5, 15}
    greedy = [request.sampling for request in requests if request.sampling.temperature == 0]
    assert {(sampling.logprobs, sampling.prompt_logprobs) for sampling in greedy} == {(2, None), (None, None), (0, 1)}
    seeds = [request.sampling.seed for request in requests if request.sampling.temperature]
    assert len(set(seeds)) == len(seeds) == 4


def test_only_a_backend_with_threads_is_run_on_one_and_on_two() -> None:
    with_threads, without = (choose_modes(16, has_threads=has_threads) for has_threads in (True, False))
    assert [mode.num_threads for mode in with_threads if mode not in without] == [1, 2]


# Comparing


def answer(**changes: Any) -> RequestOutput:
    entry = TokenLogprobs(5, -0.5, 1, ((5, -0.5), (6, -1.25)))
    whole = RequestOutput(
        RequestId("a"), None, (1, 2), "ab", (5, 6), FinishReason.LENGTH, logprobs=(entry, entry),
        prompt_logprobs=(None, entry),
    )  # fmt: skip
    return replace(whole, **changes)


def test_equal_answers_have_no_difference_whatever_they_went_through() -> None:
    stats = replace(answer().stats, preemptions={PreemptionMode.SWAP: 3}, ttft_s=2.0)
    assert first_difference("a", answer(), answer(request_id=RequestId("b"), stats=stats)) is None


def test_the_first_difference_is_told_with_its_place_and_both_values() -> None:
    entry = TokenLogprobs(5, -0.5, 1, ((5, -0.5), (6, -1.25)))
    next_float = replace(entry, logprob=-0.5000000000000001)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"token_ids": (5, 7)}, "a, output token 1: 6 (log-probability -0.5, rank 1, best 5 -0.5, 6 -1.25)"),
        ({"logprobs": (next_float, entry)}, "5 (log-probability -0.5000000000000001, rank 1, best 5 -0.5, 6 -1.25)"),
        ({"prompt_logprobs": (None, next_float)}, "a, log-probability of prompt token 1: log-probability -0.5, rank 1"),
        ({"text": "aB"}, "a, character of the text 1: b undisturbed, B here"),
        ({"finish_reason": FinishReason.STOP}, "a, finish reason: FinishReason.LENGTH undisturbed"),
        ({"token_ids": (5,), "logprobs": (entry,)}, "undisturbed, nothing here"),
        ({"error": "broken"}, "a, error: None undisturbed, broken here"),
    ]
    for changes, part in cases:
        difference = first_difference("a", answer(), answer(**changes))
        assert difference is not None
        assert part in difference.describe()


def test_a_zero_of_the_other_sign_is_another_number() -> None:
    plus, minus = (answer(logprobs=(TokenLogprobs(5, zero, 1, ()),) * 2) for zero in (0.0, -0.0))
    assert plus == minus
    assert first_difference("a", plus, minus) is not None
