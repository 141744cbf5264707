"""Grammars as token masks, on a vocabulary of bytes and on that of the embedded model."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from giveway.core.constraint import Constraint, is_allowed
from giveway.core.errors import InvalidRequestError, RequestFailedError
from giveway.core.sampling import StructuredOutput
from giveway.core.tokenizing import Tokenizing
from giveway.engine.tool_calls import ToolCallParser, ToolFormat, constraint_for_tools
from giveway.runtime.grammar import MAX_KEPT_GRAMMARS, GrammarCompiler
from giveway.runtime.model_source import open_model
from giveway.runtime.tokenizer.byte_tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
EOS = 257

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", 'a"b\\c\n']}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(BYTES, frozenset({EOS}))


@pytest.fixture(scope="module")
def smollm() -> tuple[Tokenizing, GrammarCompiler]:
    source = open_model(None)
    return source.tokenizer, GrammarCompiler(source.tokenizer, source.eos_token_ids)


def tokens_of(mask: bytes | None, vocab_size: int) -> list[int]:
    assert mask is not None
    return [token for token in range(vocab_size) if is_allowed(mask, token)]


def accepts(constraint: Constraint, text: str, tokenizer: Tokenizing = BYTES) -> bool:
    """Whether a text keeps the grammar and may end there; the mask before every token allows it."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    for place, token in enumerate(ids):
        if constraint.is_complete_after(ids[:place]) or not is_allowed(
            constraint.allowed_after(ids[:place]) or b"", token
        ):
            return False
    mask = constraint.allowed_after(ids)
    return any(is_allowed(mask or b"", end) for end in constraint.end_token_ids)


def write(constraint: Constraint, tokenizer: Tokenizing, seed: int, most: int = 2000) -> str:
    """Choose tokens at random until the grammar is complete."""
    rng, ids = random.Random(seed), list[int]()
    while not constraint.is_complete_after(ids):
        assert len(ids) < most, tokenizer.decode(ids)
        ids.append(rng.choice(tokens_of(constraint.allowed_after(ids), tokenizer.vocab_size)))
    return tokenizer.decode(ids)


def check_person(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags"]
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 150
    assert 1 <= len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"red", "grün", 'a"b\\c\n'}


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_masks_allow_keeps_the_schema(
    compiler: GrammarCompiler, smollm: tuple[Tokenizing, GrammarCompiler], seed: int
) -> None:
    wish = StructuredOutput(json_schema=PERSON)
    check_person(write(compiler(wish)(), BYTES, seed))
    tokenizer, of_smollm = smollm
    check_person(write(of_smollm(wish)(), tokenizer, seed))


FORMS: list[tuple[StructuredOutput, Sequence[str], Sequence[str]]] = [
    (
        StructuredOutput(json_object=True),
        ["{}", '{"a": [1, -2.5e3, null, "é\\u001f\\n"]}', '{\n  "a": {\n    "b": true\n  }\n}'],
        ["[]", "1", '"a"', '{"a": }', '{"a":   1}', " {}", "{} "],
    ),
    (
        StructuredOutput(json_schema='{"type": "string"}'),
        ['"ж"', '"\\u0000"', '"\\""', '"😀"'],
        # What can be written as it is must not be written by number: so no half of a pair can stand alone.
        ['"\\ud83d"', "'a'", '"a', '"\n"', '"\\x"'],
    ),
    (StructuredOutput(regex="[a-c]{2,3}(é|/)?"), ["ab", "abc/", "ccé"], ["a", "abcd", "ab//"]),
    (StructuredOutput(choice=("yes", 'n"o\\', "für/", "start: x")), ["yes", 'n"o\\', "für/", "start: x"], ["no", "ye"]),
    (
        StructuredOutput(grammar='start: "<" %json {"type": "integer", "maximum": 20} ">" word?\nword: /[a-z]+/'),
        ["<17>", "<-3>ab"],
        ["<21>", "<1>A"],
    ),
]


@pytest.mark.parametrize(("wish", "good", "bad"), FORMS)
def test_each_form_allows_what_keeps_it_and_nothing_else(
    compiler: GrammarCompiler,
    smollm: tuple[Tokenizing, GrammarCompiler],
    wish: StructuredOutput,
    good: Sequence[str],
    bad: Sequence[str],
) -> None:
    for tokenizer, compile_ in ((BYTES, compiler), smollm):
        assert [text for text in good if not accepts(compile_(wish)(), text, tokenizer)] == []
        assert [text for text in bad if accepts(compile_(wish)(), text, tokenizer)] == []


# A function of the tokens


