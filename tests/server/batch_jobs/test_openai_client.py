"""The official client, unchanged, against the Batch API behind uvicorn."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from giveway.server.batch_jobs.records import BatchLine, LineAnswer
from tests.server.batch_jobs.sample_lines import CHAT, answer_of, jsonl, lines_of, request_line
from tests.server.batch_jobs.serving import content_of, create_batch, num_completed, serving, until, until_ended


def test_a_batch_goes_from_upload_to_output_in_the_order_of_the_input(tmp_path: Path) -> None:
    # Goal: every field that the client knows, and a line of output for each line of input.
    async def later_is_faster(line: BatchLine) -> LineAnswer:
        await asyncio.sleep(0.05 / int(line.custom_id))
        return answer_of(line)

    with serving(tmp_path, later_is_faster) as served, served.client() as client:
        content = jsonl(*(request_line(str(n), f"line {n} ü") for n in range(1, 21)))
        source = client.files.create(file=("in.jsonl", content), purpose="batch")
        assert (source.bytes, source.filename, source.purpose) == (len(content), "in.jsonl", "batch")
        assert (source.object, source.status) == ("file", "processed")
        assert client.files.content(source.id).content == content
        batch = client.batches.create(
            input_file_id=source.id, endpoint=CHAT, completion_window="24h", metadata={"who": "me"}
        )
        assert (batch.object, batch.status, batch.input_file_id) == ("batch", "validating", source.id)
        assert batch.expires_at == batch.created_at + 86400
        ended = until_ended(client, batch.id)
        assert ended.status == "completed"
        assert (ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (20, 20, 0)
        assert ended.in_progress_at <= ended.finalizing_at <= ended.completed_at
        assert (ended.errors, ended.error_file_id, ended.metadata, ended.model) == (None, None, {"who": "me"}, "tiny")
        assert (ended.usage.input_tokens, ended.usage.output_tokens, ended.usage.total_tokens) == (60, 40, 100)
        assert ended.usage.input_tokens_details.cached_tokens == 20
        output = client.files.retrieve(ended.output_file_id)
        assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
        lines = lines_of(client.files.content(output.id).content)
        assert [line["custom_id"] for line in lines] == [str(n) for n in range(1, 21)]
        assert len({line["id"] for line in lines}) == 20
        for n, line in enumerate(lines, 1):
            assert line["id"].startswith("batch_req_")
            assert line["error"] is None
            assert (line["response"]["status_code"], line["response"]["request_id"]) == (200, f"req-{n}")
            assert line["response"]["body"]["choices"][0]["message"]["content"] == f"line {n} ü"


def test_the_asynchronous_client_does_the_same(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="alice", max_retries=0) as client:
            source = await client.files.create(file=jsonl(request_line("a")), purpose="batch")
            batch = await client.batches.create(input_file_id=source.id, endpoint=CHAT, completion_window="24h")
            while batch.status != "completed":
                await asyncio.sleep(0.01)
                batch = await client.batches.retrieve(batch.id)
            assert batch.output_file_id is not None
            content = await client.files.content(batch.output_file_id)
            assert [line["custom_id"] for line in lines_of(content.content)] == ["a"]
            assert [found.id async for found in client.batches.list()] == [batch.id]
            assert (await client.files.delete(source.id)).deleted

    with serving(tmp_path) as served:
        asyncio.run(main(served.url))


def test_lists_come_in_pages_in_both_orders_also_while_their_items_are_deleted(tmp_path: Path) -> None:
    with serving(tmp_path) as served, served.client() as client:
        made = [client.files.create(file=(f"{n}.jsonl", b"x"), purpose="batch").id for n in range(7)]
        assert [found.id for found in client.files.list()] == made[::-1]
        assert [found.id for found in client.files.list(limit=2)] == made[::-1]
        assert [found.id for found in client.files.list(limit=3, order="asc")] == made
        page = client.files.list(limit=3, order="asc", after=made[1])
        assert [found.id for found in page.data] == made[2:5]
        assert page.has_more
        raw = client.files.with_raw_response.list(limit=7).http_response.json()
        assert (raw["object"], raw["first_id"], raw["last_id"], raw["has_more"]) == ("list", made[6], made[0], False)
        assert not list(client.files.list(purpose="vision"))
        for found in client.files.list(limit=2):  # the last of each page is gone when the next page is asked for
            client.files.delete(found.id)
        assert not list(client.files.list())


def test_batches_are_listed_newest_first(tmp_path: Path) -> None:
    with serving(tmp_path) as served, served.client() as client:
        made = [create_batch(client, jsonl(request_line("a"))).id for _ in range(5)]
        assert [batch.id for batch in client.batches.list(limit=2)] == made[::-1]
        assert [batch.id for batch in client.batches.list(after=made[2])] == made[1::-1]


def test_failures_go_to_the_file_of_errors_and_harm_no_other_line(tmp_path: Path) -> None:
    async def run(line: BatchLine) -> LineAnswer:
        if line.custom_id == "bad":
            return LineAnswer(400, {"error": {"message": "no such model"}}, "req-bad")
        if line.custom_id == "broken":
            raise ValueError("a bug with a secret in its message")
        if line.custom_id == "unreachable":
            raise OSError("not a disk")
        if line.custom_id == "no json":
            return LineAnswer(200, {"value": float("nan")}, "req-nan")
        if line.custom_id == "surrogate":
            return LineAnswer(200, {"value": "\ud800"}, "req-surrogate")
        return answer_of(line)

    names = ["good", "bad", "broken", "unreachable", "no json", "surrogate", "good too"]
    with serving(tmp_path, run) as served, served.client() as client:
        ended = until_ended(client, create_batch(client, jsonl(*map(request_line, names))).id)
        assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == ("completed", 3, 4)
        output, errors = content_of(client, ended.output_file_id), content_of(client, ended.error_file_id)
        assert [line["custom_id"] for line in output] == ["good", "surrogate", "good too"]
        assert output[1]["response"]["body"] == {"value": "\ud800"}
        assert [line["custom_id"] for line in errors] == ["bad", "broken", "unreachable", "no json"]
        assert errors[0]["response"]["status_code"] == 400
        assert errors[0]["response"]["body"] == {"error": {"message": "no such model"}}
        assert errors[0]["error"] is None
        for line in errors[1:]:
            assert (line["response"], line["error"]["code"]) == (None, "server_error")
            assert "secret" not in line["error"]["message"]


def test_a_batch_without_a_success_has_no_output_file(tmp_path: Path) -> None:
    async def refuse(line: BatchLine) -> LineAnswer:
        return LineAnswer(422, {"error": {"message": "no"}}, "req")

    with serving(tmp_path, refuse) as served, served.client() as client:
        ended = until_ended(client, create_batch(client, jsonl(request_line("a"))).id)
        assert (ended.status, ended.output_file_id) == ("completed", None)
        assert len(content_of(client, ended.error_file_id)) == 1


def test_what_one_key_owns_does_not_exist_for_another(tmp_path: Path) -> None:
    with serving(tmp_path) as served, served.client("alice") as alice, served.client("bob") as bob:
        batch = until_ended(alice, create_batch(alice, jsonl(request_line("a"))).id)
        attempts: list[tuple[str, Any]] = [
            (batch.input_file_id, bob.files.retrieve),
            (batch.output_file_id, bob.files.retrieve),
            (batch.output_file_id, bob.files.content),
            (batch.input_file_id, bob.files.delete),
            (batch.id, bob.batches.retrieve),
            (batch.id, bob.batches.cancel),
        ]
        for real, attempt in attempts:
            unknown = real[:-4] + "0000"
            answers = []
            for name in (real, unknown):
                with pytest.raises(openai.NotFoundError) as caught:
                    attempt(name)
                answers.append(caught.value.response.text.replace(name, "ID"))
            assert answers[0] == answers[1]  # not even that it is somebody's can be seen
        with pytest.raises(openai.NotFoundError):
            bob.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        assert not list(bob.files.list())
        assert not list(bob.batches.list())
        assert len(list(alice.files.list())) == 2


def test_a_cancelled_batch_keeps_what_is_finished(tmp_path: Path) -> None:
    # Goal: lines under way are aborted, each line is in exactly one of the files, and a second cancel is no error.
    aborted: list[str] = []

    async def three_answer(line: BatchLine) -> LineAnswer:
        if int(line.custom_id) > 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                aborted.append(line.custom_id)
                raise
        return answer_of(line)

    with serving(tmp_path, three_answer, max_outstanding=4) as served, served.client() as client:
        batch = create_batch(client, jsonl(*(request_line(str(n)) for n in range(1, 11))))
        until(lambda: num_completed(client, batch.id) == 3)
        cancelled = client.batches.cancel(batch.id)
        assert cancelled.status == "cancelling"
        ended = until_ended(client, batch.id)
        assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == ("cancelled", 3, 7)
        assert ended.cancelling_at <= ended.cancelled_at
        assert sorted(aborted) == ["4", "5", "6", "7"]
        assert [line["custom_id"] for line in content_of(client, ended.output_file_id)] == ["1", "2", "3"]
        errors = content_of(client, ended.error_file_id)
        assert [line["custom_id"] for line in errors] == [str(n) for n in range(4, 11)]
        assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
        assert client.batches.cancel(batch.id).status == "cancelled"
        assert served.jobs.counts().num_lines_under_way == 0


def test_a_finished_batch_cannot_be_cancelled(tmp_path: Path) -> None:
    with serving(tmp_path) as served, served.client() as client:
        ended = until_ended(client, create_batch(client, jsonl(request_line("a"))).id)
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(ended.id)


def test_a_batch_out_of_time_keeps_what_is_finished_and_says_so_for_the_rest(tmp_path: Path) -> None:
    now = [1_800_000_000.0]

    async def one_answers(line: BatchLine) -> LineAnswer:
        if line.custom_id != "1":
            await asyncio.Event().wait()
        return answer_of(line)

    with serving(tmp_path, one_answers, clock=lambda: now[0]) as served, served.client() as client:
        batch = create_batch(client, jsonl(request_line("1"), request_line("2"), request_line("3")), window="30m")
        until(lambda: num_completed(client, batch.id) == 1)
        now[0] += 1799
        until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        now[0] += 1
        ended = until_ended(client, batch.id)
        assert (ended.status, ended.expired_at, ended.expires_at) == ("expired", 1_800_001_800, 1_800_001_800)
        assert (ended.request_counts.completed, ended.request_counts.failed) == (1, 2)
        assert [line["custom_id"] for line in content_of(client, ended.output_file_id)] == ["1"]
        errors = content_of(client, ended.error_file_id)
        assert [(line["custom_id"], line["response"]) for line in errors] == [("2", None), ("3", None)]
        assert {line["error"]["code"] for line in errors} == {"batch_expired"}


def test_a_full_engine_makes_a_line_wait_and_does_not_fail_it(tmp_path: Path) -> None:
    tries: dict[str, int] = {}

    async def full_at_first(line: BatchLine) -> LineAnswer:
        tries[line.custom_id] = tries.get(line.custom_id, 0) + 1
        if tries[line.custom_id] <= 2:
            return LineAnswer(429 if tries[line.custom_id] == 1 else 503, {"error": {"message": "full"}}, "req")
        if tries[line.custom_id] == 3:
            raise asyncio.CancelledError  # the engine let it go; nobody cancelled the line
        return answer_of(line)

    with serving(tmp_path, full_at_first) as served, served.client() as client:
        ended = until_ended(client, create_batch(client, jsonl(*(request_line(str(n)) for n in range(6)))).id)
        assert (ended.status, ended.request_counts.completed) == ("completed", 6)
        assert set(tries.values()) == {4}


def test_an_input_file_can_be_deleted_only_when_no_batch_needs_it_any_more(tmp_path: Path) -> None:
    go = threading.Event()

    async def wait(line: BatchLine) -> LineAnswer:
        while not go.is_set():
            await asyncio.sleep(0.005)
        return answer_of(line)

    with serving(tmp_path, wait) as served, served.client() as client:
        batch = create_batch(client, jsonl(request_line("a")))
        with pytest.raises(openai.ConflictError):
            client.files.delete(batch.input_file_id)
        go.set()
        ended = until_ended(client, batch.id)
        assert client.files.delete(batch.input_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(batch.input_file_id)
        assert content_of(client, ended.output_file_id)
        assert client.batches.retrieve(batch.id).status == "completed"


def test_a_graceful_stop_keeps_batch_work_for_the_next_start(tmp_path: Path) -> None:
    # Goal: what is answered is not run again; what was under way is, and nothing is lost.
    runs: list[str] = []
    is_second = threading.Event()

    async def half(line: BatchLine) -> LineAnswer:
        runs.append(line.custom_id)
        if int(line.custom_id) > 5 and not is_second.is_set():
            await asyncio.Event().wait()
        return answer_of(line)

    with serving(tmp_path, half) as served, served.client() as client:
        batch = create_batch(client, jsonl(*(request_line(str(n)) for n in range(1, 11))))
        until(lambda: num_completed(client, batch.id) == 5)
        until(lambda: "9" in runs)
    assert runs == [str(n) for n in range(1, 10)]
    is_second.set()
    with serving(tmp_path, half) as served, served.client() as client:
        ended = until_ended(client, batch.id)
        assert runs[9:] == ["6", "7", "8", "9", "10"]
        output = content_of(client, ended.output_file_id)
        assert [line["custom_id"] for line in output] == [str(n) for n in range(1, 11)]


def test_counts_tell_what_is_going_on(tmp_path: Path) -> None:
    go = threading.Event()

    async def wait(line: BatchLine) -> LineAnswer:
        while not go.is_set():
            await asyncio.sleep(0.005)
        return answer_of(line)

    with serving(tmp_path, wait, max_outstanding=3) as served, served.client() as client:
        batch = create_batch(client, jsonl(*(request_line(str(n)) for n in range(8))))
        until(lambda: served.jobs.counts().num_lines_under_way == 3)
        counts = served.jobs.counts()
        assert (counts.num_batches, counts.num_lines_waiting) == (1, 5)
        go.set()
        until_ended(client, batch.id)
        until(lambda: served.jobs.counts().num_batches == 0)
        counts = served.jobs.counts()
        assert (counts.num_lines_waiting, counts.num_lines_under_way) == (0, 0)
