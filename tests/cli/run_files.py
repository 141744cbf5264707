"""Input and output files of `giveway run`, as its tests write and read them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DRY = ("--device", "dry", "--temperature", 0)


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def records(path: Path) -> dict[int, dict[str, Any]]:
    """Answers by line number; each line once."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_line = {record["line"]: record for record in found}
    assert len(by_line) == len(found)
    return by_line


def texts(path: Path) -> dict[int, str]:
    return {number: record["text"] for number, record in records(path).items()}


def ten_lines(folder: Path) -> Path:
    return write_lines(folder / "in.jsonl", [{"prompt": f"hello {n}", "max_tokens": 4 + n} for n in range(10)])
