"""Every endpoint through the official client, unchanged, sync and async."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest

from giveway.core.sampling import SamplingParams
from giveway.llm import LLM
from tests.server.running import Running

QUESTION: Any = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(model="tiny", device="cpu", num_kv_blocks=64)


def test_a_chat_answer_is_the_one_of_the_offline_engine(tiny: Running, offline: LLM) -> None:
    (expected,) = offline.chat([QUESTION], SamplingParams(temperature=0, max_tokens=12))
    answer = tiny.client().chat.completions.create(model="tiny", messages=QUESTION, temperature=0, max_tokens=12)
    choice = answer.choices[0]
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason.value
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model == "tiny"
    assert answer.id.startswith("chatcmpl-")


def test_a_streamed_chat_adds_up_to_the_whole_answer(tiny: Running) -> None:
    wish: Any = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_completion_tokens": 20}
    whole = tiny.client().chat.completions.create(**wish)
    chunks = list(tiny.client().chat.completions.create(**wish, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_async_client_streams_many_at_once(tiny: Running) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model="tiny",
            prompt=f"number {number}",
            max_tokens=10,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main() -> tuple[list[str], list[str]]:
        async with tiny.async_client() as client:
            together = await asyncio.gather(*(one(client, number) for number in range(12)))
            alone = [await one(client, number) for number in range(12)]
        return together, alone

    together, alone = asyncio.run(main())
    assert together == alone
    assert all(together)


def test_completions_take_texts_lists_of_texts_ids_and_lists_of_ids(tiny: Running) -> None:
    client = tiny.client()
    ids = [list(b"abc"), list(b"de")]

    def texts(prompt: Any) -> list[str]:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=5, temperature=0)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    both = texts(["abc", "de"])
    assert texts("abc") == both[:1]
    assert texts(ids) == both
    assert texts(ids[1]) == both[1:]


def test_several_answers_to_several_prompts_are_numbered_prompt_by_prompt(tiny: Running) -> None:
    wish: Any = {"model": "tiny", "prompt": ["ab", "xyz"], "n": 3, "max_tokens": 6, "seed": 5, "temperature": 1}
    whole = tiny.client().completions.create(**wish)
    assert [choice.index for choice in whole.choices] == list(range(6))
    texts = ["" for _ in range(6)]
    for chunk in tiny.client().completions.create(**wish, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) > 2
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 5  # each prompt once, however many answers it has


def test_chat_logprobs_belong_to_their_tokens(tiny: Running) -> None:
    wish: Any = {"messages": QUESTION, "max_tokens": 7, "logprobs": True, "top_logprobs": 3, "temperature": 0}
    answer = tiny.client().chat.completions.create(model="tiny", **wish)
    content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert content
    assert answer.usage
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy: the likeliest
        assert entry.bytes is not None
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    streamed = [
        entry
        for chunk in tiny.client().chat.completions.create(model="tiny", **wish, stream=True)
        if chunk.choices[0].logprobs and chunk.choices[0].logprobs.content
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [(e.token, e.logprob) for e in streamed] == [(e.token, e.logprob) for e in content]


def test_completion_logprobs_with_echo_score_the_prompt_too(tiny: Running) -> None:
    wish: Any = {"prompt": "hello", "max_tokens": 4, "logprobs": 2, "echo": True, "temperature": 0}
    answer = tiny.client().completions.create(model="tiny", **wish)
    choice = answer.choices[0]
    scores = choice.logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert scores.token_logprobs is not None
    assert choice.text.startswith("hello")
    assert len(scores.tokens) == len(scores.token_logprobs) == 5 + 4
    assert scores.token_logprobs[0] is None
    assert all(value is not None and -math.inf < value <= 0 for value in scores.token_logprobs[1:])
    assert scores.text_offset is not None
    assert scores.text_offset[:5] == [0, 1, 2, 3, 4]
    streamed: list[float | None] = []
    text = ""
    for chunk in tiny.client().completions.create(model="tiny", **wish, stream=True):
        text += chunk.choices[0].text
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.token_logprobs or []
    assert text == choice.text
    assert streamed == scores.token_logprobs


def test_stop_seed_penalties_bias_and_vllms_fields_reach_the_sampler(tiny: Running, offline: LLM) -> None:
    # Goal: whatever changes an answer offline changes it in the same way over HTTP.
    wishes: list[dict[str, Any]] = [
        {"seed": 7, "temperature": 0.9},
        {"seed": 7, "temperature": 0.9, "top_p": 0.5},
        {"seed": 7, "top_k": 3},
        {"seed": 7, "min_p": 0.2},
        {"temperature": 0, "frequency_penalty": 1.5},
        {"temperature": 0, "presence_penalty": -1.0},
        {"temperature": 0, "repetition_penalty": 1.7},
        {"temperature": 0, "logit_bias": {"65": 100}},
        {"temperature": 0, "min_tokens": 9},
        {"temperature": 0, "ignore_eos": True},
        {"temperature": 0, "bad_words": ["e"]},
    ]
    for wish in wishes:
        given = dict(wish)
        if "logit_bias" in given:
            given["logit_bias"] = {int(token): value for token, value in given["logit_bias"].items()}
        (expected,) = offline.generate(["some text"], SamplingParams(max_tokens=10, **given))
        body = {"model": "tiny", "prompt": "some text", "max_tokens": 10, **wish}
        answer = tiny.post("/v1/completions", body).json()
        assert answer["choices"][0]["text"] == expected.text, wish


def test_a_stop_string_ends_an_answer_and_no_part_of_it_is_leaked(tiny: Running, offline: LLM) -> None:
    (free,) = offline.generate(["some text"], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    stop = free.text[10:14]
    assert len(stop) == 4
    wish: Any = {"prompt": "some text", "max_tokens": 30, "temperature": 0, "stop": stop}
    place = free.text.index(stop)
    answer = tiny.client().completions.create(model="tiny", **wish, extra_body={"ignore_eos": True})
    assert answer.choices[0].text == free.text[:place]
    assert answer.choices[0].finish_reason == "stop"
    said = ""
    for chunk in tiny.client().completions.create(model="tiny", **wish, stream=True, extra_body={"ignore_eos": True}):
        said += chunk.choices[0].text
        assert free.text[:place].startswith(said)
    assert said == free.text[:place]


def test_prompt_logprobs_are_those_of_the_offline_engine(tiny: Running, offline: LLM) -> None:
    (expected,) = offline.generate(["abcd"], SamplingParams(max_tokens=1, prompt_logprobs=2))
    body = {"prompt": "abcd", "max_tokens": 1, "prompt_logprobs": 2}
    given = tiny.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert expected.prompt_logprobs is not None
    assert given[0] is None
    for ours, theirs in zip(given[1:], expected.prompt_logprobs[1:], strict=True):
        assert theirs is not None
        assert ours[str(theirs.token_id)]["logprob"] == theirs.logprob
        assert ours[str(theirs.token_id)]["rank"] == theirs.rank


def test_a_prompt_that_was_sent_before_is_told_as_cached(tiny: Running) -> None:
    prompt = "a prompt that is longer than one block of sixteen tokens"
    for _ in range(2):
        answer = tiny.client().completions.create(model="tiny", prompt=prompt, max_tokens=2, temperature=0)
    assert answer.usage
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == len(prompt) // 16 * 16
    salted: Any = {"cache_salt": "tenant", "prompt": prompt, "max_tokens": 2}
    assert tiny.post("/v1/completions", salted).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_models_are_listed_and_retrieved(tiny: Running) -> None:
    client = tiny.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "giveway"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="gpt-4", prompt="a")


def test_what_is_not_built_is_refused_in_openais_shape(tiny: Running) -> None:
    client = tiny.client()
    with pytest.raises(openai.NotFoundError, match="not supported") as embeddings:
        client.embeddings.create(model="tiny", input="a")
    assert embeddings.value.code == "unsupported_endpoint"
    with pytest.raises(openai.NotFoundError, match="chat/completions"):
        client.responses.create(model="tiny", input="a")
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="tiny", prompt="a", suffix="b")
    with pytest.raises(openai.BadRequestError, match="takes no tools") as tools:
        client.chat.completions.create(
            model="tiny", messages=QUESTION, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]
        )
    assert tools.value.param == "tools"


def test_tokenize_and_detokenize_are_each_others_inverse(tiny: Running) -> None:
    text = "Grüße, 世界"
    made = tiny.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) == len(text.encode())
    assert made["max_model_len"] == tiny.built.scheduler_config.max_model_len
    assert tiny.post("/detokenize", {"tokens": made["tokens"]}).json() == {"prompt": text}
    chat = tiny.post("/tokenize", {"messages": QUESTION}).json()
    answer = tiny.client().chat.completions.create(model="tiny", messages=QUESTION, max_tokens=1)
    assert answer.usage
    assert chat["count"] == answer.usage.prompt_tokens
    assert tiny.post("/detokenize", {"tokens": [10**9]}).status_code == 400


def test_messages_may_be_parts_and_every_role_is_taken(tiny: Running) -> None:
    def count(messages: Any) -> int:
        answer = tiny.client().chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        assert answer.usage
        return answer.usage.prompt_tokens

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert count([{"role": "user", "content": parts}]) == count([{"role": "user", "content": "one\ntwo"}])
    assert count([{"role": "developer", "content": "x"}]) == count([{"role": "system", "content": "x"}])
    assert count([*QUESTION, {"role": "assistant", "content": "yes"}, *QUESTION]) > count(QUESTION)
    with pytest.raises(openai.BadRequestError, match="image_url") as refused:
        count([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://example.com"}}]}])
    assert refused.value.param == "messages.0.content.0"


def test_the_version_the_description_and_the_health_are_open_to_everybody(tiny: Running) -> None:
    assert tiny.get("/version").json()["version"]
    assert tiny.get("/health").json() == {"status": "ok"}
    assert "/v1/chat/completions" in tiny.get("/openapi.json").json()["paths"]
