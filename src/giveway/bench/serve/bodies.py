"""The JSON body of a request to the completions or the chat endpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from giveway.bench.serve.prompts import Prompt
from giveway.core.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one request asks for besides its prompt."""

    output_tokens: int
    is_streamed: bool = True
    priority: int | None = None  # None: not said
    service_tier: str | None = None  # None: not said


@dataclass(frozen=True, slots=True)
class BodyMaker:
    """Writes bodies with the settings that all requests of a run have."""

    model: str
    is_chat: bool
    ignores_eos: bool  # exactly the wished number of output tokens; fields that OpenAI's own servers do not know
    temperature: float | None = None  # None: the server's default
    extra: Mapping[str, Any] | None = None  # wins over everything; a field with the value None is left out

    def make(self, prompt: Prompt, wishes: Wishes) -> bytes:
        """Return the body. A chat prompt is one message of the user and must be text."""
        body: dict[str, Any] = {"model": self.model}
        if self.is_chat:
            if not isinstance(prompt, str):
                raise InvariantError("the chat endpoint takes text, not token ids")
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        body["max_tokens"] = wishes.output_tokens
        body["stream"] = wishes.is_streamed
        if wishes.is_streamed:
            body["stream_options"] = {"include_usage": True}
        if self.ignores_eos:
            body |= {"ignore_eos": True, "min_tokens": wishes.output_tokens}
        optional = {
            "temperature": self.temperature,
            "priority": wishes.priority,
            "service_tier": wishes.service_tier,
        }
        body |= {name: value for name, value in optional.items() if value is not None}
        body |= self.extra or {}
        for name in [name for name, value in (self.extra or {}).items() if value is None]:
            del body[name]
        return json.dumps(body, separators=(",", ":")).encode()
