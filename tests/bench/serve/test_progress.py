"""The bars of a run: in a terminal only, and never on standard output."""

from __future__ import annotations

import io
import sys

import pytest

from giveway.bench.serve.driver import NoWatcher
from giveway.bench.serve.progress import watching
from giveway.bench.serve.records import Outcome, RequestRecord
from giveway.bench.serve.workload import PlannedRequest, Source


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


SOURCES = [
    Source(iter(()), ("[interactive]",), None, 0.0, 2, is_endless=False),
    Source(iter(()), ("trace-p0", "trace-p20"), None, 0.0, 5, is_endless=False),
]
REQUEST = PlannedRequest("[interactive]", "x", 0.0, 1, 1, True, b"")


def record(outcome: Outcome) -> RequestRecord:
    return RequestRecord("[interactive]", "x", outcome, 0.0, 0.0, (1.0,), 1.0, 1, 1, 1)


def test_a_terminal_sees_how_many_are_done_under_way_and_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with watching(SOURCES, is_wanted=True) as watcher:
        for _ in range(3):
            watcher.began(REQUEST)
        watcher.ended(record(Outcome.COMPLETED))
        watcher.ended(record(Outcome.FAILED))
    drawn = terminal.getvalue()
    for text in ("[interactive]", "trace-p20", "2/2", "1 under way", "1 failed"):
        assert text in drawn
    assert capsys.readouterr().out == ""


def test_nobody_is_told_where_it_is_no_terminal_or_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    with watching(SOURCES, is_wanted=True) as watcher:
        assert isinstance(watcher, NoWatcher)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with watching(SOURCES, is_wanted=False) as watcher:
        assert isinstance(watcher, NoWatcher)
