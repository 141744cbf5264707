"""Public trace formats, read line by line; whatever is wrong is named with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from giveway.bench.serve import traces
from giveway.bench.serve.traces import TraceFormat, TraceRequest, find_format, look_through, read_trace
from giveway.core.errors import ConfigError

MOONCAKE = """\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 2366], "priority": 5}

{"timestamp": 30535, "input_length": 900, "output_length": 0, "hash_ids": [1, 2]}
{"timestamp": 31000.5, "input_length": 12, "output_length": 3}
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118.5,GPT-4,417,0,417,API log
120,GPT-4,300,276,576,"API log, retried"
"""
BURSTGPT_WITH_SESSIONS = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log
19440161.0,d5983bf9,2,ChatGPT,36,29,65,Conversation log
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9805900,396,109
2023-11-17 18:15:46.6805900,879,55
"""
AZURE_WITH_ZONE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 01:00:00.009930+01:00,2399,6
"""


def put(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "trace"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path, trace_format: TraceFormat | None = None, limit: int | None = None) -> list[TraceRequest]:
    return list(read_trace(path, trace_format or find_format(path), limit=limit))


def test_mooncake_has_milliseconds_blocks_and_here_priorities(tmp_path: Path) -> None:
    path = put(tmp_path, MOONCAKE)
    assert find_format(path) is TraceFormat.MOONCAKE
    first, second, third = read(path)
    assert first == TraceRequest(0.0, 6955, 52, (46, 47, 48))
    assert second == TraceRequest(second.due_s, 6472, 26, (46, 47, 2366), priority=5)
    assert third == TraceRequest(third.due_s, 12, 3)
    assert (second.due_s, third.due_s) == pytest.approx((3.053, 3.5185))
    summary = look_through(path, TraceFormat.MOONCAKE, limit=None)
    assert (summary.num_requests, summary.num_left_out) == (3, 1)
    assert summary.last_due_s == pytest.approx(3.5185)
    assert summary.priorities == (None, 5)


def test_burstgpt_has_seconds_and_its_failed_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    path = put(tmp_path, BURSTGPT)
    assert find_format(path) is TraceFormat.BURSTGPT
    assert read(path) == [TraceRequest(0.0, 472, 18), TraceRequest(40.0, 1087, 230), TraceRequest(115.0, 300, 276)]
    assert look_through(path, TraceFormat.BURSTGPT, limit=None).num_left_out == 1


def test_columns_are_found_by_name_wherever_they_stand(tmp_path: Path) -> None:
    assert read(put(tmp_path, BURSTGPT_WITH_SESSIONS)) == [TraceRequest(0.0, 906, 446), TraceRequest(51.0, 36, 29)]
    swapped = "Response tokens, Request tokens ,Timestamp\r\n1,2,3\r\n4,5,6.5\r\n"
    assert read(put(tmp_path, swapped)) == [TraceRequest(0.0, 2, 1), TraceRequest(3.5, 5, 4)]


def test_azure_has_dates_with_seven_digits_or_a_zone(tmp_path: Path) -> None:
    path = put(tmp_path, AZURE)
    assert find_format(path) is TraceFormat.AZURE
    assert [(each.prompt_tokens, each.output_tokens) for each in read(path)] == [(374, 44), (396, 109), (879, 55)]
    assert [each.due_s for each in read(path)] == pytest.approx([0.0, 4.3, 86400.0])
    assert [each.due_s for each in read(put(tmp_path, AZURE_WITH_ZONE))] == pytest.approx([0.0, 0.0])


def test_a_byte_order_mark_does_not_hide_the_first_column(tmp_path: Path) -> None:
    assert len(read(put(tmp_path, b"\xef\xbb\xbf" + AZURE.encode()))) == 3


def test_a_limit_ends_the_trace_and_nothing_behind_it_is_read(tmp_path: Path) -> None:
    path = put(tmp_path, BURSTGPT + "broken\n")
    assert len(read(path, limit=2)) == 2
    assert look_through(path, TraceFormat.BURSTGPT, limit=2).num_requests == 2
    with pytest.raises(ConfigError, match="line 6: 1 cells"):
        look_through(path, TraceFormat.BURSTGPT, limit=None)


def test_only_what_will_be_replayed_within_the_duration_is_looked_through(tmp_path: Path) -> None:
    path = put(tmp_path, BURSTGPT + "broken\n")
    summary = look_through(path, TraceFormat.BURSTGPT, limit=None, until_s=114.0)
    assert (summary.num_requests, summary.num_left_out, summary.last_due_s) == (2, 1, 40.0)


def test_a_limit_counts_the_same_requests_when_looked_through_and_when_replayed(tmp_path: Path) -> None:
    # Goal: lines that are left out do not use up the limit in one of the two only.
    path = put(tmp_path, BURSTGPT)
    assert look_through(path, TraceFormat.BURSTGPT, limit=3).num_requests == len(read(path, limit=3)) == 3


GOOD = {"timestamp": 1, "input_length": 2, "output_length": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestamp": None}, "timestamp is None; milliseconds are needed"),
        ({"timestamp": True}, "timestamp is True"),
        ({"timestamp": "1"}, "timestamp is '1'"),
        ({"timestamp": float("nan")}, "this is no time"),
        ({"timestamp": 10**400}, "this is no time"),
        ({"input_length": None}, "input_length is None; a whole number"),
        ({"input_length": -1}, "input_length is -1"),
        ({"input_length": 2.5}, "input_length is 2.5"),
        ({"input_length": 10**12}, "from 0 to 10000000"),
        ({"input_length": float("inf")}, "input_length is inf"),
        ({"output_length": [3]}, "output_length is"),
        ({"output_length": True}, "output_length is True"),
        ({"hash_ids": 5}, "hash_ids must be a list of whole numbers"),
        ({"hash_ids": [1, "2"]}, "hash_ids must be a list of whole numbers"),
        ({"priority": "high"}, "priority is 'high'"),
        ({"priority": 1.5}, "priority is 1.5"),
    ],
)
def test_a_mooncake_line_with_a_wrong_field_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = put(tmp_path, json.dumps(GOOD) + "\n\n" + json.dumps(GOOD | change) + "\n")
    with pytest.raises(ConfigError, match=message) as caught:
        look_through(path, TraceFormat.MOONCAKE, limit=None)
    assert f"{path}, line 3: " in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "a JSON object is needed, found list"),
        ("[" * 100_000, "not valid JSON"),
        ('{"timestamp": ' + "1" * 5000 + "}", "not valid JSON"),
        ("\x00\x01", "not valid JSON"),
    ],
)
def test_a_mooncake_line_that_is_no_object_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = put(tmp_path, json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=message) as caught:
        look_through(path, TraceFormat.MOONCAKE, limit=None)
    assert "line 2" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("7,GPT-4,x,1,1,a", "line 3: Request tokens is 'x'; a number is needed"),
        ("7,GPT-4,-1,1,1,a", "line 3: Request tokens is -1.0"),
        ("7,GPT-4,nan,1,1,a", "line 3: Request tokens is nan"),
        ("7,GPT-4,1e300,1,1,a", "line 3: Request tokens is 1e"),
        ("7,GPT-4,1.5,1,1,a", "line 3: Request tokens is 1.5"),
        (",GPT-4,1,1,1,a", "line 3: Timestamp is ''"),
        ("inf,GPT-4,1,1,1,a", "line 3: Timestamp is inf; this is no time"),
        ("7,GPT-4,1,1,1", "line 3: 5 cells, the header has 6"),
        ("4,GPT-4,1,1,1,a", "line 3: its time is 1 s before that of the line above; sort the file"),
        ('7,"GPT-4,1,1,1,a', "line 3: unexpected end of data"),
    ],
)
def test_a_csv_line_that_is_wrong_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = put(tmp_path, "".join(BURSTGPT.splitlines(keepends=True)[:2]) + line + "\n")
    with pytest.raises(ConfigError, match=message):
        look_through(path, TraceFormat.BURSTGPT, limit=None)


def test_an_azure_date_that_is_none_is_named(tmp_path: Path) -> None:
    path = put(tmp_path, AZURE + "yesterday,1,1\n")
    with pytest.raises(ConfigError, match="line 5: TIMESTAMP is 'yesterday'; a date such as"):
        look_through(path, TraceFormat.AZURE, limit=None)


def test_files_that_are_no_trace_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="neither JSON lines"):
        find_format(put(tmp_path, "name,age\nx,3\n"))
    with pytest.raises(ConfigError, match="neither JSON lines"):
        find_format(put(tmp_path, b"\x00\xff\xfe" * 5000))
    with pytest.raises(ConfigError, match="neither JSON lines"):
        find_format(put(tmp_path, ""))
    with pytest.raises(ConfigError, match="no request with prompt and output tokens"):
        look_through(put(tmp_path, AZURE.splitlines()[0] + "\n"), TraceFormat.AZURE, limit=None)
    with pytest.raises(ConfigError, match="line 1: no column 'TIMESTAMP'; found Timestamp"):
        look_through(put(tmp_path, BURSTGPT), TraceFormat.AZURE, limit=None)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        find_format(tmp_path / "absent")
    monkeypatch.setattr(traces, "MAX_LINE_CHARACTERS", 100)
    with pytest.raises(ConfigError, match="line 1: longer than 100 characters"):
        look_through(put(tmp_path, '{"timestamp": 1' + " " * 100), TraceFormat.MOONCAKE, limit=None)


def test_a_trace_is_read_while_it_is_replayed_not_before(tmp_path: Path) -> None:
    # Goal: a file of millions of lines costs no memory: the first request is there although a later line is broken.
    path = put(tmp_path, json.dumps(GOOD) + "\n" + "broken\n")
    assert next(read_trace(path, TraceFormat.MOONCAKE, limit=None)).prompt_tokens == 2
