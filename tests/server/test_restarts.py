"""`giveway serve` as a process that is killed or told to end while it works on a batch, and started again."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai

from tests.server.batch_jobs.serving import content_of, num_completed, until_ended
from tests.server.batch_jobs.test_crash import recorded
from tests.server.running import ANY_TIME_S, wait_until
from tests.server.test_batches import create, line
from tests.server.test_lifecycle import process

NUM_LINES, NUM_TOKENS = 24, 400
# Lines are told apart in the log by the length of their prompt.
LINES = [
    line(f"line-{n}", {"prompt": [5] * (n + 1), "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0})
    for n in range(NUM_LINES)
]


@dataclass(slots=True)
class Logged:
    """A server, and what it writes to its log."""

    process: subprocess.Popen[str]
    url: str
    ended: list[dict[str, Any]] = field(default_factory=list)  # the line of each finished request

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=ANY_TIME_S)

    def lines_ended(self) -> list[str]:
        """Custom ids of the lines of batches that were answered, in order."""
        good = [each for each in self.ended if each["batch"] and each["status"] == 200]
        return [f"line-{each['prompt_tokens'] - 1}" for each in good]


@contextmanager
def serving(directory: Path) -> Iterator[Logged]:
    flags = (
        "--device",
        "dry",
        "--max-num-seqs",
        "2",
        "--num-kv-blocks",
        "200",
        "--log-format",
        "json",
        "--drain-timeout-s",
        "500",
    )
    cache = str(directory / "cache")
    with process(*flags, directory=directory / "data", GIVEWAY_CACHE_DIR=cache) as (running_process, url):
        logged, stderr = Logged(running_process, url), running_process.stderr
        assert stderr is not None

        def read() -> None:
            for text in stderr:
                told = json.loads(text)
                if told["message"] == "request finished":
                    logged.ended.append(told)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield logged
        finally:
            if running_process.poll() is None:
                running_process.kill()
            reader.join()
            stderr.close()


def wait_for_answers(client: openai.OpenAI, batch_id: str, num_lines: int) -> None:
    wait_until(lambda: num_completed(client, batch_id) >= num_lines, "the batch does not go on")


def test_a_batch_survives_three_kills_and_no_answered_line_is_run_again(tmp_path: Path) -> None:
    # Goal: nothing lost, nothing doubled, and what the disk knows is never computed again.
    batch_id, done = "", set[str]()
    for round_number in range(3):
        goal = len(done) + 4
        with serving(tmp_path) as server, server.client() as client:
            batch_id = batch_id or create(client, LINES)
            wait_for_answers(client, batch_id, goal)
            server.process.send_signal(signal.SIGKILL)
            assert server.process.wait(ANY_TIME_S) == -signal.SIGKILL
        assert not done & set(server.lines_ended()), "an answered line was run again"
        done = recorded(tmp_path)
        assert len(done) >= goal, f"answers were lost in round {round_number}"
    with serving(tmp_path) as server, server.client() as client:
        batch = until_ended(client, batch_id)
        counts = batch.request_counts
        assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", NUM_LINES, NUM_LINES, 0)
        answers = content_of(client, batch.output_file_id)
        assert [each["custom_id"] for each in answers] == [each["custom_id"] for each in LINES]
        assert all(each["response"]["body"]["usage"]["completion_tokens"] == NUM_TOKENS for each in answers)
        body = LINES[7]["body"]
        alone = httpx.post(f"{server.url}/v1/completions", json=body, timeout=ANY_TIME_S).json()
        assert answers[7]["response"]["body"]["choices"] == alone["choices"]
        assert client.batches.list().data == [batch]
    again = Counter(server.lines_ended())
    assert set(again) == {each["custom_id"] for each in LINES} - done, "an answered line was run again, or one was not"
    assert set(again.values()) == {1}


def test_sigterm_lets_interactive_requests_end_and_keeps_the_batch_for_the_next_start(tmp_path: Path) -> None:
    with serving(tmp_path) as server, server.client() as client:
        batch_id = create(client, LINES)
        wait_for_answers(client, batch_id, 3)
        stream = client.completions.create(
            model="dry run", prompt=[9], max_tokens=1000, stream=True, extra_body={"ignore_eos": True, "priority": 0}
        )
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.process.wait(ANY_TIME_S) == 0
    done = recorded(tmp_path)
    assert set(server.lines_ended()) == done, "an answer that was given is not kept"
    assert 3 <= len(done) < NUM_LINES
    interactive = [each for each in server.ended if not each["batch"]]
    assert [(each["status"], each["output_tokens"]) for each in interactive] == [(200, 1000)]
    with serving(tmp_path) as server, server.client() as client:
        batch = until_ended(client, batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", NUM_LINES)
        custom_ids = [each["custom_id"] for each in content_of(client, batch.output_file_id)]
        assert custom_ids == [each["custom_id"] for each in LINES]
    assert Counter(server.lines_ended()) == Counter({each["custom_id"] for each in LINES} - done)
