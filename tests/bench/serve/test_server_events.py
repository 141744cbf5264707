"""Events out of bytes, however these are cut and whatever stands between them."""

from __future__ import annotations

import random

import pytest

from giveway.bench.serve import server_events
from giveway.bench.serve.server_events import EventParser, EventTooLongError, ServerEvent


def parse(*pieces: bytes) -> list[ServerEvent]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def data(*texts: str) -> list[ServerEvent]:
    return [ServerEvent("message", text) for text in texts]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
def test_every_line_end_of_the_standard_ends_a_line(end: str) -> None:
    lines = [": hello", "data: a", "", "event: error", "data: b", "data:c", "id: 7", "retry: 1", "", "data", "", ""]
    assert parse(end.join(lines).encode()) == [*data("a"), ServerEvent("error", "b\nc"), *data("")]


def test_however_the_stream_is_cut_the_events_are_the_same() -> None:
    # Goal: line ends, characters of several bytes and the byte order mark may be cut in the middle.
    whole = '\ufeffdata: {"text": "für 日本"}\r\n\r\n: ping\r\n\r\ndata: x\r\ndata: y\r\n\r\ndata: [DONE]\n\n'.encode()
    expected = data('{"text": "für 日本"}', "x\ny", "[DONE]")
    assert parse(whole) == expected
    rng = random.Random(7)
    for _ in range(300):
        cuts = sorted(rng.sample(range(1, len(whole)), rng.randint(1, 12)))
        pieces = [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        assert parse(*pieces) == expected
    assert parse(*(bytes([byte]) for byte in whole)) == expected


def test_an_event_is_there_as_soon_as_its_empty_line_is() -> None:
    # Goal: the moment of a token is that of its event, also with a lone carriage return at the end of a piece.
    parser = EventParser()
    assert parser.feed(b"data: a\r\n") == []
    assert parser.feed(b"\r") == data("a")
    assert parser.feed(b"\ndata: b\r\n\r\n") == data("b")


def test_a_last_event_without_its_empty_line_counts_at_the_end() -> None:
    assert parse(b"data: a\n\ndata: [DONE]") == data("a", "[DONE]")
    assert parse(b"data: a\n\n: comment") == data("a")
    assert parse() == []


def test_bytes_that_are_no_text_do_no_harm() -> None:
    assert parse(b"data: \xff\xfe\n\n") == data("\ufffd\ufffd")
    assert parse(b"\x00\x01\x02\n\n<html>\n\n") == []


def test_a_server_that_never_ends_an_event_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_events, "MAX_EVENT_BYTES", 1000)
    parser = EventParser()
    assert parser.feed(b"x" * 600) == []
    with pytest.raises(EventTooLongError, match="more than 1000 bytes"):
        parser.feed(b"x" * 600)
    # What is many events instead is no harm.
    parser = EventParser()
    assert sum(len(parser.feed(b"data: 0123456789\n\n: ping\n\n")) for _ in range(500)) == 500