def test_what_may_follow_depends_on_the_tokens_alone_and_not_on_what_was_asked_before(
    compiler: GrammarCompiler,
) -> None:
    # Goal: an answer that is preempted, replayed, or whose step is repeated goes on exactly where it was.
    make = compiler(StructuredOutput(json_schema=PERSON))
    text = list(b'{"name": "Ada", "age": 36, "tags": ["red"]}')
    calm = make()
    masks = [calm.allowed_after(text[:end]) for end in range(len(text) + 1)]
    ends = [make().is_complete_after(text[:end]) for end in range(len(text) + 1)]
    assert ends == [False] * len(text) + [True]
    asked, rng = make(), random.Random(1)
    for _ in range(300):
        end = rng.randrange(len(text) + 1)
        if rng.random() < 0.3:
            with pytest.raises(RequestFailedError, match=r"^response_format: the grammar does not allow token 0 "):
                asked.allowed_after([*text[:end], 0])
        elif rng.random() < 0.5:
            assert asked.is_complete_after(tuple(text[:end])) == ends[end]
        else:
            assert asked.allowed_after(text[:end]) == masks[end]


def test_objects_of_one_grammar_know_nothing_of_each_other(compiler: GrammarCompiler) -> None:
    make = compiler(StructuredOutput(choice=("left", "right")))
    one, other = make(), make()
    assert tokens_of(one.allowed_after(b"l"), 260) == [ord("e")]
    assert tokens_of(other.allowed_after(b"r"), 260) == [ord("i")]
    assert tokens_of(one.allowed_after(b"le"), 260) == [ord("f")]


def test_the_end_is_allowed_where_the_grammar_may_end_and_complete_means_that_nothing_else_is() -> None:
    compile_ = GrammarCompiler(BYTES, frozenset({257, 259}))
    grammar = compile_(StructuredOutput(regex="ab?"))()
    assert grammar.end_token_ids == {257, 259}
    assert tokens_of(grammar.allowed_after([]), 260) == [ord("a")]
    assert tokens_of(grammar.allowed_after(b"a"), 260) == [ord("b"), 257, 259]
    assert not grammar.is_complete_after(b"a")
    assert grammar.is_complete_after(b"ab")
    assert tokens_of(grammar.allowed_after(b"ab"), 260) == [257, 259]
    for end in (257, 259):
        assert grammar.is_complete_after([ord("a"), end])
        assert grammar.is_complete_after([*b"ab", end])


def test_control_tokens_are_never_part_of_a_text(smollm: tuple[Tokenizing, GrammarCompiler]) -> None:
    tokenizer, compile_ = smollm
    grammar = compile_(StructuredOutput(regex="(.|\n)*"))()
    allowed = set(tokens_of(grammar.allowed_after([]), tokenizer.vocab_size))
    assert allowed & tokenizer.special_ids == grammar.end_token_ids


def test_threads_may_compile_at_once() -> None:
    compile_ = GrammarCompiler(BYTES, frozenset({EOS}))
    found: list[str] = []

    def work(number: int) -> None:
        found.append(write(compile_(StructuredOutput(choice=(f"text {number % 7}",)))(), BYTES, 0))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(f"text {number % 7}" for number in range(30))


def test_only_the_latest_grammars_are_kept(compiler: GrammarCompiler) -> None:
    for number in range(2 * MAX_KEPT_GRAMMARS):
        compiler(StructuredOutput(choice=(f"n{number}",)))
    assert len(compiler._kept) == MAX_KEPT_GRAMMARS


