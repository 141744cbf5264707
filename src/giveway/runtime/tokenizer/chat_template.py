"""Chat messages -> the text that a model was trained on -> token ids that no message can forge."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import jinja2

from giveway.core.errors import InvalidRequestError, ModelFileError
from giveway.core.ids import TokenId
from giveway.core.tokenizing import Tokenizing
from giveway.runtime.tokenizer.control_text import LEAD, ControlBreaker, ControlStrings
from giveway.runtime.tokenizer.template_sandbox import MAX_TEXT_CHARACTERS, Meter, TemplateSandbox, current_meter

MAX_TEMPLATE_BYTES = 256 << 10
RENDER_LIMIT_S = 5.0

Message = Mapping[str, Any]

# Members that templates compare with words of their own instead of printing them as somebody's text.
_STRUCTURAL_KEYS = frozenset({"role", "type"})
# What an expression of a template may raise when the messages are not of the form that it expects.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTokenizing(Tokenizing, Protocol):
    """A tokenizer that can tell a template's control tokens from the same characters in a message."""

    @property
    def prefix(self) -> tuple[TokenId, ...]:
        """What encode puts in front of a text when asked for special tokens, for example BOS."""

    @property
    def control_strings(self) -> ControlStrings:
        """The strings that text of a message must not turn into tokens."""

    def encode_marked(self, text: str) -> list[TokenId]:
        """Ids of a text in which control strings that are meant as text have been broken (see control_text)."""


class ChatTemplate:
    """A compiled chat template. Safe to share: every render has a context and a meter of its own."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compile. bos_token, eos_token: what the template's variables of these names say (None: not defined).

        now: local time, for templates that write the date. clock: seconds, for the limit on running time.
        Raises ModelFileError for a source over MAX_TEMPLATE_BYTES or one that is not Jinja.
        """
        size = len(source.encode(errors="surrogatepass"))
        if size > MAX_TEMPLATE_BYTES:
            raise ModelFileError(f"chat template: {size} bytes; the limit is {MAX_TEMPLATE_BYTES}")
        if LEAD in source:
            raise ModelFileError(f"chat template: holds the noncharacter {LEAD!r}, which no text may contain")
        self.source = source
        self._clock = clock
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = TemplateSandbox(now).from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise ModelFileError(f"chat template: not valid Jinja ({str(error)[:300]})") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """Return the text of a conversation.

        add_generation_prompt: end where the assistant's answer begins. extra: further variables of the template, such
        as `enable_thinking`. Raises InvalidRequestError when the template refuses the messages, fails on them, runs
        longer than RENDER_LIMIT_S or makes more than MAX_TEXT_CHARACTERS.
        """
        given = {name: token for name, token in self._tokens.items() if token is not None}
        variables = given | {"messages": list(messages), "tools": list(tools) if tools else None, **extra}
        meter = Meter(limit_s=RENDER_LIMIT_S, clock=self._clock)
        token = current_meter.set(meter)
        try:
            return self._collect(meter, variables | {"add_generation_prompt": add_generation_prompt})
        except _RENDER_ERRORS as error:
            raise InvalidRequestError(f"messages: the model's chat template failed: {str(error)[:500]}") from error
        finally:
            current_meter.reset(token)

    def _collect(self, meter: Meter, variables: dict[str, Any]) -> str:
        parts: list[str] = []
        length = 0
        for part in self._template.generate(variables):
            meter.turn()
            parts.append(part)
            length += len(part)
            if length > MAX_TEXT_CHARACTERS:
                raise jinja2.TemplateError(f"it writes more than {MAX_TEXT_CHARACTERS} characters")
        return "".join(parts)


def encode_chat(
    tokenizer: ChatTokenizing,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **extra: Any,
) -> list[TokenId]:
    """Render a conversation and return the ids of its text, with exactly one BOS if the model wants one.

    Control tokens come from the template alone. A control string inside a message, a tool or a tool result is encoded
    as ordinary pieces; in an assistant's own message markup such as `<think>` keeps its meaning. This holds however the
    template cuts or joins texts: what it renders is compared with a render in which no text can begin a control string,
    and where the two differ in their control tokens, the second is used.
    Raises InvalidRequestError, see ChatTemplate.render.
    """
    strings = tokenizer.control_strings
    strict, lenient = strings.breaker(), strings.breaker(keep_markup=True)

    def render(rewrite: _Rewrite) -> str:
        rewritten = [rewrite.message(message) for message in messages]
        others = {name: rewrite.value(value, strict) for name, value in extra.items()}
        offered = [rewrite.value(tool, strict) for tool in tools] if tools else None
        return template.render(rewritten, add_generation_prompt=add_generation_prompt, tools=offered, **others)

    plain = _Rewrite(strict, lenient, ControlBreaker.break_controls)
    text = render(plain)
    if plain.is_suspicious:
        guarded = render(_Rewrite(strict, lenient, ControlBreaker.break_beginnings))
        if strict.controls(text) != strict.controls(guarded):
            text = guarded
    ids = tokenizer.encode_marked(text)
    prefix = list(tokenizer.prefix)
    return ids if ids[: len(prefix)] == prefix else prefix + ids


class _Rewrite:
    """Breaks control strings in every text of a message, and remembers whether there was anything to look at twice."""

    def __init__(
        self, strict: ControlBreaker, lenient: ControlBreaker, break_text: Callable[[ControlBreaker, str], str]
    ) -> None:
        self._strict = strict
        self._lenient = lenient
        self._break_text = break_text
        self.is_suspicious = False

    def message(self, message: Message) -> dict[str, Any]:
        breaker = self._lenient if message.get("role") == "assistant" else self._strict
        return {key: self._member(key, value, breaker) for key, value in message.items()}

    def value(self, value: Any, breaker: ControlBreaker) -> Any:
        if isinstance(value, str):
            if not breaker.is_suspicious(value):
                return value
            self.is_suspicious = True
            return self._break_text(breaker, value)
        if isinstance(value, Mapping):
            return {self.value(key, breaker): self._member(key, item, breaker) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item, breaker) for item in value]
        return value

    def _member(self, key: Any, value: Any, breaker: ControlBreaker) -> Any:
        is_word = key in _STRUCTURAL_KEYS and isinstance(value, str) and value.isidentifier()
        return value if is_word else self.value(value, breaker)
