"""How the next token of a request is chosen: the user's wishes, checked once, free of tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import Any

from giveway.core.errors import InvalidRequestError
from giveway.core.ids import TokenId
from giveway.core.strict_json import parse_json

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 4096
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024
MAX_N = 128
MAX_GRAMMAR_BYTES = 64 << 10  # of a JSON schema, of a grammar, or of all choices together
MAX_REGEX_BYTES = 16 << 10
MAX_CHOICES = 4096


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that the text of an answer must have: exactly one of the fields is given. Names as in vLLM.

    A wrong value raises InvalidRequestError that names the field. Whether a grammar of the right type makes sense is
    found when it is compiled, at submission.
    """

    json_object: bool = False  # any JSON object
    json_schema: str | Mapping[str, Any] | None = None  # JSON text; of a mapping, that is what is kept
    regex: str | None = None  # of the whole text; syntax of Rust's regex crate, without look-around
    choice: tuple[str, ...] | None = None  # one of these texts
    grammar: str | None = None  # in llguidance's variant of Lark; its rule `start` is the whole text

    def __post_init__(self) -> None:
        """Check type and size."""
        if not isinstance(self.json_object, bool):
            raise InvalidRequestError(f"structured_output.json_object must be true or false, not {self.json_object!r}")
        texts = {name: getattr(self, name) for name in ("json_schema", "regex", "choice", "grammar")}
        given = [name for name, value in texts.items() if value is not None]
        if self.json_object:
            given.append("json_object")
        if len(given) != 1:
            raise InvalidRequestError(
                "structured_output needs exactly one of json_object, json_schema, regex, choice and grammar, not "
                + (" and ".join(given) or "none")
            )
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        elif self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        elif self.regex is not None:
            _text("structured_output.regex", self.regex, MAX_REGEX_BYTES)
        elif self.grammar is not None:
            _text("structured_output.grammar", self.grammar, MAX_GRAMMAR_BYTES)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Wishes of one request. Field names and meanings are those of the OpenAI API and of vLLM.

    None in any field means its default, as null does in JSON. A wrong value raises InvalidRequestError that names the
    field, the value and the range.
    """

    max_tokens: int | None = None  # tokens; None: whatever still fits after the prompt
    temperature: float | None = None  # None: the model's own default, else 1.0; 0: greedy
    top_p: float | None = None  # None: the model's own default, else 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0  # fraction of the most likely token's probability
    seed: int | None = None  # None: drawn once at submission
    repetition_penalty: float = 1.0  # prompt and output
    presence_penalty: float = 0.0  # output only
    frequency_penalty: float = 0.0  # output only
    logit_bias: Mapping[TokenId, float] = field(default_factory=lambda: MappingProxyType({}))
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0  # output tokens before an end-of-sequence or stop token may be chosen
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    n: int = 1  # answers to the prompt; each has a seed of its own, the first has `seed`
    structured_output: StructuredOutput | None = None  # the form of the text; None: any

    def __post_init__(self) -> None:
        """Check every range; sequences become tuples so that the value can be shared freely."""
        for field_ in fields(self):
            if getattr(self, field_.name) is None and field_.default is not None:
                made = field_.default if field_.default is not MISSING else MappingProxyType({})
                object.__setattr__(self, field_.name, made)
        given: object = self.stop
        if isinstance(given, str):  # a bare string, as the OpenAI API allows
            object.__setattr__(self, "stop", (given,))
        try:
            for name in ("stop", "stop_token_ids", "bad_words"):
                object.__setattr__(self, name, tuple(getattr(self, name)))
            name = "logit_bias"
            object.__setattr__(self, name, MappingProxyType(dict(self.logit_bias)))
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"{name} is {getattr(self, name)!r}, which is no collection of it") from error
        self._check_numbers()
        self._check_lists()
        form: object = self.structured_output
        if form is not None and not isinstance(form, StructuredOutput):
            raise InvalidRequestError(f"structured_output must be a StructuredOutput, not {type(form).__name__}")

    def _check_numbers(self) -> None:
        _integer("max_tokens", self.max_tokens, low=1)
        _integer("n", self.n, low=1, high=MAX_N)
        _integer("top_k", self.top_k, low=-1)
        _integer("min_tokens", self.min_tokens, low=0)
        _integer("seed", self.seed, low=-(2**63), high=2**64 - 1)
        _integer("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        _integer("prompt_logprobs", self.prompt_logprobs, low=0, high=MAX_LOGPROBS)
        _number("temperature", self.temperature, low=0.0, high=100.0)
        _number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _number("repetition_penalty", self.repetition_penalty, low=0.0, high=100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}")

    def _check_lists(self) -> None:
        _strings("stop", self.stop, MAX_STOP_STRINGS)
        _strings("bad_words", self.bad_words, MAX_BAD_WORDS)
        for stop in self.stop:
            if len(stop) > MAX_STOP_STRING_CHARS:
                raise InvalidRequestError(
                    f"a stop string has {len(stop)} characters; at most {MAX_STOP_STRING_CHARS} are allowed"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} entries; at most {MAX_STOP_TOKENS} are allowed"
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, low=0)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS}")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias token id", token, low=0)
            _number("logit_bias value", bias, low=-100.0, high=100.0)


def _integer(name: str, value: object, *, low: int, high: int | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be a whole number, not {value!r}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequestError(f"{name} is {value}; it must be {limit}")


def _number(name: str, value: object, *, low: float, high: float, open_low: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number, not {value!r}")
    # Written so that NaN fails too, and a whole number too large for a float is compared and not converted.
    if not (low <= value <= high) or (open_low and value == low):
        limit = f"above {low:g} and at most {high:g}" if open_low else f"between {low:g} and {high:g}"
        raise InvalidRequestError(f"{name} is {value}; it must be {limit}")


def _strings(name: str, values: tuple[object, ...], limit: int) -> None:
    if len(values) > limit:
        raise InvalidRequestError(f"{name} has {len(values)} entries; at most {limit} are allowed")
    for value in values:
        if not isinstance(value, str) or not value:
            raise InvalidRequestError(f"{name} must hold non-empty strings, not {value!r}")


def _text(name: str, value: object, limit: int) -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a text, not {type(value).__name__}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} has a lone surrogate at character {error.start}, which is no text"
        ) from error
    if size > limit:
        raise InvalidRequestError(f"{name} has {size} bytes; at most {limit} are allowed")


def _schema_text(schema: object) -> str:
    """Return a JSON schema as JSON text that holds an object."""
    name = "structured_output.json_schema"
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, allow_nan=False)
        _text(name, text, MAX_GRAMMAR_BYTES)  # before it is read: nobody reads what is too long
        parsed = parse_json(text)
    except RecursionError as error:
        raise InvalidRequestError(f"{name} is nested too deeply") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"{name} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidRequestError(f"{name} must be a JSON object, not {type(parsed).__name__}")
    return text


def _choices(values: object) -> tuple[str, ...]:
    name = "structured_output.choice"
    if not isinstance(values, list | tuple):
        raise InvalidRequestError(f"{name} must be a list of texts, not {type(values).__name__}")
    if not values:
        raise InvalidRequestError(f"{name} is empty; at least 1 text is needed")
    choices = tuple(values)
    _strings(name, choices, MAX_CHOICES)
    _text(name, "".join(choices), MAX_GRAMMAR_BYTES)
    return choices