def test_nothing_is_loaded_before_a_request_needs_it() -> None:
    # Goal: the library takes a tenth of a second to load, which no start should pay.
    code = (
        "import sys; from giveway.build import build_engine; from giveway.options import EngineOptions;"
        "build_engine(EngineOptions(device='dry')); print('llguidance' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


# Refusals


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deep nesting": ({"json_schema": nested(200)}, "recursion limit"),
    "very deep nesting": ({"json_schema": nested(6000)}, "nested too deeply|recursion limit"),
    "a remote reference": ({"json_schema": {"$ref": "https://example.com/a.json"}}, "not present in a registry"),
    "a file": ({"json_schema": {"$ref": "file:///etc/passwd"}}, "not present in a registry"),
    "a reference to nothing": ({"json_schema": {"$ref": "#/$defs/a"}}, "a"),
    "a reference to itself": ({"json_schema": {"$ref": "#"}}, "refers to itself"),
    "a keyword that is not kept": ({"json_schema": {"not": {"type": "string"}}}, "'not' is not supported"),
    "a number that would be rounded": ({"json_schema": {"const": 10**18 - 1}}, "more than 15 digits would be rounded"),
    "a fraction that would be rounded": ({"json_schema": '{"const": 8.800592982058847e-24}'}, "number 8.8005929820588"),
    "a number inside a grammar": ({"grammar": f'start: %json {{"const": {-(2**63)}}}'}, "would be rounded"),
    "an unknown format": ({"json_schema": {"type": "string", "format": "klingon"}}, "Unknown format: klingon"),
    "an unknown type": ({"json_schema": {"type": "text"}}, "Invalid type: text"),
    "a contradiction": ({"json_schema": {"type": "string", "minLength": 5, "maxLength": 3}}, "Unsatisfiable"),
    "oneOf that may overlap": (
        {"json_schema": {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]}},
        "oneOf constraints are not supported",
    ),
    "patterns that hold together": (
        {"json_schema": {"allOf": [{"type": "string", "pattern": f".*{'ab' * i}.*"} for i in range(1, 25)]}},
        "24 different patterns",
    ),
    "alternatives multiplied": (
        {"json_schema": {"allOf": [{"anyOf": [{"const": f"{i}{j}"} for i in range(800)]} for j in range(3)]}},
        "schema too large",
    ),
    "a broken regular expression": ({"regex": "(a"}, "unclosed group"),
    "looking ahead": ({"regex": "(?=a)b"}, "look-around"),
    "a grammar without its start": ({"grammar": 'begin: "a"'}, "start"),
    "a grammar of unknown rules": ({"grammar": "start: foo"}, "unknown name"),
    "a grammar in JSON": (
        {"grammar": '{"grammars": [{"json_schema": {"allOf": []}}]}'},
        "expecting rule",
    ),
    "a bad schema inside a grammar": ({"grammar": 'start: %json {"type": "string", "foo": 1}'}, "keyword 'foo'"),
    "no schema inside a grammar": ({"grammar": "start: %json x"}, "not followed by a JSON schema"),
    "a list inside a grammar": ({"grammar": "start: %json [1]"}, "not followed by a JSON object"),
    "a deep schema inside a grammar": ({"grammar": f"start: %json {nested(3000)}"}, "recursion|not followed"),
}


@pytest.mark.parametrize("about", REFUSED)
def test_what_cannot_be_kept_is_refused_with_what_the_library_said(compiler: GrammarCompiler, about: str) -> None:
    fields, message = REFUSED[about]
    with pytest.raises(InvalidRequestError, match=message) as refused:
        compiler(StructuredOutput(**fields))
    assert str(refused.value).startswith(("response_format", "structured_output.json_schema is nested"))
    assert len(str(refused.value)) < 600


HOSTILE: dict[str, dict[str, Any]] = {
    "a huge enum": {"json_schema": {"enum": [f"v{i}" for i in range(6000)]}},
    "a huge choice": {"choice": [f"choice {i}" for i in range(4000)]},
    "many properties": {"json_schema": {"properties": {f"p{i}": {} for i in range(400)}}},
    "an exponential regular expression": {"regex": "(a|aa)*b(.*a.{20}){3}"},
    "counted repetitions": {"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
    "Unicode repetitions": {"regex": r"(\w{0,1000}\p{L}{0,1000}){0,1000}"},
    "a long string": {"json_schema": {"type": "string", "minLength": 1000, "maxLength": 10**6}},
    "a long list": {"json_schema": {"type": "array", "minItems": 10**5, "maxItems": 10**9}},
    "a recursive schema": {
        "json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}
    },
    "no end": {
        "json_schema": {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
        }
    },
    "references that multiply": {
        "json_schema": {
            "$ref": "#/$defs/a0",
            "$defs": {
                **{f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)},
                "a40": {"type": "object"},
            },
        }
    },
    "an ambiguous grammar": {"grammar": 'start: a a a a\na: "x" | a a | '},
    "a grammar of repetitions": {"grammar": 'start: a{0,100000}\na: b{0,100000}\nb: "x" | "y" a'},
}


@pytest.mark.parametrize("about", HOSTILE)
def test_what_is_hostile_costs_a_bounded_amount_of_work(smollm: tuple[Tokenizing, GrammarCompiler], about: str) -> None:
    # Goal: it is refused, or works, or fails alone after some tokens; it never takes minutes or gigabytes.
    tokenizer, compile_ = smollm
    rng, ids = random.Random(2), list[int]()
    try:
        grammar = compile_(StructuredOutput(**HOSTILE[about]))()
        while len(ids) < 60 and not grammar.is_complete_after(ids):
            allowed = tokens_of(grammar.allowed_after(ids), tokenizer.vocab_size)
            ids.append(rng.choice(allowed))
    except (InvalidRequestError, RequestFailedError) as error:
        assert str(error).startswith("response_format")  # noqa: PT017


# Calls of tools

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "maximum": 9}},
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"city": {"enum": ["Zürich", 'The "%json" town']}},
            },
        },
    },
    {"type": "function", "function": {"name": "time"}},
]


