"""Start, health and end of the server; the end loses nothing that was promised."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from giveway.core.request import RequestState
from tests.server.running import ANY_TIME_S, running, wait_until
from tests.server.test_clients_that_go_away import open_request, states
from tests.server.test_streams import read_all


@contextmanager
def process(*flags: str, directory: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`giveway serve` as a process of its own; it is gone at the end whatever happens."""
    command = [sys.executable, "-m", "giveway", "serve", "--port", "0", "--data-dir", str(directory), *flags]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GIVEWAY_CACHE_DIR": str(directory / "cache"), **environment},
    ) as running_process:
        try:
            assert running_process.stdout is not None
            line = running_process.stdout.readline()
            found = re.match(r"(http://\S+) serves", line)
            assert found, f"{line!r} {running_process.stderr.read() if running_process.stderr else ''}"
            yield running_process, found[1]
        finally:
            if running_process.poll() is None:
                running_process.kill()
            running_process.communicate(timeout=ANY_TIME_S)


def test_the_first_lines_say_where_it_is_what_it_has_and_how_to_ask(tmp_path: Path) -> None:
    # The dry run never ends a text by itself, so what the pool holds says how long the answer is.
    with process("--device", "dry", "--num-kv-blocks", "16", directory=tmp_path) as (server, url):
        assert server.stdout is not None
        lines = [server.stdout.readline() for _ in range(3)]
        assert re.search(r"\d+ tokens, \d+ blocks, [\d.]+ \w+", lines[0])
        assert "priority from 0, default from 10, flex from 20, batch from 30" in lines[1]
        curl = lines[2].removeprefix("try: ")
        assert url in curl
        done = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=ANY_TIME_S, check=True)
        assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_sigterm_lets_those_in_progress_end_and_takes_no_others() -> None:
    with running(step_s=0.005) as server:
        answers: list[Any] = []
        body = {"prompt": [1], "max_tokens": 150, "ignore_eos": True}
        threads = [
            threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body))) for _ in range(4)
        ]
        streamed = open_request(server, {**body, "stream": True})
        for thread in threads:
            thread.start()
        wait_until(lambda: len(states(server)) == 5, "they are not served")
        server.end()
        wait_until(lambda: server.get("/health").status_code == 503, "it says that all is well")
        refused = server.post("/v1/completions", body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["Retry-After"]
        assert b"[DONE]" in read_all(streamed)
        streamed.close()
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [200] * 4
        assert all(answer.json()["usage"]["completion_tokens"] == 150 for answer in answers)
        server.wait()
        assert server.exit_code == 0


def test_while_the_server_drains_batches_and_files_can_be_looked_at_but_not_changed(tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": [1], "max_tokens": 2}}
    with running(step_s=0.005, server={"has_batch_api": True, "data_dir": tmp_path}) as server:
        client = server.client()
        file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch does not end")
        streamed = open_request(server, {"prompt": [1], "max_tokens": 400, "ignore_eos": True, "stream": True})
        wait_until(lambda: len(states(server)) == 1, "it is not served")
        server.end()
        wait_until(lambda: server.get("/health").status_code == 503, "it says that all is well")
        for path in ("/v1/batches", f"/v1/batches/{batch.id}", "/v1/files", f"/v1/files/{file.id}/content"):
            assert server.get(path).status_code == 200, path
        wanted = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
        refused = [
            server.post("/v1/batches", wanted),
            server.post(f"/v1/batches/{batch.id}/cancel"),
            server.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"}),
            httpx.delete(f"{server.url}/v1/files/{file.id}"),
        ]
        for answer in refused:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
            assert answer.headers["Retry-After"]
        assert b"[DONE]" in read_all(streamed)
        streamed.close()
        server.wait()
        assert server.exit_code == 0


def test_when_the_time_for_draining_is_over_clients_are_told_and_the_server_ends() -> None:
    with running(step_s=0.005, server={"drain_timeout_s": 0.2}) as server:
        streamed = open_request(server, {"prompt": [1], "max_tokens": 4000, "ignore_eos": True, "stream": True})
        whole: list[Any] = []
        thread = threading.Thread(
            target=lambda: whole.append(
                server.post("/v1/completions", {"prompt": [2], "max_tokens": 4000, "ignore_eos": True})
            )
        )
        thread.start()
        wait_until(lambda: states(server) == [RequestState.RUNNING] * 2, "they are not served")
        server.end()
        received = read_all(streamed)
        streamed.close()
        assert b'"code":"shutting_down"' in received
        thread.join()
        assert whole[0].status_code == 503
        server.wait()
        assert server.exit_code == 0


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_process_in_order(name: str, tmp_path: Path) -> None:
    with process("--device", "dry", directory=tmp_path) as (server, url):
        assert httpx.get(f"{url}/health").status_code == 200
        server.send_signal(signal.Signals[name])
        assert server.wait(ANY_TIME_S) == 0


def test_two_signals_within_milliseconds_do_not_cut_off_what_is_in_progress() -> None:
    # `timeout` sends SIGTERM to the process and then to its group.
    with running(step_s=0.005) as server:
        streamed = open_request(server, {"prompt": [1], "max_tokens": 200, "ignore_eos": True, "stream": True})
        wait_until(lambda: states(server) == [RequestState.RUNNING], "it is not served")

        def signal_twice() -> None:
            server.server.lifecycle.take_signal()
            server.server.lifecycle.take_signal()

        server.loop.call_soon_threadsafe(signal_twice)
        assert b"[DONE]" in read_all(streamed)
        streamed.close()
        server.wait()
        assert server.exit_code == 0


def test_a_second_signal_that_comes_later_ends_what_is_in_progress_at_once() -> None:
    with running(step_s=0.005) as server:
        streamed = open_request(server, {"prompt": [1], "max_tokens": 4000, "ignore_eos": True, "stream": True})
        wait_until(lambda: states(server) == [RequestState.RUNNING], "it is not served")

        def signal_twice() -> None:
            server.server.lifecycle.take_signal()
            server.loop.call_later(0.6, server.server.lifecycle.take_signal)

        server.loop.call_soon_threadsafe(signal_twice)
        assert b'"code":"shutting_down"' in read_all(streamed)
        streamed.close()
        server.wait()
        assert server.exit_code == 0


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    with process("--device", "dry", directory=tmp_path / "a") as (_, url):
        port = url.rpartition(":")[2]
        command = [sys.executable, "-m", "giveway", "serve", "--port", port, "--model", "no-such-model"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANY_TIME_S, check=False)
        assert done.returncode == 1
        assert "cannot listen" in done.stderr
        assert port in done.stderr


def test_health_says_so_when_the_loop_does_not_advance() -> None:
    with running(limits={"stall_timeout_s": 0.3}) as server:
        is_stuck = threading.Event()

        def stand_still(*_: object) -> None:
            is_stuck.wait(ANY_TIME_S)

        server.engine.add_listener(stand_still)
        connection = open_request(server, {"prompt": [1], "max_tokens": 5})
        wait_until(lambda: server.get("/health").status_code == 503, "it says that all is well")
        assert server.get("/health").json()["error"]["code"] == "unhealthy"
        is_stuck.set()
        wait_until(lambda: server.get("/health").status_code == 200, "it does not recover")
        connection.close()


def test_an_engine_that_dies_tells_its_clients_and_ends_the_server_with_an_error() -> None:
    with running(step_s=0.002) as server:

        def fail(*_: object) -> None:
            raise MemoryError("on purpose")

        streamed = open_request(server, {"prompt": [1], "max_tokens": 4000, "stream": True})
        wait_until(lambda: states(server) == [RequestState.RUNNING], "it is not served")
        server.engine.add_listener(fail)
        assert b'"code":"engine_error"' in read_all(streamed)
        streamed.close()
        server.wait()
        assert server.exit_code == 1


def test_a_slow_step_does_not_hold_up_the_http_side() -> None:
    # Goal: the event loop answers while a step is under way; only what needs the engine waits for it.
    with running(step_s=0.5) as server:
        connection = open_request(server, {"prompt": [1], "max_tokens": 200})
        wait_until(lambda: states(server) == [RequestState.RUNNING], "it is not served")
        step = server.engine.scheduler.state.next_step_id
        for _ in range(20):
            assert server.get("/version").status_code == 200
        assert server.engine.scheduler.state.next_step_id <= step + 8, "each answer waited for a step"
        connection.close()
        time.sleep(0)
