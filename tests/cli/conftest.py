"""The command line inside this process: arguments in, exit code and both streams out."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from giveway.cli.__main__ import main

DRY_NOTICE = "dry run: no model, the text means nothing\n"


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    for name in [name for name in os.environ if name.startswith("GIVEWAY_")]:
        monkeypatch.delenv(name)

    def run(*arguments: object, stdin: str | bytes = "") -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        code = main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return run
