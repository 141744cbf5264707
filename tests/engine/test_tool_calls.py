"""Calls of tools in a stream of text: found whole wherever it is cut, and what is no call is never lost."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giveway.build import load_model
from giveway.engine.tool_calls import Parsed, ToolCall, ToolCallParser, ToolFormat, tool_format_of
from giveway.options import EngineOptions

HERMES, SMOLLM, MISTRAL, LLAMA = ToolFormat.HERMES, ToolFormat.SMOLLM, ToolFormat.MISTRAL, ToolFormat.LLAMA


def parse(tool_format: ToolFormat, *pieces: str) -> Parsed:
    """Everything that an answer in pieces gives."""
    numbers = count()
    parser = ToolCallParser(tool_format, lambda: f"call_{next(numbers)}")
    found = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return Parsed("".join(each.content for each in found), tuple(call for each in found for call in each.calls))


def calls(*named: tuple[str, str]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(f"call_{i}", name, arguments) for i, (name, arguments) in enumerate(named))


WEATHER = '{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}'
TIME = '{"name": "time", "arguments": {}}'
GIVEN = ("weather", '{"city": "Zürich", "days": 3}')

ANSWERS: dict[str, tuple[ToolFormat, str, str, tuple[ToolCall, ...]]] = {
    "one call": (HERMES, f"<tool_call>\n{WEATHER}\n</tool_call>", "", calls(GIVEN)),
    "two calls and text": (
        HERMES,
        f"Let me see.<tool_call>{WEATHER}</tool_call>\n<tool_call>{TIME}</tool_call> Done.",
        "Let me see.\n Done.",
        calls(GIVEN, ("time", "{}")),
    ),
    "an end marker inside a string": (
        HERMES,
        '<tool_call>{"name": "say", "arguments": {"text": "</tool_call> \\" {[ \\\\"}}</tool_call>!',
        "!",
        calls(("say", '{"text": "</tool_call> \\" {[ \\\\"}')),
    ),
    "an end marker that never came": (HERMES, f"<tool_call>{WEATHER}\n", "", calls(GIVEN)),
    "half an end marker": (HERMES, f"<tool_call>{WEATHER}</tool_", "", calls(GIVEN)),
    "no JSON": (HERMES, "<tool_call>oops</tool_call> ok", "<tool_call>oops</tool_call> ok", ()),
    "no JSON, then a call": (
        HERMES,
        f"<tool_call>oops</tool_call><tool_call>{TIME}</tool_call>",
        "<tool_call>oops</tool_call>",
        calls(("time", "{}")),
    ),
    "broken JSON": (HERMES, '<tool_call>{"name": }</tool_call>.', '<tool_call>{"name": }</tool_call>.', ()),
    "JSON that ends too early": (HERMES, '<tool_call>{"name": "a', '<tool_call>{"name": "a', ()),
    "text behind the JSON": (HERMES, f"<tool_call>{TIME} and more", f"<tool_call>{TIME} and more", ()),
    "a call without a name": (HERMES, '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', ()),
    "arguments that are no object": (
        HERMES,
        '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
        (),
    ),
    "arguments as a text": (
        HERMES,
        '<tool_call>{"name": "a", "arguments": "{\\"b\\": 1}"}</tool_call>',
        "",
        calls(("a", '{"b": 1}')),
    ),
    "a number that is none": (
        HERMES,
        '<tool_call>{"name": "a", "arguments": {"b": NaN}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"b": NaN}}</tool_call>',
        (),
    ),
    "what only begins like a marker": (HERMES, "a <tool_box> b <tool_", "a <tool_box> b <tool_", ()),
    "a list": (SMOLLM, f"<tool_call>[{WEATHER}, {TIME}]</tool_call>", "", calls(GIVEN, ("time", "{}"))),
    "an empty list": (SMOLLM, "<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", ()),
    "one object in place of a list": (SMOLLM, f"<tool_call>{TIME}</tool_call>", "", calls(("time", "{}"))),
    "Mistral": (MISTRAL, f"[TOOL_CALLS] [{WEATHER}, {TIME}] bye", " bye", calls(GIVEN, ("time", "{}"))),
    "Mistral without a list": (MISTRAL, "[TOOL_CALLS] none", "[TOOL_CALLS] none", ()),
    "Llama": (LLAMA, '\n{"name": "time", "parameters": {"zone": "UTC"}}', "", calls(("time", '{"zone": "UTC"}'))),
    "Llama, two": (LLAMA, f"{TIME}; {TIME}", "", calls(("time", "{}"), ("time", "{}"))),
    "Llama behind its tag": (LLAMA, f"<|python_tag|>{TIME}", "", calls(("time", "{}"))),
    "Llama, code behind its tag": (LLAMA, "<|python_tag|>f(x)", "<|python_tag|>f(x)", ()),
    "Llama, a JSON answer": (LLAMA, ' {"answer": 42} yes', ' {"answer": 42} yes', ()),
    "Llama, JSON inside a text": (LLAMA, f"Look: {TIME}", f"Look: {TIME}", ()),
}


@pytest.mark.parametrize("about", ANSWERS)
def test_an_answer_gives_its_calls_and_its_text_wherever_it_is_cut(about: str) -> None:
    tool_format, text, content, expected = ANSWERS[about]
    assert parse(tool_format, text) == Parsed(content, expected)
    assert parse(tool_format, *text) == Parsed(content, expected)
    for place in range(len(text) + 1):
        assert parse(tool_format, text[:place], text[place:]) == Parsed(content, expected), place


def test_text_before_a_call_is_given_at_once_and_never_a_part_of_a_marker() -> None:
    # Goal: a stream shows text as it comes; a client must not see "<tool_" and then a call.
    parser = ToolCallParser(HERMES, lambda: "x")
    assert parser.push("I will look <tool").content == "I will look "
    assert parser.push("_call>").content == ""
    assert parser.push(TIME) == Parsed("")
    assert parser.push("</tool_call>") == Parsed("", (ToolCall("x", "time", "{}"),))
    assert parser.push(" So").content == " So"


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", TIME, f"[{TIME}]", "{", "}", "[", "]"),
        *('"', "\\", ":", ",", " ", "\n", ";", "name", "<", "NaN", "1e999", "é", "\ud800"),
    ]
)


@given(tool_format=st.sampled_from(ToolFormat), pieces=st.lists(PIECES | st.text(max_size=5), max_size=25))
def test_garbage_never_raises_and_loses_nothing_but_what_stands_around_calls(
    tool_format: ToolFormat, pieces: list[str]
) -> None:
    text = "".join(pieces)
    whole = parse(tool_format, text)
    assert parse(tool_format, *pieces) == whole
    assert parse(tool_format, *text) == whole
    if not whole.calls:
        assert whole.content == text
    else:
        # What is no content is calls, markers and white space: content is the text with pieces taken out of it.
        characters = iter(text)
        assert all(character in characters for character in whole.content)
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("tool_format", ToolFormat)
def test_text_full_of_beginnings_takes_no_longer_than_other_text(tool_format: ToolFormat) -> None:
    # Goal: text is under a stranger's control. Gone through again and again, each of these would take minutes.
    for text in (
        tool_format.marker * 20_000,
        (tool_format.marker + '{"') * 20_000,
        (tool_format.marker + "{") * 20_000 + "}" * 20_000,
        tool_format.marker + "[" * 300_000 + "]" * 300_000,
        "{" + '"' + "\\" * 300_000,
    ):
        assert parse(tool_format, text) == Parsed(text)
        pieces = [text[start : start + 7] for start in range(0, 70_000, 7)]
        assert parse(tool_format, *pieces) == Parsed("".join(pieces))


TEMPLATES: list[tuple[str | None, ToolFormat | None]] = [
    (None, None),
    ("{% for message in messages %}{{ message['content'] }}{% endfor %}", None),
    (
        '{% if tools %}<tools>{{ tools | tojson }}</tools> <tool_call>\\n{"name": <name>}\\n</tool_call>{% endif %}',
        HERMES,
    ),
    ('{% if tools %}Answer with <tool_call>[{"name": "f", "arguments": {}}]</tool_call>{% endif %}', SMOLLM),
    ("{%- if tools %}[AVAILABLE_TOOLS]{% endif %}{{ '[TOOL_CALLS]' }}", MISTRAL),
    ("{%- if tools %}[TOOL_CALLS]{{ name }}[ARGS]{% endif %}", None),
    ("{%- if tools %}<tool_call>\\n<function=f>{% endif %}", None),
    ("{%- if tools %}{{- '{\"name\": \"' + f.name + '\", ' }}{{- '\"parameters\": ' }}{% endif %}", LLAMA),
    ("{%- if tools %}Use the tools.{% endif %}", None),
    ("{# no toolset #} <tool_call>", None),
]


@pytest.mark.parametrize(("source", "expected"), TEMPLATES)
def test_the_way_of_writing_calls_is_read_from_the_template(source: str | None, expected: ToolFormat | None) -> None:
    assert tool_format_of(source) is expected


def test_the_source_of_the_template_is_with_the_model() -> None:
    model: Any = load_model(EngineOptions(device="dry"))
    assert "<|im_start|>" in model.chat_template_source
    assert tool_format_of(model.chat_template_source) is None
