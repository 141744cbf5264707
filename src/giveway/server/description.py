"""The OpenAPI description: what FastAPI knows of the routes, and what it cannot: errors, streams, answers, keys."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

_JSON, _METHODS = "application/json", ("get", "post", "put", "delete", "patch")
_NOT_OURS = ("HTTPValidationError", "ValidationError")  # FastAPI's own errors, which no client ever sees here
_TEXT: dict[str, Any] = {"type": "string"}
_NUMBER: dict[str, Any] = {"type": "integer"}
_OPTIONAL_TEXT: dict[str, Any] = {"type": ["string", "null"]}

_ERROR = {
    "title": "Error",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _OPTIONAL_TEXT, "code": _OPTIONAL_TEXT},
            "additionalProperties": False,
        }
    },
}


def _object(kind: str | None, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has all of these. kind: what its `object` says; None: it has none."""
    told = properties if kind is None else {"object": {"const": kind}, **properties}
    return {"type": "object", "required": list(told), "properties": told}


def _list(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _page(item: dict[str, Any]) -> dict[str, Any]:
    return _object(
        "list", data=_list(item), first_id=_OPTIONAL_TEXT, last_id=_OPTIONAL_TEXT, has_more={"type": "boolean"}
    )


_USAGE = _object(None, prompt_tokens=_NUMBER, completion_tokens=_NUMBER, total_tokens=_NUMBER)
_HEADING = {"id": _TEXT, "created": _NUMBER, "model": _TEXT, "service_tier": _TEXT, "system_fingerprint": _TEXT}
_CHOICE = {"index": _NUMBER, "finish_reason": _TEXT, "logprobs": {"type": ["object", "null"]}}
_MESSAGE = _object(None, role={"const": "assistant"}, content=_OPTIONAL_TEXT)
_MODEL = _object("model", id=_TEXT, created=_NUMBER, owned_by=_TEXT, max_model_len=_NUMBER)
_FILE = _object(
    "file",
    id=_TEXT,
    bytes=_NUMBER,
    created_at=_NUMBER,
    filename=_TEXT,
    purpose=_TEXT,
    expires_at={"type": ["integer", "null"]},
)
_BATCH = _object(
    "batch",
    id=_TEXT,
    endpoint=_TEXT,
    input_file_id=_TEXT,
    completion_window=_TEXT,
    status=_TEXT,
    created_at=_NUMBER,
    request_counts=_object(None, total=_NUMBER, completed=_NUMBER, failed=_NUMBER),
    output_file_id=_OPTIONAL_TEXT,
    error_file_id=_OPTIONAL_TEXT,
)

# Bodies of answers, by operation; others are not told beyond their type.
_ANSWERS: dict[tuple[str, str], dict[str, Any]] = {
    ("post", "/v1/chat/completions"): _object(
        "chat.completion", **_HEADING, choices=_list(_object(None, message=_MESSAGE, **_CHOICE)), usage=_USAGE
    ),
    ("post", "/v1/completions"): _object(
        "text_completion", **_HEADING, choices=_list(_object(None, text=_TEXT, **_CHOICE)), usage=_USAGE
    ),
    ("post", "/tokenize"): _object(None, count=_NUMBER, max_model_len=_NUMBER, tokens=_list(_NUMBER)),
    ("post", "/detokenize"): _object(None, prompt=_TEXT),
    ("get", "/v1/models"): _object("list", data=_list(_MODEL)),
    ("get", "/v1/models/{name}"): _MODEL,
    ("get", "/v1/requests/{request_id}"): _object("giveway.request", id=_TEXT, state=_TEXT, explanation=_TEXT),
    ("get", "/health"): _object(None, status={"const": "ok"}),
    ("get", "/version"): _object(None, version=_TEXT),
    ("post", "/v1/files"): _FILE,
    ("get", "/v1/files"): _page(_FILE),
    ("get", "/v1/files/{file_id}"): _FILE,
    ("delete", "/v1/files/{file_id}"): _object("file", id=_TEXT, deleted={"const": True}),
    ("post", "/v1/batches"): _BATCH,
    ("get", "/v1/batches"): _page(_BATCH),
    ("get", "/v1/batches/{batch_id}"): _BATCH,
    ("post", "/v1/batches/{batch_id}/cancel"): _BATCH,
}
_OTHER_TYPES = {
    ("get", "/metrics"): "text/plain",
    ("get", "/v1/files/{file_id}/content"): "application/octet-stream",
}
_STREAMED = (("post", "/v1/chat/completions"), ("post", "/v1/completions"))


class DescribedApp(FastAPI):
    """An application that describes itself as it is."""

    def openapi(self) -> dict[str, Any]:
        """Return the description; made once."""
        if not self.openapi_schema:
            _complete(super().openapi())
        return super().openapi()


def _complete(description: dict[str, Any]) -> None:
    components = description.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in _NOT_OURS:
        schemas.pop(name, None)
    schemas["Error"] = _ERROR
    components["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "Only where the server was given keys."}
    }
    description["security"] = [{}, {"key": []}]
    for path, operations in description["paths"].items():
        for method in _METHODS:
            if method in operations:
                operations[method]["responses"] = _responses(method, path)
                body = operations[method].get("requestBody", {})
                for content in body.get("content", {}).values():
                    schemas.update(content["schema"].pop("$defs", {}))


def _responses(method: str, path: str) -> dict[str, Any]:
    place = (method, path)
    content: dict[str, Any] = {_OTHER_TYPES.get(place, _JSON): {"schema": _ANSWERS.get(place, _TEXT)}}
    if place in _STREAMED:
        # Of an event every reader of descriptions makes something else: a text, an object, a chunk. No schema then.
        content["text/event-stream"] = {"example": 'data: {"object": "..."}\n\ndata: [DONE]\n\n'}
    error = {"content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    answers = {
        "200": {"description": "Done.", "content": content},
        "4XX": {"description": "The request is wrong, may not be made, or comes at a bad time.", **error},
        "5XX": {"description": "The server cannot serve it now, or failed.", **error},
    }
    if place == ("get", "/health"):
        body = {**_ERROR, "required": ["status", "error"], "properties": {"status": _TEXT, **_ERROR["properties"]}}  # type: ignore[dict-item]
        answers["5XX"] = {"description": "It cannot serve.", "content": {_JSON: {"schema": body}}}
    return answers
