"""`giveway run` with an input that can be read only once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.run_files import DRY, records, ten_lines, texts


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    return ten_lines(tmp_path)


def pipe_into(source: Path, arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `giveway run ARGUMENTS` in bash with the file `source` piped in."""
    command = f"cat {source} | {sys.executable} -m giveway run {arguments} --device dry --temperature 0"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["/dev/stdin", "-", "<(cat)"])
def test_a_pipe_that_can_be_read_once_is_answered_and_resumed(cli: Cli, ten: Path, tmp_path: Path, name: str) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    cli("run", ten, "-o", whole, *DRY)
    first = pipe_into(ten, f"{name} -o {out}")
    assert (first.returncode, first.stderr) == (0, "10 answered, 0 errors, 85 output tokens\n")
    assert texts(out) == texts(whole)
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:4]))
    again = pipe_into(ten, f"{name} -o {out}")
    assert again.stderr.startswith("4 of 10 lines are answered already\n6 answered, 0 errors")
    assert texts(out) == texts(whole)


def test_a_fifo_is_read_once_and_answered(cli: Cli, ten: Path, tmp_path: Path) -> None:
    fifo, out = tmp_path / "fifo", tmp_path / "out.jsonl"
    os.mkfifo(fifo)
    writer = subprocess.Popen(["bash", "-c", f"cat {ten} > {fifo}"])
    assert cli("run", fifo, "-o", out, *DRY).err.startswith("10 answered")
    assert writer.wait() == 0
    assert sorted(records(out)) == list(range(1, 11))


def test_an_input_without_lines_is_not_a_silent_success(cli: Cli, tmp_path: Path) -> None:
    empty = tmp_path / "in.jsonl"
    empty.write_text("\n\n")
    result = cli("run", empty, "-o", tmp_path / "out.jsonl", *DRY)
    assert (result.code, result.err) == (0, f"{empty} holds no lines; nothing to answer\n")
    result = cli("run", "-", "-o", tmp_path / "out.jsonl", *DRY)
    assert (result.code, result.err) == (0, "standard input holds no lines; nothing to answer\n")


def test_no_room_for_the_copy_of_a_pipe_is_an_error_with_the_remedy(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", lambda: open("/dev/full", "w+b"))  # noqa: SIM115
    result = cli("run", "-", "-o", tmp_path / "out.jsonl", *DRY, stdin='{"prompt": "x"}\n')
    assert result.code == 1
    assert result.err == (
        "error: standard input can be read only once and is copied to a temporary file, which failed: No space left on "
        "device. Name a directory with more room in TMPDIR, or write the lines to a file and name that.\n"
    )
    assert not (tmp_path / "out.jsonl").exists()


def test_the_copy_of_a_pipe_leaves_nothing_behind_when_the_process_is_killed(ten: Path, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-m", "giveway", "run", "-", "-o", str(tmp_path / "out"), *map(str, DRY)]
    settings = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(command, env=settings, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.write(ten.read_bytes())  # and no end of the input: it waits for more, its copy open
    process.stdin.flush()
    while not _has_open_file_below(process.pid, folder):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    process.stdin.close()
    assert list(folder.iterdir()) == []


def _has_open_file_below(pid: int, folder: Path) -> bool:
    names = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            names.append(os.readlink(descriptor))
    return any(name.startswith(str(folder)) for name in names)
