"""The lines of batches as requests: the same bodies, the same answers, at the class of the Batch API."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from giveway.server.access import Keyring
from giveway.server.api import Api
from giveway.server.batch_jobs.records import BatchLine, LineAnswer
from giveway.server.http_errors import ApiError
from giveway.server.openai_types import ChatBody, CompletionBody, wrong_shape

_Body = TypeVar("_Body", bound=BaseModel)


class BatchLines:
    """Answers single lines."""

    def __init__(self, api: Api, keyring: Keyring, *, priority: int) -> None:
        """priority: class of every line, whatever its body says; a key's ceiling may make it less urgent still."""
        self._api = api
        self._keyring = keyring
        self._priority = priority

    async def run(self, line: BatchLine) -> LineAnswer:
        """Answer a line. What is wrong with it is an answer too; cancelling takes the request back."""
        try:
            body = await self._answer(line)
        except ApiError as error:
            if error.code == "engine_error":  # the engine's trouble and not the line's: it is run again
                return LineAnswer(503, error.body(), uuid.uuid4().hex)
            return LineAnswer(error.status, error.body(), uuid.uuid4().hex)
        return LineAnswer(200, body, str(body["id"]))

    async def _answer(self, line: BatchLine) -> dict[str, Any]:
        caller = self._keyring.holder(line.owner)
        if caller is None:
            raise ApiError(
                401, "the API key that this batch was sent with is not known any more", code="invalid_api_key"
            )
        priority = max(self._priority, caller.ceiling)
        if line.url == "/v1/chat/completions":
            return await self._api.run_chat(_parsed(ChatBody, line.body), caller, priority=priority)
        if line.url == "/v1/completions":
            return await self._api.run_completion(_parsed(CompletionBody, line.body), caller, priority=priority)
        raise ApiError(404, f"there is no {line.url[:100]} for batches", code="unknown_url")


def _parsed(kind: type[_Body], body: Mapping[str, Any]) -> _Body:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise wrong_shape(error.errors(include_url=False, include_input=False)) from error
