"""The promise at every single place on the real model: preempted after each token of an answer, nothing changes.

One run a mode. In between an urgent question is answered, so that the blocks which were given up hold something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from giveway.build import Model, build_on, load_model
from giveway.core.config import PreemptionChoice
from giveway.core.ids import RequestId
from giveway.core.plan import Preemption, PreemptionMode, Tier
from giveway.core.sampling import SamplingParams
from giveway.engine.engine import Engine
from giveway.engine.outputs import RequestOutput
from giveway.options import EngineOptions
from tests.backends import OPTIONS

pytestmark = pytest.mark.long

NUM_TOKENS = 64
BLOCK = 16
STORY = RequestId("story")
ASKED = {
    "greedy": SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=NUM_TOKENS, logprobs=2, ignore_eos=True),
}
URGENT = SamplingParams(temperature=0, max_tokens=1)
SWAP, RECOMPUTE = PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE


@pytest.fixture(scope="module", params=OPTIONS)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    loaded = load_model(request.param)
    yield loaded
    loaded.backend.close()


@pytest.fixture(scope="module")
def prompt(model: Model) -> list[int]:
    return list(model.tokenizer.encode("The lighthouse keeper wrote in his diary that the night had been long and"))


@pytest.fixture(scope="module")
def calm(model: Model, prompt: list[int]) -> dict[str, RequestOutput]:
    answers = {}
    for way, params in ASKED.items():
        engine = build_on(model, EngineOptions(num_kv_blocks=16, swap_space=0)).engine
        engine.submit(prompt, params, request_id=STORY)
        (answers[way],) = [update.result for _ in range(80) for update in engine.step() if update.result is not None]
    return answers


def live(engine: Engine, prompt: list[int], params: SamplingParams, *, force: PreemptionChoice | None) -> RequestOutput:
    """Answer the story; after each of its tokens somebody urgent takes what it holds, or it is told to give way."""
    engine.submit(prompt, params, priority=20, request_id=STORY)
    result, is_open = None, False
    for _ in range(2000):
        for update in engine.step():
            if update.request_id != STORY:
                is_open = is_open and update.result is None
                continue
            result = update.result or result
            if update.token_ids and update.result is None and not is_open:
                number = len(engine.scheduler.requests[STORY].output_token_ids)
                engine.submit([number + place for place in range(3 * BLOCK - 3)], URGENT, priority=0)
                is_open = True
                if force is not None:
                    engine.give_way(STORY, force)
        if result is not None and not engine.has_work:
            return result
    raise AssertionError("the story does not end")


MODES: dict[str, tuple[dict[str, Any], PreemptionChoice | None]] = {
    "swap to the host": ({"swap_space": 1 << 28, "preemption_mode": "swap", "partial_preemption": False}, SWAP),
    "swap to the disk": ({"swap_space": 0, "swap_disk": 1 << 26, "preemption_mode": "swap"}, SWAP),
    "recompute": ({"swap_space": 0, "preemption_mode": "recompute", "enable_prefix_caching": False}, RECOMPUTE),
    "recompute, prefix cache": ({"swap_space": 0, "preemption_mode": "recompute"}, RECOMPUTE),
    "tail by swap": ({"swap_space": 1 << 28, "preemption_mode": "swap"}, None),
    "tail by swap to the disk": ({"swap_space": 0, "swap_disk": 1 << 26, "preemption_mode": "swap"}, None),
    "tail by drop": ({"swap_space": 0, "preemption_mode": "recompute", "enable_prefix_caching": False}, None),
    "auto": ({"swap_space": 1 << 28}, None),
    "seat only": ({"swap_space": 0, "max_num_seqs": 1, "num_kv_blocks": 32}, None),
}


@pytest.mark.parametrize("way", ASKED)
@pytest.mark.parametrize("mode", MODES)
def test_preempted_after_each_token_of_an_answer(
    model: Model,
    prompt: list[int],
    calm: dict[str, RequestOutput],
    tmp_path: Path,
    mode: str,
    way: str,
) -> None:
    settings, force = MODES[mode]
    # The pool holds the story alone, or the urgent question and a part of it.
    options = EngineOptions(**{"num_kv_blocks": 6, "swap_dir": str(tmp_path), "check_invariants": True, **settings})
    engine = build_on(model, options).engine
    seen: list[Preemption] = []
    engine.add_listener(lambda plan, _: seen.extend(plan.preemptions) if plan is not None else None)
    result = live(engine, prompt, ASKED[way], force=force)
    for name in ("token_ids", "text", "finish_reason", "logprobs"):
        assert getattr(result, name) == getattr(calm[way], name)
    assert len(result.token_ids) == NUM_TOKENS
    check_modes(mode, seen)


def check_modes(mode: str, seen: list[Preemption]) -> None:
    """Each run did what its name says, as often as there are tokens with another one behind them."""
    seen = [preemption for preemption in seen if preemption.victim == STORY]
    modes = Counter(preemption.mode for preemption in seen)
    tiers = {preemption.cost.tier for preemption in seen}
    if mode == "seat only":
        assert modes == {PreemptionMode.PAUSE: NUM_TOKENS - 1}
    elif mode == "auto":
        assert sum(modes.values()) > 20
    elif mode.startswith("tail"):
        wanted = PreemptionMode.SWAP if "swap" in mode else PreemptionMode.RECOMPUTE
        tails = [preemption for preemption in seen if preemption.mode is wanted and preemption.num_kept]
        assert len(tails) > 20, modes
    else:
        wanted = PreemptionMode.SWAP if "swap" in mode else PreemptionMode.RECOMPUTE
        assert modes[wanted] >= NUM_TOKENS - 1, modes
    if "disk" in mode:
        assert tiers <= {Tier.DISK, None}
        assert Tier.DISK in tiers
