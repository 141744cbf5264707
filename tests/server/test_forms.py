"""Answers that must have a form, and calls of tools, over HTTP: whole and streamed, calm and with preemptions."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from giveway.core.config import PreemptionChoice
from tests.checkpoints import write_hf_checkpoint
from tests.server.running import Running, running, wait_until
from tests.server.test_clients_that_go_away import states
from tests.server.test_request_edges import error_of

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["rot", "gr\u00fcn", 'a"b\\c\n']}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and len(value["name"]) <= 6
        and 0 <= value["age"] <= 150
        and 1 <= len(value["tags"]) <= 2
        and set(value["tags"]) <= {"rot", "gr\u00fcn", 'a"b\\c\n'}
    )


SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
FORMS: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"response_format": SCHEMA}, is_person),
    ({"structured_outputs": {"json": PERSON}}, is_person),
    ({"structured_outputs": {"json": json.dumps(PERSON)}}, is_person),
    ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, re.compile("[a-c]{3}-[0-9]{2}").fullmatch),
    ({"structured_outputs": {"choice": ["yes", "no", "vielleicht"]}}, {"yes", "no", "vielleicht"}.__contains__),
    ({"structured_outputs": {"grammar": 'start: "a" /[0-9]+/ "b"'}}, re.compile("a[0-9]+b").fullmatch),
]
NAMES = ["json_schema", "json", "json as text", "regex", "choice", "grammar"]


def body_of(form: dict[str, Any], seed: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me."}]
    return {"messages": messages, "max_tokens": 300, "temperature": 1.0, "seed": seed, **form}


def streamed_text(server: Running, body: dict[str, Any]) -> str:
    with server.client() as client:
        chunks = client.chat.completions.create(
            model=server.server.model.name, stream=True, messages=body["messages"], extra_body=body
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.parametrize(("form", "fits"), FORMS, ids=NAMES)
def test_an_answer_has_the_form_that_was_asked_for_whole_and_streamed(
    tiny: Running, form: dict[str, Any], fits: Callable[[str], Any]
) -> None:
    for seed in range(3):
        (choice,) = tiny.post("/v1/chat/completions", body_of(form, seed)).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert fits(choice["message"]["content"])
        assert streamed_text(tiny, body_of(form, seed)) == choice["message"]["content"]
    completed = tiny.post("/v1/completions", {"prompt": "x", "max_tokens": 300, "seed": 5, "temperature": 1.0, **form})
    assert fits(completed.json()["choices"][0]["text"])


def test_any_json_object_will_do_for_json_object(tiny: Running) -> None:
    # Goal: a random model seldom ends an object by itself; what there is is the beginning of one, and no other text.
    for seed in range(4):
        body = body_of({"response_format": {"type": "json_object"}}, seed)
        (choice,) = tiny.post("/v1/chat/completions", body).json()["choices"]
        text = choice["message"]["content"]
        assert text.lstrip().startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)
        assert streamed_text(tiny, body) == text


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_no_preemption_changes_or_breaks_a_form(mode: str) -> None:
    tiny_settings: dict[str, Any] = {"device": "cpu", "model": "tiny", "num_kv_blocks": 64, "max_num_seqs": 2}
    bodies = [body_of(form, seed) for form, _ in FORMS for seed in range(2)]
    fits = [fit for _, fit in FORMS for _ in range(2)]
    with running(swap_space=1 << 20, **tiny_settings) as server:
        calm = [streamed_text(server, body) for body in bodies]
        rounds = [0]

        def disturb(*_: object) -> None:
            rounds[0] += 1
            if rounds[0] % 5 == 0:
                for name in list(server.engine.scheduler.requests):
                    server.engine.give_way(name, PreemptionChoice(mode))

        server.engine.add_listener(disturb)
        texts: list[Any] = [None] * len(bodies)

        def send(place: int) -> None:
            texts[place] = streamed_text(server, bodies[place])

        threads = [threading.Thread(target=send, args=(place,)) for place in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        told = server.get("/metrics").text
        server.until_idle()
    assert texts == calm
    assert all(fit(text) for fit, text in zip(fits, texts, strict=True))
    given = [each for each in told.splitlines() if each.startswith("vllm:num_preemptions_total{")]
    assert sum(float(each.split()[-1]) for each in given) > 5, "nobody gave way"


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "poem"}},
        {"response_format": {}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}},
        {"response_format": "json"},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"choice": [1]}},
        {"structured_outputs": {"json": "{"}},
        {"structured_outputs": {"grammar": "start: nothing"}},
        {"structured_outputs": {"choice": ["a"]}, "response_format": SCHEMA},
    ],
    ids=repr,
)
def test_a_form_that_is_wrong_is_a_400_in_openais_shape(tiny: Running, form: dict[str, Any]) -> None:
    for stream in (False, True):
        response = tiny.post("/v1/chat/completions", body_of(form, 0) | {"stream": stream})
        assert response.status_code == 400, response.text
        assert str(error_of(response)["param"]).startswith(tuple(form)), response.text


def test_a_form_that_turns_out_to_be_too_much_once_under_way_is_the_requests_fault(tiny: Running) -> None:
    # Goal: every order of hundreds of properties that may be left out; the compiler takes it, the parser gives up.
    properties = {f"prop{number}": {"type": "string"} for number in range(600)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    response = tiny.post("/v1/chat/completions", body_of(form, 0))
    assert response.status_code == 400, response.text
    assert (error_of(response)["param"], error_of(response)["code"]) == ("response_format", "grammar_failed")


# Tools

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call with <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}}


TOOLS: Any = [
    tool("weather", city={"enum": ["Bern", "Z\u00fcrich"]}, days={"type": "integer", "minimum": 1, "maximum": 9}),
    tool("now"),
]
HELLO: Any = [{"role": "user", "content": "Hello."}]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A small model whose template takes tools, as Hermes writes them."""
    path = write_hf_checkpoint(tmp_path_factory.mktemp("models") / "caller", "llama", tied=True)
    for file, change in (
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
        ("config.json", {"max_position_embeddings": 2048}),
    ):
        (path / file).write_text(json.dumps(json.loads((path / file).read_text()) | change))
    with running(device="cpu", model=str(path), num_kv_blocks=128, swap_space=1 << 20, max_num_seqs=4) as server:
        yield server
        server.until_idle()


