"""The OpenAPI description, and whatever a machine makes of it: no request ends in an error of ours."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.running import ANY_TIME_S, Running, running

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
OPERATIONS = [
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("post", "/tokenize"),
    ("post", "/detokenize"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{name}"),
    ("get", "/health"),
    ("get", "/version"),
    ("get", "/metrics"),
    ("get", "/v1/requests/{request_id}"),
    ("post", "/v1/files"),
    ("get", "/v1/files"),
    ("get", "/v1/files/{file_id}"),
    ("delete", "/v1/files/{file_id}"),
    ("get", "/v1/files/{file_id}/content"),
    ("post", "/v1/batches"),
    ("get", "/v1/batches"),
    ("get", "/v1/batches/{batch_id}"),
    ("post", "/v1/batches/{batch_id}/cancel"),
]
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
    "/tokenize": {"prompt": "hello"},
}
WITH_BODIES = 4  # times as many examples: there is more to get wrong


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    # A short context keeps answers short, whatever max_tokens says.
    data: Path = tmp_path_factory.mktemp("data")
    with running(
        num_kv_blocks=64, max_model_len=64, max_num_seqs=16, server={"has_batch_api": True, "data_dir": data}
    ) as server:
        yield server
        server.until_idle()


def described(server: Running) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def check(server: Running, method: str, path: str, num_examples: int) -> None:
    """Make requests from the description and look at the answers."""
    operation = described(server)[path][method]
    num_made = num_examples * (WITH_BODIES if method == "post" else 1)

    statuses: set[int] = set()

    @seed(7)
    @given(case=operation.as_strategy(), number=st.integers(0, 999))
    @settings(
        max_examples=num_made,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        deadline=None,
        database=None,
    )
    def ask(case: Any, number: int) -> None:
        if path in PLAIN and isinstance(case.body, dict):
            if number % 4:
                case.body = PLAIN[path] | some_of(case.body, number)
            if isinstance(case.body.get("n"), int):  # else it may ask for more answers than a test has time for
                case.body["n"] = min(case.body["n"], 3)
        statuses.add(case.call_and_validate(checks=CHECKS, timeout=ANY_TIME_S).status_code)

    ask()
    if path in PLAIN:
        assert 200 in statuses, "no request came as far as the model"


def some_of(body: dict[str, Any], number: int) -> dict[str, Any]:
    """Choose up to three fields: of a body with very many, one that is wrong would hide all the others."""
    names = sorted(body, key=repr)
    rng = random.Random(number)
    return {name: body[name] for name in rng.sample(names, min(len(names), number % 4))}


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda each: each)
def test_requests_made_from_the_description_never_end_in_an_error_of_ours(
    served: Running, method: str, path: str
) -> None:
    check(served, method, path, 10)


@pytest.mark.long
@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda each: each)
def test_a_great_many_requests_made_from_the_description_never_end_in_an_error_of_ours(
    served: Running, method: str, path: str
) -> None:
    check(served, method, path, 100)


def test_every_route_is_described_with_its_body_its_answers_and_openais_errors(served: Running) -> None:
    description = served.get("/openapi.json").json()
    found = {(method, path) for path, operations in description["paths"].items() for method in operations}
    assert found == set(OPERATIONS)
    assert not {"HTTPValidationError", "ValidationError"} & description["components"]["schemas"].keys()
    for method, path in OPERATIONS:
        operation = description["paths"][path][method]
        assert set(operation["responses"]) == {"200", "4XX", "5XX"}
        refused = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
        assert refused == {"$ref": "#/components/schemas/Error"}
        assert "$defs" not in json.dumps(operation), "a reference that leads nowhere"
        if method == "post" and not path.endswith("/cancel"):
            assert operation["requestBody"]["required"]
    streamed = description["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert set(streamed) == {"application/json", "text/event-stream"}
