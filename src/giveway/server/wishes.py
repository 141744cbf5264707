"""From the body of a request to what the engine is asked for: sampling, class, prompts. A wrong body is an ApiError."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from giveway.core.config import clamp_class
from giveway.core.errors import InvalidRequestError
from giveway.core.sampling import MAX_LOGPROBS, SamplingParams, StructuredOutput
from giveway.engine.intake import Prompt
from giveway.engine.response_format import parse_response_format
from giveway.server.access import Caller
from giveway.server.classes import PriorityClasses
from giveway.server.edge import SAFE_ID
from giveway.server.generation import bad_request
from giveway.server.http_errors import ApiError
from giveway.server.openai_types import (
    ChatBody,
    CompletionBody,
    Message,
    OtherPart,
    SamplingBody,
    TextPart,
)

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_SAME_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)


# Who goes first


def priority_of(body: SamplingBody, caller: Caller, classes: PriorityClasses, default_priority: int) -> int:
    """Return the class of a request: its integer, else its tier, its key's, or the server's; under the ceiling."""
    wanted: int
    if body.priority is not None:
        wanted = clamp_class(body.priority)
    elif body.service_tier is not None:
        wanted = _class_of_tier(body.service_tier, caller, classes, default_priority)
    else:
        wanted = default_priority if caller.default_priority is None else caller.default_priority
    return max(wanted, caller.ceiling)


def _class_of_tier(tier: str, caller: Caller, classes: PriorityClasses, default_priority: int) -> int:
    if tier in ("auto", "default"):
        return default_priority if caller.default_priority is None else caller.default_priority
    start = None if tier == "batch" else classes.start_of(tier)
    if start is None:
        known = ", ".join(name for name in classes.names if name != "batch")
        raise ApiError(400, f"service_tier is {tier[:60]!r}; it must be one of auto, {known}", param="service_tier")
    return start


def tier_served(priority: int, classes: PriorityClasses) -> str:
    """Return the name of the class that serves a request; OpenAI knows none behind flex: they are called that."""
    flex = classes.start_of("flex")
    return "flex" if flex is not None and priority >= flex else classes.name_of(priority)


# Fields of vLLM that would change the answer: to pass over them, as over unknown ones, would give a wrong one.
_REFUSED_FIELDS = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "allowed_token_ids": None,
    "continue_final_message": None,
    "use_beam_search": None,
    "truncate_prompt_tokens": None,
}


def check_fields(body: SamplingBody) -> None:
    """Refuse fields that other servers know and that cannot be passed over."""
    for name, value in (body.model_extra or {}).items():
        if name in _REFUSED_FIELDS and value not in (None, False):
            instead = _REFUSED_FIELDS[name]
            hint = "is not supported" if instead is None else f"is not known any more: use {instead}"
            raise ApiError(400, f"{name} {hint}", param=name)


def alias_of(body: SamplingBody, header_id: str) -> str:
    """Return the further name that a client gives its request: in the body as with vLLM, else in the header."""
    if body.request_id is None:
        return header_id
    if not SAFE_ID.fullmatch(body.request_id):
        raise ApiError(
            400, "request_id must have 1 to 128 letters, digits and any of . _ : - (ASCII)", param="request_id"
        )
    return body.request_id


# Sampling


def sampling_of(body: SamplingBody, **further: Any) -> SamplingParams:
    """Return the sampling of a request. further: fields that the two kinds of requests spell differently."""
    check_fields(body)
    values = {name: getattr(body, name) for name in _SAME_NAMES}
    values["stop"] = _stops(body.stop)
    values["stop_token_ids"] = body.stop_token_ids or ()
    values["bad_words"] = body.bad_words or ()
    values["logit_bias"] = _logit_bias(body.logit_bias)
    try:
        values["structured_output"] = _structured_output(body)
        return SamplingParams(**(values | further))
    except InvalidRequestError as error:
        raise bad_request(error) from error


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float]:
    made = {}
    for token, value in (bias or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 20):
            raise ApiError(400, f"logit_bias: {token[:40]!r} is not a token id", param="logit_bias")
        made[int(token)] = value
    return made


def _structured_output(body: SamplingBody) -> StructuredOutput | None:
    if body.response_format is not None and body.structured_outputs is not None:
        raise ApiError(400, "response_format and structured_outputs cannot both be given", param="structured_outputs")
    wanted = body.structured_outputs
    if wanted is None:
        return parse_response_format(body.response_format)
    try:
        return StructuredOutput(
            json_object=bool(wanted.json_object),
            json_schema=wanted.json_,
            regex=wanted.regex,
            choice=None if wanted.choice is None else tuple(wanted.choice),
            grammar=wanted.grammar,
        )
    except InvalidRequestError as error:
        field = str(error).replace("structured_output.json_schema", "structured_outputs.json", 1)
        raise InvalidRequestError(re.sub(r"^structured_output\b", "structured_outputs", field)) from error


# Completions


def completion_sampling(body: CompletionBody) -> SamplingParams:
    """Return the sampling of a completion. max_tokens 0 stands for 1 here: the caller leaves the token out."""
    if body.suffix:
        raise ApiError(400, "suffix is not supported: the model completes a prompt at its end", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, f"best_of is {body.best_of}; only the value of n is supported", param="best_of")
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0:
        if not body.echo:
            raise ApiError(400, "max_tokens is 0, which has a meaning only with echo", param="max_tokens")
        max_tokens = 1
    scores = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        scores = body.logprobs
        if body.stream and (body.n or 1) > 1:
            raise ApiError(400, "a stream with echo and logprobs has one choice only: n is above 1", param="n")
    elif body.stream and scores is not None:
        raise ApiError(400, "prompt_logprobs are not given in a stream", param="prompt_logprobs")
    return sampling_of(body, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=scores)


def prompts_of(body: CompletionBody, max_prompts: int) -> list[Prompt]:
    """Return the prompts of a completion: texts or lists of token ids."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, "prompt is an empty list; at least one prompt is needed", param="prompt")
    prompts: list[Prompt] = []
    for each in given:
        if isinstance(each, int):
            return [[token for token in given if isinstance(token, int)]]  # the types allow no mixture
        prompts.append(each)
    if len(prompts) > max_prompts:
        raise ApiError(400, f"prompt has {len(prompts)} prompts; at most {max_prompts} are taken", param="prompt")
    return prompts