def check_call(call: Any, names: set[str]) -> None:
    assert call.id.startswith("call_")
    assert call.type == "function"
    assert call.function.name in names
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert list(arguments) == ["city", "days"]
        assert arguments["city"] in ("Bern", "Z\u00fcrich")
        assert 1 <= arguments["days"] <= 9
    else:
        assert arguments == {}


CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}]


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named"])
def test_a_call_that_must_be_made_is_made_whole_and_streamed(caller: Running, choice: Any) -> None:
    names = {"weather", "now"} if choice == "required" else {"weather"}
    with caller.client() as client:
        for seed in range(3):
            wishes: dict[str, Any] = {
                "model": caller.server.model.name,
                "messages": HELLO,
                "tools": TOOLS,
                "tool_choice": choice,
                "parallel_tool_calls": False,
                "seed": seed,
                "temperature": 1.0,
                "max_tokens": 200,
            }
            (answer,) = client.chat.completions.create(**wishes).choices
            assert answer.finish_reason == "tool_calls"
            assert answer.message.content is None
            assert answer.message.tool_calls is not None
            (whole,) = answer.message.tool_calls
            check_call(whole, names)

            deltas = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **wishes)]
            assert deltas[-1].finish_reason == "tool_calls"
            assert not any(each.finish_reason for each in deltas[:-1])
            assert not "".join(each.delta.content or "" for each in deltas).strip(), "a call is told as text too"
            (streamed,) = [call for each in deltas for call in each.delta.tool_calls or []]
            assert streamed.index == 0
            check_call(streamed, names)
            assert (streamed.function.name, streamed.function.arguments) == (
                whole.function.name,
                whole.function.arguments,
            )


def test_several_calls_are_numbered_in_a_stream(caller: Running) -> None:
    # Goal: a random model goes on calling now and then; over some seeds there are answers with more than one call.
    num_calls = []
    with caller.client() as client:
        for seed in range(12):
            stream = client.chat.completions.create(
                model=caller.server.model.name,
                messages=HELLO,
                tools=TOOLS,
                tool_choice="required",
                seed=seed,
                temperature=1.0,
                max_tokens=300,
                stream=True,
            )
            calls = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
            assert [call.index for call in calls] == list(range(len(calls)))
            assert len({call.id for call in calls}) == len(calls)
            num_calls.append(len(calls))
    assert max(num_calls) > 1, num_calls


def test_a_call_and_its_result_go_back_to_the_model_as_its_template_writes_them(caller: Running) -> None:
    with caller.client() as client:
        asked = client.chat.completions.create(
            model=caller.server.model.name, messages=HELLO, tools=TOOLS, tool_choice=CHOICES[1], seed=1, max_tokens=200
        )
        message = asked.choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        conversation = [
            *HELLO,
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        answer = client.chat.completions.create(
            model=caller.server.model.name, messages=conversation, tools=TOOLS, tool_choice="none", max_tokens=5
        )
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason in ("length", "stop")
    ids = caller.post("/tokenize", {"messages": conversation, "tools": TOOLS}).json()["tokens"]
    text = caller.post("/detokenize", {"tokens": ids}).json()["prompt"]
    arguments = json.dumps(json.loads(call.function.arguments), ensure_ascii=False)  # type: ignore[union-attr]
    assert f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>' in text
    assert "sunny" in text
    assert '"enum": ["Bern", "Z\u00fcrich"]' in text, "the tools are not shown to the model"


def test_a_call_is_the_same_when_its_request_has_given_way(caller: Running) -> None:
    body = {
        "messages": HELLO,
        "tools": TOOLS,
        "tool_choice": "required",
        "seed": 3,
        "temperature": 1.0,
        "max_tokens": 300,
    }

    def calls_of() -> list[dict[str, str]]:
        message = caller.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        return [call["function"] for call in message["tool_calls"]]

    calm, rounds = calls_of(), [0]

    def disturb(*_: object) -> None:
        rounds[0] += 1
        if rounds[0] % 4 == 0:
            for name in list(caller.engine.scheduler.requests):
                caller.engine.give_way(name)

    caller.engine.add_listener(disturb)
    assert calls_of() == calm


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}]}, "tools"),
        ({"tools": [tool("same"), tool("same")]}, "tools"),
        ({"tools": [tool("a b")]}, "tools"),
        ({"tools": "weather"}, "tools"),
    ],
    ids=repr,
)
def test_a_wrong_tool_or_choice_is_a_400_that_names_the_field(
    caller: Running, change: dict[str, Any], param: str
) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 20, **change}
    response = caller.post("/v1/chat/completions", body)
    assert response.status_code == 400, response.text
    assert str(error_of(response)["param"]).startswith(param)


def test_a_model_whose_template_takes_no_tools_says_so(tiny: Running) -> None:
    with tiny.client() as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, max_tokens=5)
    assert refused.value.code == "tools_not_supported"
    with tiny.client() as client:
        client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, tool_choice="none", max_tokens=5)
    wait_until(lambda: not states(tiny), "something is left")
