"""What clients send to the routes of the Batch API, on the whole server: it is refused in words."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.batch_jobs.sample_lines import jsonl
from tests.server.batch_jobs.serving import until_ended
from tests.server.running import Running, running, wait_until
from tests.server.test_batches import create, line
from tests.server.test_request_edges import BROKEN_BODIES, error_of, raw

LIMIT = 200_000  # bytes of a body; of an upload as well
TIMEOUT_S = 0.4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data: Path = tmp_path_factory.mktemp("data")
    with running(
        limits={"max_body_bytes": LIMIT, "body_timeout_s": TIMEOUT_S},
        server={"has_batch_api": True, "data_dir": data, "max_upload_bytes": LIMIT},
        num_kv_blocks=64,
    ) as server:
        yield server
        with server.client() as client:
            batch_id = create(client, [line("last", {"prompt": "a", "max_tokens": 2})])
            assert until_ended(client, batch_id).request_counts.completed == 1
        server.until_idle()
        assert not list((data / "parts").iterdir()), "an upload that was broken off is left behind"


@pytest.mark.parametrize("body", BROKEN_BODIES, ids=lambda body: repr(body[:40]))
@pytest.mark.parametrize("path", ["/v1/batches", "/v1/files", "/detokenize"])
def test_a_broken_body_is_a_client_error_in_openais_shape(served: Running, path: str, body: bytes) -> None:
    for kind in ("application/json", "multipart/form-data; boundary=x"):
        response = served.post(path, content=body, headers={"Content-Type": kind})
        assert response.status_code in (400, 413, 415), response.text
        error_of(response)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/batches/..%2f..%2fetc%2fpasswd",
        "/v1/files/%00",
        "/v1/files/%ff%fe",
        "/v1/files/../../etc/passwd/content",
        "/v1/files/" + "a" * 5000,
        "/v1/batches/batch_%F0%9F%98%80",
        "/v1/files?limit=99999999999999999999",
        "/v1/batches?after=%00&limit=1",
        "/v1/files?order=sideways",
        "/v1/requests/%00",
        "/v1/models/%ff",
    ],
)
def test_an_address_that_means_nothing_is_a_client_error(served: Running, path: str) -> None:
    response = served.get(path)
    assert response.status_code in (400, 404), response.text
    error_of(response)


def test_a_wrong_method_is_told_as_such(served: Running) -> None:
    for method, path in (
        ("PUT", "/v1/files"),
        ("PATCH", "/v1/batches"),
        ("DELETE", "/v1/batches/batch_x"),
        ("POST", "/metrics"),
    ):
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        said = raw(served, head.encode())
        assert said.startswith(b"HTTP/1.1 405"), said
        assert b'"error"' in said


UPLOAD = b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=x\r\n"
FILE_HEAD = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'


def test_an_upload_beyond_the_limit_is_refused_announced_or_not(served: Running) -> None:
    said = raw(served, UPLOAD + b"Content-Length: 99999999999\r\nConnection: close\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 413")
    content = FILE_HEAD + b"x" * (LIMIT + 100)
    said = raw(served, UPLOAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(content) + content)
    assert said.startswith(b"HTTP/1.1 413")
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [FILE_HEAD, *[b"x" * 50_000] * 5])
    said = raw(served, UPLOAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("head", [UPLOAD, b"POST /v1/batches HTTP/1.1\r\nHost: 127.0.0.1\r\n"], ids=["upload", "batch"])
def test_a_body_that_stops_coming_is_given_up_and_leaves_nothing(served: Running, head: bytes) -> None:
    said = raw(served, head + b"Content-Length: 500\r\nConnection: close\r\n\r\n" + FILE_HEAD)
    assert said.startswith(b"HTTP/1.1 408"), said


def test_an_upload_may_take_long_as_long_as_something_comes(served: Running) -> None:
    # Goal: the time limit of a body is one of silence here; the file is larger than any wait would allow at this pace.
    content = (
        FILE_HEAD + jsonl(line("a", {"prompt": "a"})) + b'\r\n--x\r\nContent-Disposition: form-data; name="purpose"'
    )
    content += b"\r\n\r\nbatch\r\n--x--\r\n"
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(UPLOAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(content))
        for start in range(0, len(content), 16):
            connection.sendall(content[start : start + 16])
            time.sleep(TIMEOUT_S / 8)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    assert received.startswith(b"HTTP/1.1 200"), received


def test_uploads_that_are_broken_off_leave_nothing(served: Running) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    for length in (0, 10, len(FILE_HEAD), len(FILE_HEAD) + 50_000):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            content = (FILE_HEAD + b"x" * 60_000)[:length]
            connection.sendall(UPLOAD + b"Content-Length: 100000\r\n\r\n" + content)
    parts = served.server.directory / "parts"
    wait_until(lambda: not list(parts.iterdir()), "a part of a file is left")


LINES: list[dict[str, Any]] = [
    line("nonsense", {"prompt": {"a": 1}}),
    line("huge", {"prompt": [1] * 20_000, "max_tokens": 5}),
    line("stream", {"prompt": "a", "stream": True, "max_tokens": 2}),
    line("model", {"model": "other", "prompt": "a"}),
    line("deep", {"prompt": "a", "metadata": {"a": [[[[[[]]]]]]}, "max_tokens": 2}),
    line("form", {"prompt": "a", "structured_outputs": {"regex": "("}}),
    line("many", {"prompt": ["a"] * 5000}),
]


def test_lines_that_are_wrong_each_get_their_answer_and_the_right_one_too(served: Running) -> None:
    with served.client() as client:
        batch = until_ended(client, create(client, [*LINES, line("right", {"prompt": "a", "max_tokens": 3})]))
        assert batch.status in ("completed", "failed")
        if batch.status == "completed":
            counts = batch.request_counts
            assert counts.completed + counts.failed == counts.total == len(LINES) + 1
            assert counts.completed >= 1
