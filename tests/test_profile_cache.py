"""Profiles kept between runs: a cache that can be lost, spoiled or shared, and never gets in the way."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from giveway.core.cost_profile import SHIPPED
from giveway.profile_cache import MAX_FILE_BYTES, ProfileCache, default_directory, processor_kind, profile_key

ONE = replace(SHIPPED, step_s=1e-3, token_s=1e-5)
TWO = replace(ONE, step_s=2e-3, token_s=2e-5)


@pytest.fixture
def debug_lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="giveway")
    return caplog


def kept_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_what_was_saved_last_is_loaded_also_by_the_next_run(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there yet"
    assert ProfileCache(directory).load("a") is None
    ProfileCache(directory).save("a", ONE)
    ProfileCache(directory).save("b", ONE)
    ProfileCache(directory).save("a", TWO)
    assert ProfileCache(directory).load("a") == TWO
    assert ProfileCache(directory).load("b") == ONE
    assert ProfileCache(directory).load("c") is None


def test_loading_creates_nothing_and_says_nothing_when_nothing_was_kept(
    tmp_path: Path, debug_lines: pytest.LogCaptureFixture
) -> None:
    assert ProfileCache(tmp_path / "none").load("a") is None
    assert not (tmp_path / "none").exists()
    assert not debug_lines.records


def test_only_its_owner_can_look_into_the_directory(tmp_path: Path) -> None:
    ProfileCache(tmp_path / "kept").save("a", ONE)
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700
    assert kept_file(tmp_path / "kept").stat().st_mode & 0o777 == 0o600


def test_a_file_says_which_key_it_belongs_to_and_is_believed_for_no_other(
    tmp_path: Path, debug_lines: pytest.LogCaptureFixture
) -> None:
    # Goal: a file that was copied or renamed does not speak for another model.
    cache = ProfileCache(tmp_path)
    cache.save("a", ONE)
    path = kept_file(tmp_path)
    assert json.loads(path.read_text())["key"] == "a"
    path.write_text(path.read_text().replace('"a"', '"b"'))
    assert cache.load("a") is None
    assert "belongs to 'b'" in debug_lines.text


def test_keys_of_any_characters_are_kept(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    for key in ("", "../../a/b\0", "ü" * 300, "\udcff"):
        cache.save(key, ONE)
        assert cache.load(key) == ONE
    assert len(list(tmp_path.iterdir())) == 4


PROFILE = json.dumps(ONE.as_dict())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[" * 50_000,
        b"[]",
        b"{}",
        b'{"key": "a", "profile": 7}',
        b'{"key": "a", "profile": {}}',
        f'{{"key": "a", "profile": {PROFILE}, "more": 1}}'.encode(),
        f'{{"key": "a", "key": "a", "profile": {PROFILE}}}'.encode(),
        f'{{"key": 7, "profile": {PROFILE}}}'.encode(),
        f'{{"key": "a", "profile": {PROFILE[:-1]}, "disk_s": 1}}}}'.encode(),
        json.dumps({"key": "a", "profile": {**ONE.as_dict(), "step_s": -1}}).encode(),
        json.dumps({"key": "a", "profile": {**ONE.as_dict(), "step_s": float("nan")}}).encode(),
        json.dumps({"key": "a", "profile": {**ONE.as_dict(), "step_s": "1"}}).encode(),
        b'{"key": "a", "profile": ' + b"9" * 5000 + b"}",
        f'{{"key": "a", "profile": {PROFILE}}}'.encode() + b" " * MAX_FILE_BYTES,
    ],
)
def test_a_spoiled_file_counts_as_none_and_is_replaced_by_the_next_save(
    content: bytes, tmp_path: Path, debug_lines: pytest.LogCaptureFixture
) -> None:
    cache = ProfileCache(tmp_path)
    cache.save("a", ONE)
    kept_file(tmp_path).write_bytes(content)
    assert cache.load("a") is None
    assert [record.levelno for record in debug_lines.records] == [logging.DEBUG]
    cache.save("a", TWO)
    assert cache.load("a") == TWO


def test_a_huge_file_is_not_read(tmp_path: Path, debug_lines: pytest.LogCaptureFixture) -> None:
    # Goal: 1 TiB of zeros, a sparse file, costs neither memory nor time.
    cache = ProfileCache(tmp_path)
    cache.save("a", ONE)
    os.truncate(kept_file(tmp_path), 1 << 40)
    assert cache.load("a") is None
    assert "larger than" in debug_lines.text


def test_neither_a_directory_nor_a_pipe_in_the_place_of_a_file_stops_anything(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.save("a", ONE)
    path = kept_file(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert cache.load("a") is None
    path.unlink()
    path.mkdir()
    assert cache.load("a") is None
    cache.save("a", ONE)
    assert list(tmp_path.iterdir()) == [path], "a temporary file was left behind"


def test_a_link_in_the_place_of_a_file_is_replaced_and_what_it_points_at_is_not_touched(tmp_path: Path) -> None:
    # Goal: whoever can put a link there cannot make us write, or read, something else.
    directory, victim = tmp_path / "kept", tmp_path / "victim"
    cache = ProfileCache(directory)
    cache.save("a", ONE)
    path = kept_file(directory)
    path.rename(victim)
    path.symlink_to(victim)
    before = victim.read_bytes()
    assert cache.load("a") is None
    cache.save("a", TWO)
    assert victim.read_bytes() == before
    assert not path.is_symlink()
    assert cache.load("a") == TWO


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Goal: even if somebody guessed the next name, the file behind the link stays as it is.
    directory, victim = tmp_path / "kept", tmp_path / "victim"
    victim.write_text("mine")
    cache = ProfileCache(directory)
    cache.save("a", ONE)
    link = directory / f".{kept_file(directory).stem[:8]}.guessed.tmp"
    link.symlink_to(victim)
    names = iter(["guessed", "other"])
    monkeypatch.setattr("tempfile._get_candidate_names", lambda: names)
    cache.save("a", TWO)
    assert list(names) == [], "the guessed name was not tried"
    assert victim.read_text() == "mine"
    assert link.is_symlink()
    assert cache.load("a") == TWO


def test_a_place_that_cannot_be_written_to_is_a_debug_line_and_no_error(
    tmp_path: Path, debug_lines: pytest.LogCaptureFixture
) -> None:
    # Goal: a file where the directory should be: not even root can write there.
    (tmp_path / "file").touch()
    cache = ProfileCache(tmp_path / "file" / "kept")
    cache.save("a", ONE)
    assert "not kept" in debug_lines.text
    assert {record.levelno for record in debug_lines.records} == {logging.DEBUG}
    assert cache.load("a") is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_only_be_read_still_gives_what_it_holds(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path / "kept")
    cache.save("a", ONE)
    (tmp_path / "kept").chmod(0o500)
    cache.save("a", TWO)
    assert cache.load("a") == ONE


def test_a_disk_that_is_full_leaves_the_old_profile_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, debug_lines: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    cache = ProfileCache(tmp_path)
    cache.save("a", ONE)
    monkeypatch.setattr(os, "replace", fail)
    cache.save("a", TWO)
    assert cache.load("a") == ONE
    assert len(list(tmp_path.iterdir())) == 1
    assert "No space left" in debug_lines.text


WRITE = """
import sys
from pathlib import Path
from dataclasses import replace
from giveway.core.cost_profile import SHIPPED
from giveway.profile_cache import ProfileCache

