"""The data directory: whose it is, what it refuses, what it keeps and for how long, and what a full disk does to it."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from giveway.core.errors import ConfigError, InvariantError, OutputFileError
from giveway.server.batch_jobs.ids import FileId, IdMaker, parse_batch_id, parse_file_id
from giveway.server.batch_jobs.jobs import BatchJobs
from giveway.server.batch_jobs.limits import BatchLimits
from giveway.server.batch_jobs.records import (
    UNFINISHED,
    BatchLine,
    BatchRecord,
    BatchStatus,
    FilePurpose,
    FileRecord,
    LineAnswer,
    NewBatch,
    PageRequest,
)
from giveway.server.batch_jobs.steps import DurableStep, Moment
from giveway.server.batch_jobs.store import BatchStore
from giveway.server.http_errors import ApiError
from tests.server.batch_jobs.sample_lines import CHAT, answer_of, jsonl, request_line

DAY_S = 86400


def upload(
    store: BatchStore, content: bytes = b"x", owner: str = "alice", expires_after_s: int | None = None
) -> FileRecord:
    with store.files.begin_upload(owner) as incoming:
        incoming.write(content)
        return incoming.keep(FilePurpose.BATCH, "in.jsonl", expires_after_s)


def new_batch(source: FileRecord) -> NewBatch:
    return NewBatch(CHAT, source.id, "24h", DAY_S, None, None)


def run_batch(store: BatchStore, num_lines: int = 3) -> BatchRecord:
    """Run a batch to its end."""

    async def echo(line: BatchLine) -> LineAnswer:
        return answer_of(line)

    async def main() -> BatchRecord:
        source = upload(store, jsonl(*(request_line(str(n)) for n in range(num_lines))))
        async with BatchJobs(store, echo, max_outstanding=4, tick_s=0.02) as jobs:
            batch = await jobs.create("alice", new_batch(source))
            while batch.status in UNFINISHED:
                await asyncio.sleep(0.005)
                batch = store.batches.get("alice", batch.id)
            return batch

    return asyncio.run(main())


def all_files(store: BatchStore) -> list[FileId]:
    return [record.id for record in store.files.page("alice", PageRequest(1000)).items]


def test_two_servers_never_share_a_data_directory(tmp_path: Path) -> None:
    with BatchStore(tmp_path) as store, pytest.raises(ConfigError, match="another server uses"):
        BatchStore(store.path)
    BatchStore(tmp_path).close()  # it is free again


def test_a_data_directory_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    BatchStore(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "batches.sqlite")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = (tmp_path / "batches.sqlite").read_bytes()
    for _ in range(2):  # the second attempt is not stopped by a lock that the first one left
        with pytest.raises(ConfigError, match="schema 99; this GiveWay knows schemas up to 1"):
            BatchStore(tmp_path)
    assert (tmp_path / "batches.sqlite").read_bytes() == before


def test_a_file_that_is_no_database_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "batches.sqlite").write_bytes(b"something else entirely" * 1000)
    with pytest.raises(ConfigError, match="Restore it from a copy"):
        BatchStore(tmp_path)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        BatchStore(tmp_path / "missing" / "data")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        BatchStore(tmp_path / "file")


def test_nobody_else_can_read_what_is_stored(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with BatchStore(data) as store:
        upload(store)
        for path in (data, *data.rglob("*")):
            assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize(
    "text",
    [
        "", "..", "file-", "file-../../../etc/passwd", "../lock", "file-" + "0" * 31, "file-" + "0" * 33,
        "file-" + "A" * 32, "file-" + "0" * 32 + "\n", "file-" + "0" * 31 + "\0",
        "file-" + "\N{FULLWIDTH DIGIT ONE}" * 32,
        "batch_" + "0" * 32, "file-" + "0" * 31 + "/", "\ud800", "file-" + "\ud800" * 32,
    ],
)  # fmt: skip
def test_only_ids_of_our_own_making_reach_the_disk(tmp_path: Path, text: str) -> None:
    assert parse_file_id(text) is None
    with BatchStore(tmp_path) as store:
        for attempt in (store.files.get, store.files.delete):
            with pytest.raises(ApiError) as caught:
                attempt("alice", text)
            assert caught.value.status == 404
        with pytest.raises(InvariantError):
            store.files.input_path(FileId(text))


def test_ids_sort_in_order_of_creation_also_when_the_clock_is_set_back(tmp_path: Path) -> None:
    now = [2_000_000_000.0]
    with BatchStore(tmp_path, clock=lambda: now[0]) as store:
        made = [upload(store).id for _ in range(3)]
        now[0] -= 1000
        made += [upload(store).id for _ in range(3)]
    with BatchStore(tmp_path, clock=lambda: now[0]) as store:
        made.append(upload(store).id)
        assert made == sorted(made)
        assert all_files(store) == made[::-1]
    maker = IdMaker(lambda: 0.0, None)
    assert parse_batch_id(maker.new_batch_id()) is not None
    assert len({maker.new_file_id() for _ in range(1000)}) == 1000


def test_what_an_unfinished_upload_leaves_is_gone_after_the_next_start(tmp_path: Path) -> None:
    with BatchStore(tmp_path) as store:
        kept = upload(store)
    (tmp_path / "parts" / "leftover").write_bytes(b"half")
    orphan = IdMaker(lambda: 1.0, None).new_file_id()
    (tmp_path / "files" / orphan).write_bytes(b"whole, but nobody was told")
    (tmp_path / "files" / "notes.txt").write_bytes(b"somebody else's")
    with BatchStore(tmp_path) as store:
        assert sorted(os.listdir(tmp_path / "files")) == sorted([kept.id, "notes.txt"])
        assert not os.listdir(tmp_path / "parts")
        assert all_files(store) == [kept.id]


def test_an_upload_that_is_too_large_leaves_nothing(tmp_path: Path) -> None:
    with BatchStore(tmp_path, BatchLimits(max_file_bytes=10)) as store:
        assert upload(store, b"x" * 10).num_bytes == 10
        with pytest.raises(ApiError) as caught:
            upload(store, b"x" * 11)
        assert caught.value.status == 413
        assert len(all_files(store)) == 1
        assert not os.listdir(tmp_path / "parts")


def test_the_files_of_one_owner_together_have_a_limit_also_while_they_come_in_at_once(tmp_path: Path) -> None:
    with BatchStore(tmp_path, BatchLimits(max_owner_bytes=30)) as store:
        upload(store, b"x" * 10)
        first, second = store.files.begin_upload("alice"), store.files.begin_upload("alice")
        with first, second:
            first.write(b"x" * 15)
            with pytest.raises(ApiError) as caught:
                second.write(b"x" * 6)
            assert caught.value.status == 413
            upload(store, b"x" * 30, owner="bob")  # another owner's room is its own
            first.keep(FilePurpose.BATCH, "in", None)
        upload(store, b"x" * 5)
        with pytest.raises(ApiError):
            upload(store, b"x")
        store.files.delete("alice", all_files(store)[0])
        upload(store, b"x")


def test_one_owner_cannot_have_more_files_or_batches_than_allowed(tmp_path: Path) -> None:
    with BatchStore(tmp_path, BatchLimits(max_owner_files=2, max_unfinished_batches=1)) as store:
        source = upload(store)
        upload(store)
        with pytest.raises(ApiError) as caught:
            upload(store)
        assert caught.value.status == 429
        store.batches.create("alice", new_batch(source))
        with pytest.raises(ApiError) as caught:
            store.batches.create("alice", new_batch(source))
        assert caught.value.status == 429
        other = upload(store, owner="bob")
        store.batches.create("bob", new_batch(other))


def test_the_output_of_a_batch_is_no_input_of_another(tmp_path: Path) -> None:
    with BatchStore(tmp_path) as store:
        ended = run_batch(store)
        assert ended.output_file_id is not None
        with pytest.raises(ApiError) as caught:
            store.batches.create("alice", new_batch(store.files.get("alice", ended.output_file_id)))
        assert (caught.value.status, caught.value.param) == (400, "input_file_id")


def test_files_expire_when_they_were_told_to_unless_a_batch_needs_them(tmp_path: Path) -> None:
    now = [1_800_000_000.0]
    with BatchStore(tmp_path, clock=lambda: now[0]) as store:
        stays, goes, needed = upload(store), upload(store, expires_after_s=3600), upload(store, expires_after_s=3600)
        store.batches.create("alice", new_batch(needed))
        now[0] += 3599
        assert store.files.delete_old() == 0
        now[0] += 1
        assert store.files.delete_old() == 1
        assert all_files(store) == [needed.id, stays.id]
        assert goes.id not in os.listdir(tmp_path / "files")


def test_finished_batches_and_their_files_go_after_so_many_days_and_unfinished_ones_stay(tmp_path: Path) -> None:
    now = [1_800_000_000.0]
    limits = BatchLimits(keep_days=7)
    with BatchStore(tmp_path, limits, clock=lambda: now[0]) as store:
        ended = run_batch(store)
        source = upload(store)
        waiting = store.batches.create("alice", new_batch(source))
        now[0] += 7 * DAY_S - 1
        assert (store.batches.delete_old(), store.files.delete_old()) == (0, 0)
        now[0] += 1
        assert (store.batches.delete_old(), store.files.delete_old()) == (1, 2)
        with pytest.raises(ApiError):
            store.batches.get("alice", ended.id)
        assert store.batches.get("alice", waiting.id).status is BatchStatus.VALIDATING
        assert all_files(store) == [source.id]
        assert os.listdir(tmp_path / "files") == [source.id]


def test_without_a_setting_everything_stays(tmp_path: Path) -> None:
    now = [1_800_000_000.0]
    with BatchStore(tmp_path, clock=lambda: now[0]) as store:
        run_batch(store)
        now[0] += 10_000 * DAY_S
        assert (store.batches.delete_old(), store.files.delete_old()) == (0, 0)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep_days is 0"):
        BatchLimits(keep_days=0)


def test_a_write_that_fails_has_not_happened_and_the_next_one_works(tmp_path: Path) -> None:
    # Goal: the row cannot be written, so the content that lies there already goes as well.
    is_broken = [False]

    def fail(step: DurableStep, moment: Moment) -> None:
        if is_broken[0] and (step, moment) == (DurableStep.UPLOAD_RECORDED, Moment.BEFORE):
            raise sqlite3.OperationalError("disk I/O error")

    with BatchStore(tmp_path, on_step=fail) as store:
        is_broken[0] = True
        with pytest.raises(OutputFileError, match="disk I/O error"):
            upload(store)
        assert not os.listdir(tmp_path / "files")
        is_broken[0] = False
        assert all_files(store) == [] != [upload(store).id]


def test_answers_that_cannot_be_written_wait_in_memory_and_are_not_computed_again(tmp_path: Path) -> None:
    num_failures = [3]
    runs: list[str] = []

    def fail(step: DurableStep, moment: Moment) -> None:
        if (
            step in (DurableStep.ANSWERS_RECORDED, DurableStep.END_RECORDED)
            and moment is Moment.BEFORE
            and num_failures[0]
        ):
            num_failures[0] -= 1
            raise sqlite3.OperationalError("database or disk is full")

    async def count(line: BatchLine) -> LineAnswer:
        runs.append(line.custom_id)
        if len(runs) == 4:
            num_failures[0] += 1  # the end of the batch fails once as well
        return answer_of(line)

    async def main() -> None:
        with BatchStore(tmp_path, on_step=fail) as store:
            source = upload(store, jsonl(*(request_line(str(n)) for n in range(4))))
            async with BatchJobs(store, count, max_outstanding=2, tick_s=0.02) as jobs:
                batch = await jobs.create("alice", new_batch(source))
                while batch.status in UNFINISHED:
                    await asyncio.sleep(0.005)
                    batch = store.batches.get("alice", batch.id)
                assert (batch.status, batch.num_completed) == (BatchStatus.COMPLETED, 4)
                assert len(os.listdir(tmp_path / "files")) == 2  # no output of the attempt that failed is left

    asyncio.run(main())
    assert runs == ["0", "1", "2", "3"]


def test_answers_that_came_before_a_cancellation_count_also_if_the_disk_takes_them_later(tmp_path: Path) -> None:
    is_broken = [True]
    num_failures = [0]

    def fail(step: DurableStep, moment: Moment) -> None:
        if (step, moment) == (DurableStep.ANSWERS_RECORDED, Moment.BEFORE) and is_broken[0]:
            num_failures[0] += 1
            raise sqlite3.OperationalError("disk I/O error")

    async def first_answers(line: BatchLine) -> LineAnswer:
        if line.custom_id != "0":
            await asyncio.Event().wait()
        return answer_of(line)

    async def main() -> None:
        with BatchStore(tmp_path, on_step=fail) as store:
            source = upload(store, jsonl(*(request_line(str(n)) for n in range(3))))
            async with BatchJobs(store, first_answers, max_outstanding=2, tick_s=0.02) as jobs:
                batch = await jobs.create("alice", new_batch(source))
                while not num_failures[0]:
                    await asyncio.sleep(0.005)
                await jobs.cancel("alice", batch.id)
                await asyncio.sleep(0.1)  # room for the mistake of ending the batch without its answer
                is_broken[0] = False
                while batch.status in UNFINISHED:
                    await asyncio.sleep(0.005)
                    batch = store.batches.get("alice", batch.id)
                assert (batch.status, batch.num_completed, batch.num_failed) == (BatchStatus.CANCELLED, 1, 2)

    asyncio.run(main())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of three megabytes; only a superuser may make one."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_refuses_an_upload_and_holds_a_batch_up_until_there_is_room(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Goal: a real file system without room. Nothing is lost or computed twice, and nothing is corrupt afterwards.
    runs: list[str] = []
    data = small_disk / "data"

    async def large_answers(line: BatchLine) -> LineAnswer:
        runs.append(line.custom_id)
        return LineAnswer(200, {"text": "x" * 60_000}, "req")

    async def main() -> None:
        with BatchStore(data) as store:
            with pytest.raises(OutputFileError, match="No space left on device"):
                upload(store, b"x" * 2**22)
            source = upload(store, jsonl(*(request_line(str(n)) for n in range(10))))
            free = os.statvfs(data)
            ballast = upload(store, b"x" * (free.f_bavail * free.f_frsize - 400_000))
            async with BatchJobs(store, large_answers, max_outstanding=4, tick_s=0.02) as jobs:
                batch = await jobs.create("alice", new_batch(source))
                while "answers of batches cannot be written" not in caplog.text:
                    await asyncio.sleep(0.02)
                assert store.batches.get("alice", batch.id).num_completed < 10
                (data / "files" / ballast.id).unlink()  # somebody makes room
                while batch.status in UNFINISHED:
                    await asyncio.sleep(0.02)
                    batch = store.batches.get("alice", batch.id)
                assert (batch.status, batch.num_completed) == (BatchStatus.COMPLETED, 10)
        connection = sqlite3.connect(data / "batches.sqlite")
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()

    asyncio.run(main())
    assert sorted(runs, key=int) == [str(n) for n in range(10)]


def test_a_limit_of_the_system_on_the_size_of_files_is_an_error_and_no_corruption(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with BatchStore(tmp_path) as store:
        kept = upload(store, b"x" * 1000)

        def fill_log() -> None:
            for _ in range(100):  # the database's log meets the limit somewhere on the way
                store.batches.create("alice", new_batch(kept))

        previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(OutputFileError, match="File too large"):
                upload(store, b"x" * 200_000)
            with pytest.raises(OutputFileError):
                fill_log()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, previous)
        assert run_batch(store).status is BatchStatus.COMPLETED
        assert kept.id in all_files(store)
