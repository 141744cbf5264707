"""Bodies of requests as OpenAI's API has them, with the further fields of vLLM: shapes and types only.

A field that is not known is kept and told to the client in a header; a known one of a wrong type is an error. Ranges
are checked where the values are used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from giveway.server.http_errors import ApiError

Number = Annotated[float, Field(allow_inf_nan=False)]
TokenIds = list[int]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(_Body):
    """What a stream has besides its tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(_Body):
    """The form of an answer, as vLLM has it: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingBody(_Body):
    """What both kinds of requests have."""

    model: str | None = Field(default=None, description="A name from /v1/models. Absent: the only one there is.")
    max_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Number] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    user: str | None = None
    service_tier: str | None = Field(default=None, description="priority, default, auto or flex.")
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    response_format: dict[str, Any] | None = Field(default=None, description="text, json_object or json_schema.")
    # vLLM's
    priority: int | None = Field(default=None, description="Smaller is more urgent: 0 to 100.")
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class TextPart(_Body):
    """A piece of a message."""

    type: Literal["text", "input_text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class OtherPart(_Body):
    """A piece of a message that no model here understands; refused with its place."""

    type: str


class FunctionCall(_Body):
    """A function that the model called, with JSON in a text."""

    name: str
    arguments: str = ""


class ToolCall(_Body):
    """A call in an earlier answer of the model."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | OtherPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class NamedFunction(_Body):
    """The name of a function."""

    name: str


class NamedTool(_Body):
    """The one tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: Any = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(_Body):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


def unknown_fields(body: BaseModel, where: str = "") -> list[str]:
    """Return the places of all fields that nobody here knows, such as `stream_options.foo`."""
    found = [f"{where}{name}" for name in (body.model_extra or {})]
    for name in type(body).model_fields:
        value = getattr(body, name)
        parts = value if isinstance(value, list) else [value]
        for number, part in enumerate(parts):
            if isinstance(part, BaseModel) and not isinstance(part, OtherPart):
                place = f"{name}.{number}" if isinstance(value, list) else name
                found += unknown_fields(part, f"{where}{place}.")
    return found


_TYPE_TAG = re.compile(r"(str|int|float|bool|list\[.*\]|[A-Z]\w*)")  # how pydantic names the choices of a union


def wrong_shape(found: Sequence[Mapping[str, Any]], *, num_skipped: int = 0) -> ApiError:
    """Return the answer to a body of a wrong shape: the place, and what was expected there, not what stood there.

    found: what pydantic says, at least one complaint. num_skipped: leading parts of a place that are not the body's.
    """

    def place_of(complaint: Mapping[str, Any]) -> str | None:
        parts = complaint["loc"][num_skipped:]
        fields = [str(part) for part in parts if isinstance(part, int) or not _TYPE_TAG.fullmatch(part)]
        return ".".join(fields) or None

    param = place_of(found[0])
    # A field that may be of several types has a complaint for each of them.
    complaints = dict.fromkeys(str(each["msg"]) for each in found if place_of(each) == param)
    return ApiError(400, f"{param or 'the body'}: {'; or: '.join(complaints)}", param=param)
