"""Grammars as token masks: what `structured_output` asks for, kept by the library llguidance.

The library is loaded and the vocabulary handed to it at the first request that needs it: a quarter of a second for
49,152 tokens that start-up need not pay. What it costs from then on is in docs/decisions/0013-structured-output.md.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from giveway.core.constraint import GRAMMAR_FAILED, Constraint, ConstraintFactory, TokenMask, is_allowed
from giveway.core.errors import InvalidRequestError, MissingDependencyError, RequestFailedError
from giveway.core.ids import TokenId
from giveway.core.sampling import StructuredOutput
from giveway.core.tokenizing import Tokenizing
from giveway.runtime.schema_check import check_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Kept for the next request that asks the same; one takes from some kilobytes to some megabytes.
MAX_KEPT_GRAMMARS = 32
# Between two tokens of JSON: nothing, a space, or a line with its indentation. A model that has lost its way would
# write white space until max_tokens if it could.
_WHITE_SPACE = r"\x20|\x0A(\x20{0,40}|\x09{0,10})"
_JSON_OPTIONS: dict[str, Any] = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": _WHITE_SPACE}
_MAX_DIGITS = 15  # that a float64 keeps
_MAX_MESSAGE_CHARACTERS = 400


class GrammarCompiler:
    """Compiles structured outputs for one vocabulary. See giveway.core.constraint.ConstraintCompiler."""

    def __init__(self, tokenizer: Tokenizing, eos_token_ids: frozenset[TokenId]) -> None:
        """Make a compiler; nothing is loaded yet. eos_token_ids: of the model; empty: those of the tokenizer."""
        self._tokenizer = tokenizer
        self._ends = eos_token_ids or tokenizer.eos_token_ids
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._limits: LLParserLimits | None = None
        self._kept: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()

    def __call__(self, wish: StructuredOutput) -> ConstraintFactory:
        """Compile; see ConstraintCompiler. Raises MissingDependencyError if llguidance is not installed."""
        self._load()
        with self._lock:
            pristine = self._kept.get(wish)
        if pristine is None:
            pristine = self._compile(wish)  # outside the lock: a large schema holds up nobody else
        with self._lock:
            self._kept[wish] = pristine
            self._kept.move_to_end(wish)
            while len(self._kept) > MAX_KEPT_GRAMMARS:
                self._kept.popitem(last=False)

        def make() -> Constraint:
            return GrammarConstraint(pristine, self._ends)

        return make

    def _load(self) -> None:
        with self._lock:
            if self._vocabulary is not None:
                return
            try:
                import llguidance
            except ImportError as error:
                raise MissingDependencyError(
                    "response_format needs the package llguidance: pip install llguidance"
                ) from error
            if not self._ends:
                raise InvalidRequestError("response_format: the model has no end-of-sequence token to end a text with")
            # Numbers of steps of its work and not of seconds, so that what is refused does not depend on the machine.
            self._limits = llguidance.LLParserLimits(
                initial_lexer_fuel=500_000,  # ten milliseconds; the default is twice that
                step_lexer_fuel=100_000,  # seven milliseconds a token; half the default
                step_max_items=25_000,  # one millisecond a token; half the default
                max_lexer_states=20_000,  # 40 MB; a twelfth of the default
                max_grammar_size=100_000,  # a fifth of the default
                precompute_large_lexemes=False,  # it would take its time before the first token of every one
                verbose_errors=False,
            )
            vocabulary = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, min(self._ends)))
            self._vocabulary = llguidance.LLTokenizer(vocabulary, eos_token=sorted(self._ends))

    def _compile(self, wish: StructuredOutput) -> LLMatcher:
        from llguidance import LLMatcher

        assert self._vocabulary is not None
        try:
            grammar = _grammar_of(wish)
        except (ValueError, RecursionError) as error:
            if isinstance(error, InvalidRequestError):
                raise
            raise _refusal(str(error)) from error
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            probe = matcher.deep_copy()  # what can match nothing at all shows with the first mask
            probe.compute_bitmask()
            if not probe.is_error():
                return matcher
            raise _refusal(probe.get_error())
        raise _refusal(matcher.get_error())


class GrammarConstraint:
    """The grammar of one answer, and how far the answer is in it. See giveway.core.constraint.Constraint."""

    __slots__ = ("_consumed", "_mask", "_matcher", "_pristine", "end_token_ids")

    def __init__(self, pristine: LLMatcher, end_token_ids: frozenset[TokenId]) -> None:
        """Begin. pristine: a matcher that has consumed nothing, shared with others and never written."""
        self.end_token_ids = end_token_ids
        self._pristine = pristine
        self._matcher = pristine.deep_copy()
        self._consumed: list[TokenId] = []
        self._mask: TokenMask | None = None  # what may follow; None: not asked yet

    def allowed_after(self, output_token_ids: Sequence[TokenId]) -> TokenMask | None:
        """Return which tokens may follow; see Constraint."""
        self._go_to(output_token_ids)
        return self._mask_here()

    def is_complete_after(self, output_token_ids: Sequence[TokenId]) -> bool:
        """Whether nothing but the end may follow; see Constraint."""
        self._go_to(output_token_ids)
        if self._matcher.is_stopped():
            return True
        return self._matcher.is_accepting() and self._allows_only_the_end(self._mask_here())

    def _go_to(self, output_token_ids: Sequence[TokenId]) -> None:
        """Consume what is new; start over if it is no continuation of what was consumed."""
        num_consumed = len(self._consumed)
        if list(output_token_ids[:num_consumed]) != self._consumed:
            self._start_over()
            num_consumed = 0
        for token_id in output_token_ids[num_consumed:]:
            self._consume(token_id)

    def _consume(self, token_id: TokenId) -> None:
        matcher = self._matcher
        # A matcher that has stopped refuses even the end that its own mask asks for.
        is_end = matcher.is_stopped() and token_id in self.end_token_ids
        if not is_end and not matcher.consume_token(token_id):
            self._fail(f"does not allow token {token_id} as output token {len(self._consumed)}")
        self._consumed.append(token_id)
        self._mask = None

    def _mask_here(self) -> TokenMask:
        if self._mask is None:
            self._mask = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                self._fail(f"cannot go on after output token {len(self._consumed)}")
        return self._mask

    def _allows_only_the_end(self, mask: TokenMask) -> bool:
        num_ends = sum(is_allowed(mask, token_id) for token_id in self.end_token_ids)
        return int.from_bytes(mask).bit_count() == num_ends

    def _start_over(self) -> None:
        self._matcher = self._pristine.deep_copy()  # not `reset`: from an error there is no way back
        self._consumed = []
        self._mask = None

    def _fail(self, what: str) -> None:
        reason = _first_line(self._matcher.get_error())
        self._start_over()
        raise RequestFailedError(f"{GRAMMAR_FAILED} {what}: {reason}")


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizing, eos_token_id: TokenId) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: str) -> list[TokenId]:
        if not isinstance(text, str):
            raise TypeError("text is encoded, not bytes")  # this is how the library asks
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)


def _grammar_of(wish: StructuredOutput) -> str:
    """Write the grammar that llguidance reads. Raises ValueError for what cannot be one."""
    from llguidance import LLMatcher

    if wish.json_object:
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_OPTIONS)  # type: ignore[arg-type]
    if wish.json_schema is not None:
        schema = str(wish.json_schema)  # which it is, whatever was given
        check_schema(_read_schema(schema, len(schema) - len(schema.lstrip()))[0])
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)  # type: ignore[arg-type]
    if wish.regex is not None:
        return LLMatcher.grammar_from_regex(wish.regex)
    if wish.choice is not None:
        # One terminal and not as many rules: the parser would follow all of them side by side.
        return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in wish.choice)
    assert wish.grammar is not None
    # With this in front it is Lark, whatever it looks like: the library reads a text in braces in another way.
    return "%llguidance {}\n" + _with_checked_schemas(wish.grammar)


def _with_checked_schemas(grammar: str) -> str:
    """Return a Lark grammar in which every JSON schema behind `%json` is checked, and read as all others are."""
    parts, end = list[str](), 0
    while (place := grammar.find("%json", end)) >= 0:
        start = place + len("%json")
        start += len(grammar[start:]) - len(grammar[start:].lstrip())
        try:
            schema, after = _read_schema(grammar, start)
        except InvalidRequestError:
            raise
        except (ValueError, RecursionError) as error:
            raise _refusal(f"%json in the grammar is not followed by a JSON schema ({error})") from error
        if not isinstance(schema, dict):
            raise _refusal("%json in the grammar is not followed by a JSON object")
        check_schema(schema)
        options = json.dumps({"x-guidance": _JSON_OPTIONS})[:-1] + (", " if schema else "")
        parts += [grammar[end:start], options, grammar[start + 1 : after]]  # inserted behind the first brace
        end = after
    return "".join([*parts, grammar[end:]])


def _read_schema(text: str, start: int) -> tuple[Any, int]:
    """Read the JSON that begins at a place of a text; return also where it ends."""
    return json.JSONDecoder(parse_int=_number, parse_float=_number).raw_decode(text, start)


def _number(text: str) -> float:
    """Read a number of a schema. Raises InvalidRequestError for one that the compiler would round."""
    digits = text.lower().partition("e")[0].lstrip("-").replace(".", "").strip("0")
    if len(digits) > _MAX_DIGITS:
        raise _refusal(f"the JSON schema has the number {text[:40]}; more than {_MAX_DIGITS} digits would be rounded")
    return float(text)


def _first_line(text: str) -> str:
    lines: Iterable[str] = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line), "no reason given")[:_MAX_MESSAGE_CHARACTERS]


def _refusal(reason: str) -> InvalidRequestError:
    shown = " ".join(reason.replace("<non-verbose/>", "").split())
    if "NoExtensionBias" in shown:  # what the library calls it
        shown = "a rule refers to itself and has no other way, so nothing can ever match it"
    return InvalidRequestError(f"response_format cannot be kept: {shown[:_MAX_MESSAGE_CHARACTERS]}")
