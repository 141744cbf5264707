"""How the two kinds of requests look in answers: whole, and chunk by chunk. No waiting, no HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from giveway.core.ids import TokenId
from giveway.core.plan import TokenLogprobs
from giveway.engine.outputs import RequestOutput
from giveway.engine.tool_calls import ToolCall, ToolCallParser, ToolFormat
from giveway.server.answers import Scores, TokenTexts, usage_of, usage_of_results
from giveway.server.generation import Piece


@dataclass(frozen=True, slots=True)
class Heading:
    """What every part of an answer begins with."""

    api_id: str
    created: int  # seconds since 1970
    model: str
    service_tier: str
    fingerprint: str

    def body(self, kind: str) -> dict[str, Any]:
        """Return the members that all parts share. kind: `object`."""
        return {
            "id": self.api_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "service_tier": self.service_tier,
            "system_fingerprint": self.fingerprint,
        }


class Shape(Protocol):
    """The look of one API request's answer."""

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the body of a complete answer. results: by index of the choice."""

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks that come before any token."""

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the chunks of one piece of news; none if it says nothing yet."""

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the last chunk of a stream, which has no choices."""


class ChatShape:
    """A chat completion."""

    def __init__(
        self,
        heading: Heading,
        texts: TokenTexts,
        *,
        num_choices: int,
        has_logprobs: bool,
        tool_format: ToolFormat | None,
        scores_prompt: bool,
    ) -> None:
        """tool_format: how the model writes calls; None: no tool was offered, so none is looked for."""
        self._heading = heading
        self._texts = texts
        self._num_choices = num_choices
        self._has_logprobs = has_logprobs
        self._tool_format = tool_format
        self._scores_prompt = scores_prompt
        self._parsers: dict[int, ToolCallParser] = {}
        self._num_calls: dict[int, int] = {}

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the body of a complete answer."""
        body = self._heading.body("chat.completion")
        body["choices"] = [self._choice(index, result) for index, result in enumerate(results)]
        body["usage"] = usage_of_results(results)
        if self._scores_prompt:
            body["prompt_logprobs"] = self._texts.prompt_logprobs(results[0].prompt_logprobs)
        return body

    def _choice(self, index: int, result: RequestOutput) -> dict[str, Any]:
        content, calls = result.text, list[ToolCall]()
        if self._tool_format is not None:
            parser = self._new_parser(self._tool_format)
            parts = [parser.push(result.text), parser.finish()]
            content = "".join(part.content for part in parts)
            calls = [call for part in parts for call in part.calls]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content.strip() or None
            message["tool_calls"] = [_call_body(call) for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(result.logprobs or ()),
            "finish_reason": "tool_calls" if calls else result.finish_reason.value,
            "stop_reason": result.stop,
        }

    def opening(self) -> list[dict[str, Any]]:
        """Return a chunk for each choice that names its speaker."""
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._num_choices)]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the chunks of one piece of news."""
        update, index = piece.update, piece.index
        content, calls = update.text, list[ToolCall]()
        if self._tool_format is not None:
            content, calls = self._parse(index, update.text, is_last=update.result is not None)
        made = []
        logprobs = self._logprobs(update.logprobs) if update.logprobs else None
        if content or logprobs is not None:
            made.append(self._chunk(index, {"content": content}, logprobs))
        for call in calls:
            number = self._num_calls.get(index, 0)
            self._num_calls[index] = number + 1
            made.append(self._chunk(index, {"tool_calls": [{"index": number, **_call_body(call)}]}))
        if update.result is not None:
            reason = "tool_calls" if self._num_calls.get(index) else update.result.finish_reason.value
            made.append(self._chunk(index, {}, None, reason, update.result.stop))
        return made

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the chunk that ends a stream."""
        return {**self._heading.body("chat.completion.chunk"), "choices": [], "usage": usage}

    def _parse(self, index: int, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        assert self._tool_format is not None  # the caller looked
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._new_parser(self._tool_format)
        parts = [parser.push(text)]
        if is_last:
            parts.append(parser.finish())
        return "".join(part.content for part in parts), [call for part in parts for call in part.calls]

    @staticmethod
    def _new_parser(tool_format: ToolFormat) -> ToolCallParser:
        return ToolCallParser(tool_format, new_id=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def _logprobs(self, scores: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return self._texts.chat_logprobs(scores) if self._has_logprobs else None

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        stop_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        return {**self._heading.body("chat.completion.chunk"), "choices": [choice]}


def _call_body(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt that is repeated in front of the answers to it."""

    text: str
    token_ids: Sequence[TokenId]


