"""The routes at the level of HTTP: what is malformed, too large or meant to do harm is refused in OpenAI's words."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import openai
import pytest
from fastapi import FastAPI

from giveway.server.batch_jobs.jobs import BatchJobs
from giveway.server.batch_jobs.limits import BatchLimits
from giveway.server.batch_jobs.router import batch_router
from giveway.server.batch_jobs.store import BatchStore
from tests.server.batch_jobs.sample_lines import CHAT, jsonl, request_line
from tests.server.batch_jobs.serving import Served, echo, owner_of, serving, until, until_ended

LIMITS = BatchLimits(max_file_bytes=300_000)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("data"), limits=LIMITS) as running:
        yield running


def ask(
    served: Served, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """Send one request as it is; returns the status and the JSON of the answer."""
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=60)
    try:
        connection.request(method, path, body, {"Authorization": "Bearer alice", **(headers or {})})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def form(*parts: tuple[str, bytes], end: bytes = b"--edge--\r\n") -> bytes:
    """Make a multipart body of parts: what follows `form-data; `, and content."""
    pieces = [
        b"--edge\r\nContent-Disposition: form-data; " + header.encode() + b"\r\n\r\n" + content + b"\r\n"
        for header, content in parts
    ]
    return b"".join(pieces) + end


def post_form(served: Served, body: Any, content_type: str = "multipart/form-data; boundary=edge") -> tuple[int, Any]:
    return ask(served, "POST", "/v1/files", body, {"Content-Type": content_type})


PURPOSE = ('name="purpose"', b"batch")
FILE = ('name="file"; filename="in.jsonl"', b"content")


def test_a_form_is_taken_in_any_order_of_its_parts(served: Served) -> None:
    for parts in ((PURPOSE, FILE), (FILE, PURPOSE), (FILE, ('name="more"', b"1"), PURPOSE)):
        status, found = post_form(served, form(*parts))
        assert (status, found["bytes"], found["purpose"]) == (200, 7, "batch")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(FILE), "purpose"),
        (form(('name="purpose"', b"fine-tune"), FILE), "purpose"),
        (form(('name="purpose"', b"batch_output"), FILE), "purpose"),
        (form(('name="purpose"', b"\xff\xfe"), FILE), "purpose"),
        (form(PURPOSE), "file"),
        (form(PURPOSE, ('name="file"', b"no file name")), "file"),
        (form(PURPOSE, FILE, FILE), "file"),
        (form(PURPOSE, ('name="other"; filename="x"', b"")), "file"),
        (form(PURPOSE, FILE, end=b""), None),
        (form(PURPOSE, ("", b"no name")), None),
        (form(PURPOSE, PURPOSE, FILE), None),
        (form(*((f'name="f{n}"', b"") for n in range(17))), None),
        (form(('name="purpose"', b"batch" * 1000), FILE), None),
        (b"", None),
        (b"\0" * 1000, None),
        (b"--edge\r\n" + b"X: y\r\n" * 1000 + b"\r\n", None),
        (b"--edge\r\n" + b"X" * 100_000 + b": y\r\n\r\n", None),
        (form(PURPOSE, ('name="expires_after[anchor]"', b"now"), FILE), "expires_after.anchor"),
        (form(PURPOSE, ('name="expires_after[anchor]"', b"created_at"), FILE), "expires_after.seconds"),
        (
            form(
                PURPOSE,
                ('name="expires_after[anchor]"', b"created_at"),
                ('name="expires_after[seconds]"', b"3599"),
                FILE,
            ),
            "expires_after.seconds",
        ),
    ],
)
def test_a_form_that_is_wrong_is_refused_and_leaves_nothing(served: Served, body: bytes, param: str | None) -> None:
    before = ask(served, "GET", "/v1/files")[1]["data"]
    status, answer = post_form(served, body)
    assert (status, answer["error"]["type"], answer["error"]["param"]) == (400, "invalid_request_error", param)
    assert ask(served, "GET", "/v1/files")[1]["data"] == before


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary="])
def test_a_body_that_is_no_form_is_refused(served: Served, kind: str) -> None:
    assert post_form(served, form(PURPOSE, FILE), kind)[0] == 400


def test_a_boundary_of_any_length_is_no_crash(served: Served) -> None:
    assert post_form(served, b"x", "multipart/form-data; boundary=" + "x" * 5000)[0] == 400


def test_a_file_with_bytes_of_all_kinds_comes_back_as_it_was(served: Served) -> None:
    content = bytes(range(256)) * 40 + b"\r\n--edg\r\n--edge" * 3 + os.urandom(5000)
    with served.client() as client:
        source = client.files.create(file=("a.bin", content), purpose="batch")
        answer = client.files.content(source.id)
        assert answer.content == content
        assert answer.response.headers["content-disposition"] == f'attachment; filename="{source.id}.jsonl"'
        assert answer.response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_file_beyond_the_limit_is_refused_whether_or_not_its_size_is_announced(
    served: Served, is_chunked: bool
) -> None:
    body = form(PURPOSE, ('name="file"; filename="x"', b"x" * (LIMITS.max_file_bytes + 1)))
    pieces = iter([body[start : start + 50_000] for start in range(0, len(body), 50_000)])
    status, answer = post_form(served, pieces if is_chunked else body)
    assert (status, answer["error"]["param"]) == (413, "file")
    assert post_form(served, form(PURPOSE, ('name="file"; filename="x"', b"x" * LIMITS.max_file_bytes)))[0] == 200


def test_an_upload_that_is_broken_off_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path) as served:
        place = urlsplit(served.url)
        assert place.hostname is not None
        with socket.create_connection((place.hostname, place.port or 0)) as connection:
            connection.sendall(
                b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer alice\r\nContent-Length: 3000000\r\n"
                b"Content-Type: multipart/form-data; boundary=edge\r\n\r\n"
                + form(PURPOSE, ('name="file"; filename="x"', b"x" * 2_000_000), end=b"")
            )
            until(lambda: any(path.stat().st_size for path in (tmp_path / "parts").iterdir()))
        until(lambda: not os.listdir(tmp_path / "parts"))
        assert ask(served, "GET", "/v1/files")[1]["data"] == []
    assert "ERROR" not in caplog.text


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", 'a"b', "a\r\nX: y", "\N{PILE OF POO}" * 300, "\0", "..", "-rf", "<script>"]
)
def test_a_name_of_a_file_is_text_and_nothing_else(served: Served, name: str) -> None:
    with served.client() as client:
        source = client.files.create(file=(name, b"x"), purpose="batch")
        assert client.files.content(source.id).content == b"x"
        assert len(source.filename) <= 255
        assert source.filename.isprintable()


@pytest.mark.parametrize(
    "name",
    ["..", "../lock", "file-../../batches.sqlite", "file-\0", "\ud800", "file-" + "0" * 32, "x" * 5000, "%00", "'--"],
)
def test_ids_that_no_one_has_are_not_found(served: Served, name: str) -> None:
    text = quote(name.encode("utf-8", "surrogatepass"), safe="")
    for method, path in (
        ("GET", f"/v1/files/{text}"),
        ("GET", f"/v1/files/{text}/content"),
        ("DELETE", f"/v1/files/{text}"),
        ("GET", f"/v1/batches/{text}"),
        ("POST", f"/v1/batches/{text}/cancel"),
    ):
        assert ask(served, method, path)[0] in (404, 405)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"), ("limit=-1", "limit"), ("limit=10001", "limit"), ("limit=1e3", "limit"),
        ("limit=", "limit"), ("limit=" + "9" * 5000, "limit"), ("limit=%D9%A1", "limit"), ("order=up", "order"),
        ("after=x", "after"), ("after=..%2Flock", "after"), ("after=%00", "after"),
    ],
)  # fmt: skip
def test_a_list_refuses_a_query_that_is_wrong(served: Served, query: str, param: str) -> None:
    for path in ("/v1/files", "/v1/batches"):
        status, answer = ask(served, "GET", f"{path}?{query}")
        assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "-1h"}, "completion_window"),
        ({"completion_window": "24"}, "completion_window"),
        ({"completion_window": "367d"}, "completion_window"),
        ({"completion_window": "\N{ARABIC-INDIC DIGIT ONE}h"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"input_file_id": ["x"]}, "input_file_id"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"metadata": []}, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 10**30}}, "output_expires_after.seconds"),
    ],
)
def test_a_batch_is_refused_with_the_name_of_the_field(served: Served, changes: dict[str, Any], param: str) -> None:
    values = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", **changes}
    status, answer = ask(served, "POST", "/v1/batches", json.dumps(values))
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "body", [b"", b"x", b"[]", b"null", b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b'{"metadata": {"a": "\\ud800"}}']
)
def test_a_body_that_is_no_request_for_a_batch_is_refused(served: Served, body: bytes) -> None:
    assert ask(served, "POST", "/v1/batches", body)[0] == 400


def test_a_body_without_end_is_refused(served: Served) -> None:
    pieces = (b" " * 2**16 for _ in range(20))
    assert ask(served, "POST", "/v1/batches", pieces)[0] == 413


@pytest.mark.parametrize(("window", "seconds"), [("24h", 86400), ("90m", 5400), ("7d", 604800), ("1m", 60)])
def test_a_completion_window_may_be_of_minutes_hours_or_days(served: Served, window: str, seconds: int) -> None:
    with served.client() as client:
        source = client.files.create(file=jsonl(request_line("a")), purpose="batch")
        batch = client.batches.create(input_file_id=source.id, endpoint=CHAT, completion_window=window)  # type: ignore[arg-type]
        assert (batch.completion_window, batch.expires_at) == (window, batch.created_at + seconds)


def test_files_and_outputs_may_be_told_when_to_expire(served: Served) -> None:
    with served.client() as client:
        expiry: Any = {"anchor": "created_at", "seconds": 3600}
        source = client.files.create(file=jsonl(request_line("a")), purpose="batch", expires_after=expiry)
        assert source.expires_at == source.created_at + 3600
        batch = client.batches.create(
            input_file_id=source.id, endpoint=CHAT, completion_window="24h", output_expires_after=expiry
        )
        output = client.files.retrieve(until_ended(client, batch.id).output_file_id)
        assert output.expires_at == output.created_at + 3600


def test_who_has_no_key_gets_nothing(served: Served) -> None:
    for method, path in (
        ("GET", "/v1/files"),
        ("POST", "/v1/files"),
        ("GET", "/v1/files/x"),
        ("GET", "/v1/files/x/content"),
        ("DELETE", "/v1/files/x"),
        ("GET", "/v1/batches"),
        ("POST", "/v1/batches"),
        ("GET", "/v1/batches/x"),
        ("POST", "/v1/batches/x/cancel"),
    ):
        assert ask(served, method, path, headers={"Authorization": ""})[0] == 401


def test_content_that_is_gone_from_the_disk_is_an_error_in_words(tmp_path: Path) -> None:
    with serving(tmp_path) as served, served.client() as client:
        source = client.files.create(file=b"x", purpose="batch")
        (tmp_path / "files" / source.id).unlink()
        with pytest.raises(openai.InternalServerError, match="is gone from the server's data directory"):
            client.files.content(source.id)
        assert client.files.delete(source.id).deleted


def test_the_routes_describe_themselves(tmp_path: Path) -> None:
    with BatchStore(tmp_path) as store:
        app = FastAPI()
        app.include_router(batch_router(BatchJobs(store, echo, max_outstanding=1), owner_of))
        paths = app.openapi()["paths"]
    assert set(paths) == {
        "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content",
        "/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel",
    }  # fmt: skip
    schema = paths["/v1/batches"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["input_file_id", "endpoint", "completion_window"]
