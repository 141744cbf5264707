"""A JSON schema on the real model: kept, and the same when the request gives way after each token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from giveway.build import Model, build_on, load_model
from giveway.core.config import PreemptionChoice
from giveway.core.ids import RequestId
from giveway.core.request import FinishReason
from giveway.core.sampling import SamplingParams, StructuredOutput
from giveway.engine.outputs import RequestOutput
from giveway.options import EngineOptions
from tests.backends import OPTIONS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 1},
        "sights": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 2, "maxItems": 3},
    },
    "required": ["city", "country", "population", "sights"],
    "additionalProperties": False,
}
QUESTION = "What is the capital of France? Answer as JSON with city, country, population and sights."
ASKED = SamplingParams(temperature=0, max_tokens=200, structured_output=StructuredOutput(json_schema=SCHEMA))
NAME = RequestId("form")


@pytest.fixture(scope="module", params=OPTIONS)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    loaded = load_model(request.param)
    yield loaded
    loaded.backend.close()


def answer(model: Model, force: PreemptionChoice | None, **settings: Any) -> RequestOutput:
    """Answer the question, and after each token tell the request to give way."""
    options = EngineOptions(**{"num_kv_blocks": 24, "check_invariants": True, **settings})
    engine = build_on(model, options).engine
    engine.submit(model.encode_chat([{"role": "user", "content": QUESTION}]), ASKED, request_id=NAME)
    for _ in range(2000):
        for update in engine.step():
            if update.result is not None:
                return update.result
            if force is not None:
                engine.give_way(NAME, force)
    raise AssertionError("no end")


def test_a_schema_is_kept_by_the_real_model_also_when_it_gives_way_after_each_token(model: Model) -> None:
    calm = answer(model, None)
    value = json.loads(calm.text)
    assert list(value) == ["city", "country", "population", "sights"]
    assert value["city"] == "Paris"
    assert 2 <= len(value["sights"]) <= 3
    assert calm.finish_reason is FinishReason.STOP
    for force in (PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE):
        settings = {"swap_space": 1 << 27} if force is PreemptionChoice.SWAP else {"swap_space": 0}
        disturbed = answer(model, force, preemption_mode=force.value, **settings)
        assert (disturbed.token_ids, disturbed.text) == (calm.token_ids, calm.text)
        assert disturbed.stats.num_preemptions >= len(calm.token_ids) - 2