class CompletionShape:
    """A completion. With echo the prompt stands in front of every answer to it."""

    def __init__(
        self,
        heading: Heading,
        texts: TokenTexts,
        *,
        echo: Sequence[EchoedPrompt] | None,
        num_logprobs: int | None,
        has_output: bool,
        scores_prompt: bool,
    ) -> None:
        """echo: the prompts, by place; None: not wanted. has_output: False for max_tokens 0, an echo alone."""
        self._heading = heading
        self._texts = texts
        self._echo = echo
        self._num_logprobs = num_logprobs
        self._has_output = has_output
        self._scores_prompt = scores_prompt
        self._lengths: dict[int, int] = {}  # characters of each choice so far, by its tokens
        self._opened: set[int] = set()  # choices whose echo has been given

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the body of a complete answer."""
        body = self._heading.body("text_completion")
        choices, prompt_index = [], -1
        scores: Scores = ()
        for index, result in enumerate(results):
            if result.index == 0:
                prompt_index, scores = prompt_index + 1, result.prompt_logprobs or ()
            choices.append(self._choice(index, prompt_index, result, scores))
        body["choices"] = choices
        usage = usage_of_results(results)
        body["usage"] = usage if self._has_output else without_output(usage)
        return body

    def _choice(self, index: int, prompt_index: int, result: RequestOutput, scores: Scores) -> dict[str, Any]:
        text = result.text if self._has_output else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": text if self._echo is None else self._echo[prompt_index].text + text,
            "logprobs": None,
            "finish_reason": result.finish_reason.value if self._has_output else "length",
            "stop_reason": result.stop if self._has_output else None,
        }
        if self._num_logprobs is not None:
            tokens = result.token_ids if self._has_output else ()
            values: Scores = (result.logprobs or ()) if self._has_output else ()
            if self._echo is not None:
                tokens, values = (*result.prompt_token_ids, *tokens), (*scores, *values)
            choice["logprobs"] = self._texts.completion_logprobs(tokens, values, 0)
        if self._scores_prompt and result.index == 0:
            choice["prompt_logprobs"] = self._texts.prompt_logprobs(result.prompt_logprobs)
        return choice

    def opening(self) -> list[dict[str, Any]]:
        """Return nothing: a prompt that is echoed comes with the first news, when its scores are known too."""
        return []

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the chunks of one piece of news."""
        update, index = piece.update, piece.index
        made = []
        if self._echo is not None and index not in self._opened:
            self._opened.add(index)
            made.append(self._echoed(piece))
        if self._has_output and (update.text or update.logprobs):
            logprobs = None
            if self._num_logprobs is not None:
                start = self._lengths.get(index, 0)
                logprobs = self._texts.completion_logprobs(update.token_ids, update.logprobs, start)
                self._lengths[index] = start + sum(map(len, logprobs["tokens"]))
            made.append(self._chunk(index, update.text, logprobs))
        if update.result is not None:
            reason = update.result.finish_reason.value if self._has_output else "length"
            made.append(self._chunk(index, "", None, reason, update.result.stop if self._has_output else None))
        return made

    def _echoed(self, piece: Piece) -> dict[str, Any]:
        assert self._echo is not None  # the caller looked
        prompt, logprobs = self._echo[piece.prompt_index], None
        scores = piece.update.prompt_logprobs
        if self._num_logprobs is not None and scores is not None:
            logprobs = self._texts.completion_logprobs(prompt.token_ids, scores, 0)
            self._lengths[piece.index] = sum(map(len, logprobs["tokens"]))
        return self._chunk(piece.index, prompt.text, logprobs)

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the chunk that ends a stream."""
        shown = usage if self._has_output else without_output(usage)
        return {**self._heading.body("text_completion"), "choices": [], "usage": shown}

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        stop_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        return {**self._heading.body("text_completion"), "choices": [choice]}


def without_output(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the usage of an answer that is an echo alone: the token computed for it is not the client's."""
    return usage_of(usage["prompt_tokens"], 0, usage["prompt_tokens_details"]["cached_tokens"])