@pytest.mark.parametrize("tool_format", ToolFormat)
def test_a_required_call_is_written_in_the_models_way_and_found_by_its_parser(
    compiler: GrammarCompiler, tool_format: ToolFormat
) -> None:
    names = set()
    for seed in range(12):
        for choice, is_named in (("required", False), ("weather", True)):
            wish = constraint_for_tools(tool_format, TOOLS, choice, is_named=is_named, is_parallel=seed % 2 == 0)
            assert wish is not None
            parser = ToolCallParser(tool_format, lambda: "id")
            parts = [parser.push(write(compiler(wish)(), BYTES, seed)), parser.finish()]
            calls = [call for part in parts for call in part.calls]
            assert "".join(part.content for part in parts).strip() == ""
            assert 1 <= len(calls) <= 16
            if is_named or seed % 2:
                assert len(calls) == 1
            names |= {call.name for call in calls}
            for call in calls:
                arguments = json.loads(call.arguments)
                if call.name == "time":
                    assert arguments == {}
                else:
                    assert arguments["city"] in ("Zürich", 'The "%json" town')
                    assert arguments.get("days", 0) <= 9
            if is_named:
                assert calls[0].name == "weather"
    assert names == {"weather", "time"}


def test_a_marker_that_is_a_control_token_is_written_as_that_token(compiler: GrammarCompiler) -> None:
    wish = constraint_for_tools(ToolFormat.MISTRAL, TOOLS, "time", is_named=True, marker_token_id=258)
    assert wish is not None
    assert tokens_of(compiler(wish)().allowed_after([]), 260) == [258]
    assert tokens_of(compiler(wish)().allowed_after([258]), 260) == [ord("[")]


# Whatever a stranger sends

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**14) | st.sampled_from([0.5, -2.25, 1e3]) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null", "thing"])
PATTERNS = st.sampled_from(["a", "^a+$", "(", "[a-z]{2,9}", "\\d", "(?=a)", "\\uD800", "", ".*", "é"])
SCHEMAS = st.recursive(
    st.booleans()
    | st.fixed_dictionaries(
        {},
        optional={"type": TYPES | st.lists(TYPES, max_size=2), "enum": st.lists(JSON_VALUES, min_size=1, max_size=3)},
    )
    | st.fixed_dictionaries(
        {},
        optional={
            "pattern": PATTERNS,
            "minLength": st.integers(0, 4),
            "maxLength": st.integers(0, 9),
            "const": JSON_VALUES,
        },
    )
    | st.fixed_dictionaries(
        {},
        optional={
            "minimum": st.integers(-9, 9),
            "maximum": st.floats(-9, 9),
            "multipleOf": st.sampled_from([1, 2, 3, 0.5]),
            "$ref": st.sampled_from(["#", "#/$defs/a", "x"]),
        },
    ),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(st.text(max_size=3), inner, max_size=3),
            "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
            "$defs": st.dictionaries(st.just("a"), inner, max_size=1),
            "required": st.lists(st.text(max_size=3), max_size=2, unique=True),
            "items": inner,
            "prefixItems": st.lists(inner, max_size=2),
            "anyOf": st.lists(inner, max_size=3),
            "oneOf": st.lists(inner, max_size=2),
            "allOf": st.lists(inner, max_size=3),
            "additionalProperties": inner,
            "minItems": st.integers(0, 3),
            "maxProperties": st.integers(0, 3),
        },
    ),
    max_leaves=8,
)


@given(schema=SCHEMAS.filter(lambda schema: isinstance(schema, dict)), seed=st.integers(0, 9))
@settings(max_examples=150)
def test_any_schema_is_kept_or_refused(compiler: GrammarCompiler, schema: dict[str, Any], seed: int) -> None:
    try:
        grammar = compiler(StructuredOutput(json_schema=schema))()
    except InvalidRequestError:
        return
    rng, ids = random.Random(seed), list[int]()
    try:
        while len(ids) < 80 and not grammar.is_complete_after(ids):
            allowed = tokens_of(grammar.allowed_after(ids), BYTES.vocab_size)
            ids.append(EOS if EOS in allowed else rng.choice(allowed))
    except RequestFailedError:
        return
    if grammar.is_complete_after(ids):
        value = json.loads(BYTES.decode(ids))
        try:
            other = jsonschema_rs.Draft202012Validator(schema)
        except jsonschema_rs.ValidationError:
            return  # it is stricter about what a schema is, where the text says nothing
        other.validate(value)


@given(text=st.text(max_size=30) | st.text("start:ab|()[]{}*+?~\"'/\\%json \n<>0,9#", max_size=30))
@settings(max_examples=150)
def test_any_text_is_a_grammar_or_refused(compiler: GrammarCompiler, text: str) -> None:
    for fields in ({"regex": text}, {"grammar": text}, {"grammar": f"start: {text}"}, {"choice": (text or "x",)}):
        try:
            grammar = compiler(StructuredOutput(**fields))()
            grammar.allowed_after([])
        except (InvalidRequestError, RequestFailedError):
            continue