cache, step_s = ProfileCache(Path(sys.argv[1])), float(sys.argv[2])
print("ready", flush=True)
for _ in range(300):
    cache.save("a", replace(SHIPPED, step_s=step_s))
"""


def test_a_reader_sees_one_whole_profile_or_the_other_while_two_processes_write(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.save("a", replace(SHIPPED, step_s=1.0))
    command = [sys.executable, "-c", WRITE, str(tmp_path)]
    writers = [subprocess.Popen([*command, step_s], stdout=subprocess.PIPE) for step_s in ("1", "2")]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
    seen = set()
    while any(writer.poll() is None for writer in writers):
        seen.add(cache.load("a"))
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert seen <= {replace(SHIPPED, step_s=1.0), replace(SHIPPED, step_s=2.0)}
    assert cache.load("a") is not None
    assert len(list(tmp_path.iterdir())) == 1


def test_a_cache_without_a_directory_keeps_nothing() -> None:
    cache = ProfileCache(None)
    cache.save("a", ONE)
    assert cache.load("a") is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"GIVEWAY_CACHE_DIR": "/g", "XDG_CACHE_HOME": "/x"}, "/g"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/giveway"),
        ({"GIVEWAY_CACHE_DIR": "", "XDG_CACHE_HOME": ""}, "/h/.cache/giveway"),
        ({"XDG_CACHE_HOME": "relative"}, "/h/.cache/giveway"),
        ({}, "/h/.cache/giveway"),
    ],
)
def test_the_directory_is_where_the_user_or_the_desktop_wants_it(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GIVEWAY_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/h", **environment}.items():
        monkeypatch.setenv(name, value)
    assert default_directory() == Path(expected)


def test_a_user_without_a_home_has_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("GIVEWAY_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert default_directory() is None


def key(*, layers: int = 2, heads: int = 4, dtype: str = "bfloat16", device: str = "cpu", num_threads: int = 1) -> str:
    return profile_key(
        model={"num_layers": layers, "num_heads": heads, "tied": True, "window": None},
        dtype=dtype,
        device=device,
        backend="torch",
        num_threads=num_threads,
        processor="a processor",
        block_size=16,
    )


def test_a_key_differs_when_anything_that_speed_depends_on_does() -> None:
    others = [key(layers=3), key(heads=5), key(dtype="float32"), key(device="cuda:0"), key(num_threads=2)]
    assert len({key(), *others}) == 6
    assert key() == key()


def test_the_order_in_which_a_model_is_described_does_not_matter() -> None:
    def of(model: dict[str, int]) -> str:
        return profile_key(model=model, dtype="d", device="d", backend="b", num_threads=1, processor="p", block_size=16)

    assert of({"a": 1, "b": 2}) == of({"b": 2, "a": 1})


def test_the_kind_of_processor_is_one_line_that_stays_the_same() -> None:
    assert processor_kind() == processor_kind()
    assert processor_kind().isprintable()
    assert processor_kind()