# Chat


def chat_sampling(
    body: ChatBody, structured: StructuredOutput | None = None, *, shows_control: bool = False
) -> SamplingParams:
    """Return the sampling of a chat request.

    structured: the form that a tool choice asks for. shows_control: calls begin with a control token, so that these
    must not be left out of the text.
    """
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if max_tokens is not None and max_tokens < 1:
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise ApiError(400, f"{field} is {max_tokens}; at least 1", param=field)
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        limit = f"it must be between 0 and {MAX_LOGPROBS}"
        raise ApiError(400, f"top_logprobs is {body.top_logprobs}; {limit}", param="top_logprobs")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.functions is not None or body.function_call is not None:
        raise ApiError(400, "functions and function_call are out of use: send tools and tool_choice", param="functions")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs are not given in a stream", param="prompt_logprobs")
    further: dict[str, Any] = {} if structured is None else {"structured_output": structured}
    if shows_control:
        further["skip_special_tokens"] = False
    return sampling_of(
        body, max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None, **further
    )


def messages_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a conversation as chat templates expect it: plain mappings, every content a text.

    `developer` becomes `system`, the word of the models; arguments of earlier calls become objects.
    """
    if not messages:
        raise ApiError(400, "messages is empty; at least one message is needed", param="messages")
    return [_message(message, f"messages.{place}") for place, message in enumerate(messages)]


def _message(message: Message, where: str) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    content = _content(message, where)
    if content is None and not message.tool_calls:
        raise ApiError(400, f"{where}.content is missing", param=f"{where}.content")
    made["content"] = "" if content is None else content
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            made[name] = getattr(message, name)
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"{where}.tool_calls.{place}.function.arguments"),
                },
            }
            for place, call in enumerate(message.tool_calls)
        ]
    return made


def _content(message: Message, where: str) -> str | None:
    if message.content is None or isinstance(message.content, str):
        return message.content if message.content is not None else message.refusal
    texts = []
    for place, part in enumerate(message.content):
        param = f"{where}.content.{place}"
        if isinstance(part, OtherPart):
            raise ApiError(400, f"{param} is of type {part.type!r}; only text is understood here", param=param)
        texts.append(_text_of(part, param))
    return "\n".join(texts)


def _text_of(part: TextPart, param: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise ApiError(400, f"{param}.text is missing", param=f"{param}.text")
    return text


def _arguments(text: str, param: str) -> Any:
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{param} is not JSON: {error}", param=param) from error
    if not isinstance(value, dict):
        raise ApiError(400, f"{param} is not a JSON object", param=param)
    return value
