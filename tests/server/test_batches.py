"""The Batch API on the whole server, through the official client: right answers, and nobody is in its way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from giveway.core.events import Finished
from giveway.core.request import RequestState
from giveway.server.access import Caller
from giveway.server.app import ROUTES
from tests.server.batch_jobs.sample_lines import jsonl, lines_of
from tests.server.batch_jobs.serving import content_of, until_ended
from tests.server.running import Running, running, wait_until
from tests.server.test_clients_that_go_away import states
from tests.server.test_priority import Journal

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KEYS = [("a-long-key-of-one", Caller("one", "one")), ("a-long-key-of-two", Caller("two", "two"))]


def line(custom_id: str, body: dict[str, Any], url: str = COMPLETIONS) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def create(client: openai.OpenAI, lines: list[dict[str, Any]], endpoint: Any = COMPLETIONS) -> str:
    source = client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return client.batches.create(input_file_id=source.id, endpoint=endpoint, completion_window="24h").id


def with_batches(directory: Path, **settings: Any) -> Any:
    return running(server={"has_batch_api": True, "data_dir": directory}, **settings)


@pytest.fixture(scope="module")
def tiny_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data = tmp_path_factory.mktemp("data")
    with with_batches(data, device="cpu", model="tiny", num_kv_blocks=64, swap_space=1 << 20, max_num_seqs=4) as server:
        yield server
        server.until_idle()


CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"Say {n}."}], "max_tokens": 6 + n, "temperature": 0} for n in range(8)
]
WRONG: list[tuple[dict[str, Any], int]] = [
    ({"messages": [{"role": "user", "content": "x"}], "temperature": -1}, 400),
    ({"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}, 400),
    ({"messages": [], "max_tokens": 3}, 400),
    ({"messages": [{"role": "user", "content": "x" * 100_000}]}, 400),
]


def test_the_answers_of_a_batch_are_those_of_single_requests_and_wrong_lines_harm_nobody(tiny_jobs: Running) -> None:
    with tiny_jobs.client() as client:
        alone = [client.chat.completions.create(model="tiny", **body) for body in CHATS]
        wrong = [line(f"wrong-{n}", {"model": "tiny"} | body, CHAT) for n, (body, _) in enumerate(WRONG)]
        right = [line(f"right-{n}", {"model": "tiny"} | body, CHAT) for n, body in enumerate(CHATS)]
        batch = until_ended(client, create(client, [*right[:3], *wrong, *right[3:]], CHAT))
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (12, 8, 4)
        answers = content_of(client, batch.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [each["custom_id"] for each in right]
        for answer, single in zip(answers, alone, strict=True):
            body = answer["response"]["body"]
            assert answer["response"]["status_code"] == 200
            assert body["choices"][0]["message"]["content"] == single.choices[0].message.content
            assert body["usage"]["completion_tokens"] == single.usage.completion_tokens
        refused = content_of(client, batch.error_file_id)
        assert [each["custom_id"] for each in refused] == [each["custom_id"] for each in wrong]
        assert [each["response"]["status_code"] for each in refused] == [status for _, status in WRONG]
        assert all(each["response"]["body"]["error"]["message"] for each in refused)
        assert batch.usage.output_tokens == sum(single.usage.completion_tokens for single in alone)


def test_metrics_know_every_route_of_the_whole_server(tiny_jobs: Running) -> None:
    # Goal: a route that is new, or renamed, must not count as `other` in silence.
    described = set(tiny_jobs.get("/openapi.json").json()["paths"])
    assert described == {route.replace(":path", "") for route in ROUTES}


def test_the_asynchronous_client_does_the_same_with_completions(tiny_jobs: Running) -> None:
    bodies = [{"model": "tiny", "prompt": f"number {n}", "max_tokens": 8, "temperature": 0} for n in range(5)]

    async def main() -> None:
        async with tiny_jobs.async_client() as client:
            alone = [await client.completions.create(**body) for body in bodies]  # type: ignore[call-overload]
            lines = jsonl(*(line(str(n), body) for n, body in enumerate(bodies)))
            source = await client.files.create(file=("in.jsonl", lines), purpose="batch")
            batch = await client.batches.create(
                input_file_id=source.id, endpoint="/v1/completions", completion_window="24h"
            )
            while batch.status != "completed":
                assert batch.status in ("validating", "in_progress", "finalizing")
                await asyncio.sleep(0.01)
                batch = await client.batches.retrieve(batch.id)
            assert batch.output_file_id is not None
            content = await client.files.content(batch.output_file_id)
            texts = [answer["response"]["body"]["choices"][0]["text"] for answer in lines_of(content.content)]
            assert texts == [single.choices[0].text for single in alone]

    asyncio.run(main())


def test_a_batch_gives_way_to_an_interactive_request_and_its_answers_stay_as_they_were(tmp_path: Path) -> None:
    # Goal: class 30 whatever a line says; the seat is taken from it at once; nothing of it is lost or changed.
    bodies = [
        {
            "model": "dry run",
            "prompt": [n + 1, 7],
            "max_tokens": 150,
            "temperature": 0,
            "ignore_eos": True,
            "priority": 0,
        }
        for n in range(6)
    ]
    with with_batches(tmp_path, max_num_seqs=2, num_kv_blocks=64, step_s=0.005) as server, server.client() as client:
        journal = Journal(server)
        batch_id = create(client, [line(str(n), body) for n, body in enumerate(bodies)])
        wait_until(lambda: states(server).count(RequestState.RUNNING) == 2, "the lines are not served")
        assert {request.spec.priority for request in list(server.engine.scheduler.requests.values())} == {30}
        assert len(states(server)) <= 4, "the whole batch is in the engine"
        before = server.engine.scheduler.state.next_step_id
        answer = server.post("/v1/completions", {"prompt": [99], "max_tokens": 3, "priority": 10})
        assert answer.status_code == 200
        assert server.engine.scheduler.state.next_step_id - before < 60, "it waited for a line to end"
        assert journal.preempted, "no line gave way"
        assert all(journal.priorities[name] == 30 for name in journal.preempted)
        batch = until_ended(client, batch_id)
        texts = [each["response"]["body"]["choices"][0]["text"] for each in content_of(client, batch.output_file_id)]
        alone = [server.post("/v1/completions", body).json()["choices"][0]["text"] for body in bodies]
        assert texts == alone
        told = server.get("/metrics").text
        preempted = next(
            each for each in told.splitlines() if each.startswith("vllm:num_preemptions_total{") and '"batch"' in each
        )
        assert float(preempted.split()[-1]) >= 1
        server.until_idle()


def test_a_cancelled_batch_frees_everything_and_keeps_what_was_answered(tmp_path: Path) -> None:
    short = [line(f"short-{n}", {"prompt": [n + 1], "max_tokens": 2, "ignore_eos": True}) for n in range(2)]
    endless = [line(f"endless-{n}", {"prompt": [n + 1], "max_tokens": 4000, "ignore_eos": True}) for n in range(8)]
    with with_batches(tmp_path, max_num_seqs=2, num_kv_blocks=600, step_s=0.005) as server, server.client() as client:
        batch_id = create(client, [*short, *endless])

        def has_two() -> bool:
            counts = client.batches.retrieve(batch_id).request_counts
            return counts is not None and counts.completed == 2

        wait_until(has_two, "the short lines are not answered")
        client.batches.cancel(batch_id)
        batch = until_ended(client, batch_id)
        assert batch.status == "cancelled"
        server.until_idle()
        assert {each["custom_id"] for each in content_of(client, batch.output_file_id)} == {"short-0", "short-1"}
        rest = content_of(client, batch.error_file_id)
        assert [each["error"]["code"] for each in rest] == ["batch_cancelled"] * 8
        assert server.post("/v1/completions", {"prompt": [5], "max_tokens": 2}).status_code == 200


def test_what_one_key_sends_is_invisible_to_another(tmp_path: Path) -> None:
    with (
        with_batches(tmp_path, keys=KEYS) as server,
        server.client(KEYS[0][0]) as one,
        server.client(KEYS[1][0]) as two,
    ):
        batch_id = create(one, [line("a", {"prompt": "secret", "max_tokens": 2})])
        batch = until_ended(one, batch_id)
        assert not two.batches.list().data
        assert not two.files.list().data
        looks: list[Callable[[], Any]] = [
            lambda: two.batches.retrieve(batch_id),
            lambda: two.batches.cancel(batch_id),
            lambda: two.files.retrieve(batch.input_file_id),
            lambda: two.files.content(batch.output_file_id),
            lambda: two.files.delete(batch.input_file_id),
            lambda: create_with(two, batch.input_file_id),
        ]
        for look in looks:
            with pytest.raises((openai.NotFoundError, openai.BadRequestError)) as refused:
                look()
            assert "secret" not in str(refused.value)
        assert [each.id for each in one.batches.list().data] == [batch_id]
        assert len(one.files.list().data) == 2


def create_with(client: openai.OpenAI, file_id: str) -> Any:
    return client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")


def test_a_few_lines_of_one_key_do_not_wait_behind_the_many_of_another(tmp_path: Path) -> None:
    # Goal: keys take turns in the engine too, so that the small batch is through while most of the large one is not.
    ended: list[int] = []  # prompt lengths, in the order of their ends
    with with_batches(tmp_path, keys=KEYS, max_num_seqs=1, num_kv_blocks=64, step_s=0.002) as server:
        lengths: dict[Any, int] = {}

        def note(_: object, events: Any) -> None:
            for event in events:
                spec = server.engine.spec_of(event.request_id)
                if spec is not None:
                    lengths[event.request_id] = len(spec.prompt_token_ids)
                if isinstance(event, Finished):
                    ended.append(lengths[event.request_id])

        server.engine.add_listener(note)
        with server.client(KEYS[0][0]) as one, server.client(KEYS[1][0]) as two:
            many = [line(str(n), {"prompt": [1, 2], "max_tokens": 20, "ignore_eos": True}) for n in range(40)]
            large = create(one, many)
            wait_until(lambda: len(ended) >= 2, "nothing is served")
            few = [line(str(n), {"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True}) for n in range(4)]
            small = create(two, few)
            assert until_ended(two, small).request_counts.completed == 4
            first = ended.index(3)
            last = len(ended) - 1 - ended[::-1].index(3)
            assert ended[first : last + 1].count(2) <= 6, "the small batch waited for more than its turns"
            assert until_ended(one, large).request_counts.completed == 40
        assert (ended.count(2), ended.count(3)) == (40, 4)
        server.until_idle()
