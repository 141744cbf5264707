"""What the routes do: from a checked body to an answer. HTTP itself is in app.py, limits are in generation.py."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from giveway.core.errors import InvalidRequestError
from giveway.core.sampling import StructuredOutput
from giveway.engine.intake import Prompt, check_text_length
from giveway.engine.tool_calls import ToolFormat, check_tools, constraint_for_tools
from giveway.server.access import Caller
from giveway.server.answers import TokenTexts, usage_of
from giveway.server.classes import PriorityClasses
from giveway.server.generation import Asked, ClientGoneError, Generation, GenerationDesk, Piece, bad_request
from giveway.server.http_errors import CLIENT_CLOSED, ApiError
from giveway.server.openai_types import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    NamedTool,
    SamplingBody,
    StreamOptions,
    TokenizeBody,
    unknown_fields,
)
from giveway.server.served_model import ServedModel
from giveway.server.settings import ServerLimits
from giveway.server.shapes import ChatShape, CompletionShape, EchoedPrompt, Heading, Shape
from giveway.server.streaming import KEEP_ALIVE, EventStream, events, unless_gone
from giveway.server.wishes import (
    alias_of,
    chat_sampling,
    completion_sampling,
    messages_of,
    priority_of,
    prompts_of,
    tier_served,
)

MAX_DETOKENIZED = 1 << 17  # ids in one request


@dataclass(frozen=True, slots=True)
class _Order:
    """An API request, ready to be started, and what its answer will look like."""

    asked: Asked
    stream_options: StreamOptions | None

    def shape(self, api: Api, generation: Generation) -> Shape:
        """Return the look of the answer, once the prompts are known."""
        raise NotImplementedError

    def heading(self, api: Api, generation: Generation) -> Heading:
        """Return what every part of the answer begins with."""
        tier = tier_served(self.asked.priority, api.classes)
        return Heading(generation.api_id, int(time.time()), api.model.name, tier, api.model.fingerprint)


@dataclass(frozen=True, slots=True)
class _ChatOrder(_Order):
    tool_format: ToolFormat | None

    def shape(self, api: Api, generation: Generation) -> Shape:
        return ChatShape(
            self.heading(api, generation),
            api.texts,
            num_choices=self.asked.num_answers,
            has_logprobs=self.asked.sampling.logprobs is not None,
            tool_format=self.tool_format,
            scores_prompt=self.asked.sampling.prompt_logprobs is not None,
        )


@dataclass(frozen=True, slots=True)
class _CompletionOrder(_Order):
    has_echo: bool
    has_output: bool
    scores_prompt: bool

    def shape(self, api: Api, generation: Generation) -> Shape:
        echo = None
        if self.has_echo:
            echo = [
                EchoedPrompt(
                    api.texts.decode(submission.branches[0].prompt_token_ids)
                    if submission.prompt is None
                    else submission.prompt,
                    submission.branches[0].prompt_token_ids,
                )
                for submission in generation.submissions
            ]
        return CompletionShape(
            self.heading(api, generation),
            api.texts,
            echo=echo,
            num_logprobs=self.asked.sampling.logprobs,
            has_output=self.has_output,
            scores_prompt=self.scores_prompt,
        )


class Api:
    """The endpoints that work on the model."""

    def __init__(
        self,
        desk: GenerationDesk,
        model: ServedModel,
        classes: PriorityClasses,
        limits: ServerLimits,
        *,
        default_priority: int,
    ) -> None:
        self.model = model
        self.classes = classes
        self.texts = TokenTexts(model.tokenizer)
        self._desk = desk
        self._limits = limits
        self._default_priority = default_priority

    # Chat and completions

    async def chat(self, request: Request, body: ChatBody, caller: Caller) -> Response:
        """POST /v1/chat/completions."""
        alias = alias_of(body, request.state.request_id)
        return await self._answer(request, body, self._chat_order(body, caller, alias=alias))

    async def completion(self, request: Request, body: CompletionBody, caller: Caller) -> Response:
        """POST /v1/completions."""
        alias = alias_of(body, request.state.request_id)
        return await self._answer(request, body, self._completion_order(body, caller, alias=alias))

    async def run_chat(self, body: ChatBody, caller: Caller, *, priority: int) -> dict[str, Any]:
        """Answer a line of a batch. Raises ApiError."""
        return await self._complete(self._chat_order(body, caller, priority=priority))

    async def run_completion(self, body: CompletionBody, caller: Caller, *, priority: int) -> dict[str, Any]:
        """Answer a line of a batch. Raises ApiError."""
        return await self._complete(self._completion_order(body, caller, priority=priority))

    def _chat_order(
        self,
        body: ChatBody,
        caller: Caller,
        *,
        alias: str | None = None,
        priority: int | None = None,
    ) -> _ChatOrder:
        self._check_model(body.model)
        messages = messages_of(body.messages)
        tool_format, structured = self._tools(body)
        encode = partial(self._encode_chat, messages, body, has_tools=tool_format is not None)
        sampling = chat_sampling(body, structured, shows_control=tool_format is not None and tool_format.is_control)
        asked = Asked(
            kind="chatcmpl",
            endpoint="/v1/chat/completions",
            prompts=lambda: [encode()],
            num_prompts=1,
            sampling=sampling,
            priority=self._priority(body, caller) if priority is None else priority,
            caller=caller,
            alias=alias,
            cache_salt=body.cache_salt,
            is_stream=bool(body.stream),
            is_batch=priority is not None,
            form_field=_form_field(body) if structured is None else "tools",
        )
        return _ChatOrder(asked, body.stream_options, tool_format)

    def _encode_chat(
        self, messages: Sequence[dict[str, Any]], body: ChatBody | TokenizeBody, *, has_tools: bool
    ) -> Prompt:
        further = dict(body.chat_template_kwargs or {})
        reserved = further.keys() & {"messages", "tools", "add_generation_prompt"}
        if reserved:
            raise InvalidRequestError(f"chat_template_kwargs may not hold {sorted(reserved)[0]}")
        if has_tools:
            further["tools"] = body.tools
        if not isinstance(body, TokenizeBody):
            num_characters = sum(len(message["content"]) for message in messages)
            check_text_length(num_characters, self.model.tokenizer, self.model.max_model_len)
        add_generation_prompt = True if body.add_generation_prompt is None else body.add_generation_prompt
        return self.model.encode_chat(messages, add_generation_prompt=add_generation_prompt, **further)

    def _tools(self, body: ChatBody) -> tuple[ToolFormat | None, StructuredOutput | None]:
        """Return how calls are written, if any tool is offered, and the form that the choice of a tool asks for."""
        choice: str | None = (
            body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else body.tool_choice
        )
        is_named = isinstance(body.tool_choice, NamedTool)
        if not is_named and choice not in (None, "none", "auto", "required"):
            raise ApiError(
                400, f"tool_choice is {choice!r}; it must be none, auto, required or a function", param="tool_choice"
            )
        if not body.tools:
            if is_named or choice == "required":
                raise ApiError(400, "tool_choice asks for a call, but no tools are given", param="tool_choice")
            return None, None
        try:
            check_tools(body.tools)
            if choice == "none":
                return None, None
            tool_format = self.model.tool_format
            if tool_format is None:
                raise ApiError(
                    400,
                    f"{self.model.name} takes no tools: its chat template has no place for them",
                    param="tools",
                    code="tools_not_supported",
                )
            structured = constraint_for_tools(
                tool_format,
                body.tools,
                choice or "auto",
                is_named=is_named,
                is_parallel=body.parallel_tool_calls is not False,
                marker_token_id=self.model.tool_marker_id,
            )
            return tool_format, structured
        except InvalidRequestError as error:
            raise bad_request(error) from error

    def _completion_order(
        self,
        body: CompletionBody,
        caller: Caller,
        *,
        alias: str | None = None,
        priority: int | None = None,
    ) -> _CompletionOrder:
        self._check_model(body.model)
        prompts = prompts_of(body, self._limits.max_prompts)
        asked = Asked(
            kind="cmpl",
            endpoint="/v1/completions",
            prompts=partial(self._plain_prompts, prompts, body.add_special_tokens),
            num_prompts=len(prompts),
            sampling=completion_sampling(body),
            priority=self._priority(body, caller) if priority is None else priority,
            caller=caller,
            alias=alias,
            cache_salt=body.cache_salt,
            is_stream=bool(body.stream),
            is_batch=priority is not None,
            form_field=_form_field(body),
        )
        return _CompletionOrder(
            asked,
            body.stream_options,
            has_echo=bool(body.echo),
            has_output=body.max_tokens != 0,
            scores_prompt=body.prompt_logprobs is not None,
        )

    def _plain_prompts(self, prompts: Sequence[Prompt], add_special_tokens: bool | None) -> Sequence[Prompt]:
        if add_special_tokens is not False:
            return prompts
        encode = self.model.tokenizer.encode
        return [encode(each, add_special_tokens=False) if isinstance(each, str) else each for each in prompts]

    def _priority(self, body: SamplingBody, caller: Caller) -> int:
        return priority_of(body, caller, self.classes, self._default_priority)

    def notices(self, body: BaseModel, caller: Caller) -> list[str]:
        """Return what the client should know although its request is served."""
        notices = []
        unknown = unknown_fields(body)
        if unknown:
            notices.append(f"ignored unknown fields: {', '.join(unknown)}")
        if isinstance(body, SamplingBody):
            wanted = priority_of(body, replace(caller, ceiling=0), self.classes, self._default_priority)
            if wanted < caller.ceiling:
                notices.append(f"priority {wanted} was lowered to {caller.ceiling}, the ceiling of this key")
        return notices

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.model.names:
            raise ApiError(
                404,
                f"the model {name[:200]!r} is not served here; there is {', '.join(self.model.names)}",
                param="model",
                code="model_not_found",
            )

    # From start to answer

    async def _answer(self, request: Request, body: SamplingBody, order: _Order) -> Response:
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options has a meaning only with stream", param="stream_options")
        if body.stream:
            return await self._stream(request, order)
        try:
            return JSONResponse(await unless_gone(request.receive, self._complete(order)))
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED)

    async def _complete(self, order: _Order) -> dict[str, Any]:
        async with self._desk.generation(order.asked) as generation:
            return order.shape(self, generation).whole(await generation.all())

    async def _stream(self, request: Request, order: _Order) -> Response:
        try:
            async with AsyncExitStack() as holding:  # it may have started when this task is cancelled
                start = holding.enter_async_context(self._desk.generation(order.asked))
                generation = await unless_gone(request.receive, start)
                stream = EventStream(self._chunks(generation, order), holding.pop_all())
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED)
        return stream

    async def _chunks(self, generation: Generation, order: _Order) -> AsyncIterator[bytes]:
        shape = order.shape(self, generation)
        tally = _StreamUsage(generation, order.stream_options)
        yield events(map(tally.attach, shape.opening()))
        while not generation.has_ended:
            pieces = await generation.next(self._limits.keep_alive_s)
            made: list[dict[str, Any]] = []
            for piece in pieces:
                tally.count(piece)
                made += map(tally.attach, shape.chunks(piece))
            if made:
                yield events(made)
            elif not pieces:
                yield KEEP_ALIVE
        if tally.is_wanted:
            yield events([shape.usage_chunk(tally.usage())])

    # Text

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """POST /tokenize."""
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "exactly one of prompt and messages is needed", param="prompt")
        from asyncio import to_thread

        try:
            ids = await to_thread(self._token_ids, body)
        except InvalidRequestError as error:
            raise bad_request(error) from error
        answer = {"count": len(ids), "max_model_len": self.model.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [self.texts.text(token) for token in ids]
        return answer

    def _token_ids(self, body: TokenizeBody) -> list[int]:
        if body.messages is not None:
            if body.tools:
                check_tools(body.tools)
            return list(self._encode_chat(messages_of(body.messages), body, has_tools=bool(body.tools)))  # type: ignore[arg-type]
        return self.model.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """POST /detokenize."""
        self._check_model(body.model)
        if len(body.tokens) > max(self.model.max_model_len, MAX_DETOKENIZED):
            raise ApiError(400, f"tokens has {len(body.tokens)} ids; no text here has so many", param="tokens")
        vocab_size = self.model.vocab_size
        for token in body.tokens:
            if not 0 <= token < vocab_size:
                raise ApiError(400, f"tokens: {token} is not an id from 0 to {vocab_size - 1}", param="tokens")
        return {"prompt": self.texts.decode(body.tokens)}


def _form_field(body: SamplingBody) -> str:
    return "response_format" if body.structured_outputs is None else "structured_outputs"


class _StreamUsage:
    """The token counts of a stream, as far as it has come."""

    def __init__(self, generation: Generation, options: StreamOptions | None) -> None:
        self._generation = generation
        self.is_wanted = options is not None and bool(options.include_usage)
        self._is_continuous = self.is_wanted and options is not None and bool(options.continuous_usage_stats)
        self._num_prompt = sum(len(each.branches[0].prompt_token_ids) for each in generation.submissions)
        self._num_output = 0

    def count(self, piece: Piece) -> None:
        """Count the tokens of a piece of news."""
        self._num_output += len(piece.update.token_ids)

    def usage(self) -> dict[str, Any]:
        """Return the usage so far."""
        results = self._generation.results.values()
        num_cached = sum(result.stats.num_cached_tokens for result in results if result.index == 0)
        return usage_of(self._num_prompt, self._num_output, num_cached)

    def attach(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Put the usage into a chunk, where it is wanted: null in all but the last, unless it is wanted in all."""
        if self.is_wanted:
            chunk["usage"] = self.usage() if self._is_continuous else None
        return chunk
