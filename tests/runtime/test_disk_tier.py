"""The disk tier: what was written comes back or is an error, and no file stays behind. Real faults where possible."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from giveway.core.errors import ConfigError, DeviceFaultError, InvariantError
from giveway.core.ids import DeviceBlockId, DiskBlockId, HostBlockId, RequestId
from giveway.runtime import disk_tier, swap_file
from giveway.runtime.backend import BatchSequence, MemoryPool
from giveway.runtime.copies import fetch_from_disk, park_on_disk
from giveway.runtime.disk_tier import DiskTier
from giveway.runtime.dry.dry_backend import DryBackend
from tests.sample_inputs import sample_input

BLOCK_BYTES = 5000  # two units of 4096 bytes, the second one not filled
SLOT_BYTES = 8192
SRC = Path(__file__).resolve().parents[2] / "src"

Mount = Callable[[str, str], Path]


def ids(*blocks: int) -> list[DiskBlockId]:
    return [DiskBlockId(block) for block in blocks]


def content_of(seed: int, num_bytes: int = BLOCK_BYTES) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def read_all(tier: DiskTier, blocks: Sequence[int]) -> list[bytes]:
    return [bytes(content) for content in tier.read(ids(*blocks))]


def descriptor_of(tier: DiskTier) -> int:
    return tier._descriptor


@pytest.fixture
def make_tier(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    tiers: list[DiskTier] = []

    def make(directory: Path = tmp_path, **options: Any) -> DiskTier:
        tiers.append(DiskTier(directory, **({"num_blocks": 10, "block_bytes": BLOCK_BYTES} | options)))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mount a file system of its own: mount(kind, options)."""
    mounted: list[Path] = []

    def mount_one(kind: str, options: str) -> Path:
        directory = tmp_path / f"{kind}-{len(mounted)}"
        directory.mkdir()
        try:
            done = subprocess.run(
                ["mount", "-t", kind, "-o", options, "giveway-test", str(directory)], capture_output=True, text=True
            )
        except OSError as error:
            pytest.skip(f"mount cannot be run: {error}")
        if done.returncode:
            pytest.skip(f"a {kind} cannot be mounted here: {done.stderr.strip()}")
        mounted.append(directory)
        return directory

    yield mount_one
    for directory in mounted:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


MakeTier = Callable[..., DiskTier]


# -- content ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False], ids=["direct where possible", "buffered"])
@pytest.mark.parametrize("block_bytes", [1, 4096, BLOCK_BYTES])
def test_random_writes_and_reads_agree_with_a_dictionary(make_tier: MakeTier, direct: bool, block_bytes: int) -> None:
    # Goal: whatever the order, the runs and the overwriting, a block holds what was last written to it.
    rng = random.Random(7)
    tier = make_tier(num_blocks=12, block_bytes=block_bytes, direct=direct)
    expected: dict[int, bytes] = {}
    for turn in range(60):
        blocks = rng.sample(range(12), rng.randint(0, 7))
        if rng.random() < 0.5:
            blocks.sort()
        contents = [content_of(100 * turn + block, block_bytes) for block in blocks]
        tier.write(ids(*blocks), contents)
        expected |= dict(zip(blocks, contents, strict=True))
        asked = rng.sample(sorted(expected), rng.randint(0, len(expected)))
        assert read_all(tier, asked) == [expected[block] for block in asked]
    assert read_all(tier, sorted(expected)) == [expected[block] for block in sorted(expected)]


def test_both_ways_of_transfer_are_tested_here(make_tier: MakeTier, mount: Mount) -> None:
    # Goal: ramfs knows neither direct I/O nor fallocate, so this is the fallback and not an option.
    tier = make_tier(mount("ramfs", "mode=0700"), num_blocks=3)
    assert not tier.is_direct
    assert "ramfs: this is the same RAM" in tier.description
    assert tier.description.endswith("through the page cache")
    tier.write(ids(2, 0), [content_of(1), content_of(2)])
    assert read_all(tier, [0, 2]) == [content_of(2), content_of(1)]


def test_a_disk_is_written_past_the_page_cache(make_tier: MakeTier) -> None:
    tier = make_tier()
    if not tier.is_direct:
        pytest.skip("the file system of the temporary directory has no direct I/O")
    assert tier.description.endswith("direct I/O")
    assert fcntl.fcntl(descriptor_of(tier), fcntl.F_GETFL) & os.O_DIRECT
    buffered = make_tier(direct=False)
    assert not buffered.is_direct
    assert not fcntl.fcntl(descriptor_of(buffered), fcntl.F_GETFL) & os.O_DIRECT


class Transfers:
    """Counts what reaches the operating system, and makes it shorter, or fail, if told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, int, int]] = []  # name, offset, bytes asked for
        self.most: int | None = None
        self.error: OSError | None = None
        for name in ("preadv", "pwritev"):
            monkeypatch.setattr(os, name, self._around(name, getattr(os, name)))

    def _around(self, name: str, whole: Callable[[int, list[memoryview], int], int]) -> Callable[..., int]:
        def move(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            self.seen.append((name, offset, len(buffers[0])))
            if self.error is not None:
                raise self.error
            return whole(descriptor, [buffers[0][: self.most]], offset) if self.most != 0 else 0

        return move


def test_neighbouring_blocks_travel_in_one_transfer_of_bounded_length(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_STAGING_BYTES", 3 * SLOT_BYTES)
    tier = make_tier()
    transfers = Transfers(monkeypatch)
    blocks = [1, 2, 3, 4, 7, 8, 6, 5]
    tier.write(ids(*blocks), map(content_of, blocks))
    expected = [(1, 3), (4, 1), (7, 2), (6, 1), (5, 1)]  # uphill neighbours only, at most three
    runs = [(first * SLOT_BYTES, count * SLOT_BYTES) for first, count in expected]
    assert transfers.seen == [("pwritev", *run) for run in runs]
    transfers.seen.clear()
    assert read_all(tier, blocks) == [content_of(block) for block in blocks]
    assert transfers.seen == [("preadv", *run) for run in runs]


def test_a_block_longer_than_the_staging_buffer_wants_to_be_is_moved_whole(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_STAGING_BYTES", 4096)
    tier = make_tier()
    tier.write(ids(4, 5), [content_of(4), content_of(5)])
    assert read_all(tier, [5, 4]) == [content_of(5), content_of(4)]


@pytest.mark.parametrize(("direct", "most"), [(True, 4096), (True, 6000), (False, 1001)])
def test_a_short_transfer_is_continued(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, direct: bool, most: int
) -> None:
    # Goal: direct I/O goes on from a whole unit (6000 bytes moved count as 4096), buffered from any byte. A short
    # length must be whole for direct I/O, so the file takes it buffered here.
    tier = make_tier(direct=False)
    tier._is_direct = direct
    transfers = Transfers(monkeypatch)
    transfers.most = most
    tier.write(ids(3, 4, 5), map(content_of, (3, 4, 5)))
    assert read_all(tier, [3, 4, 5]) == [content_of(3), content_of(4), content_of(5)]
    assert len(transfers.seen) == 2 * (6 if direct else 3 * SLOT_BYTES // most + 1)
    assert not direct or all(offset % 4096 == 0 for _, offset, _ in transfers.seen)


@pytest.mark.parametrize("blocks", [[3, 10], [3, -1]], ids=["beyond", "negative"])
def test_a_block_outside_the_tier_is_refused_before_anything_is_written(make_tier: MakeTier, blocks: list[int]) -> None:
    tier = make_tier()
    tier.write(ids(3), [content_of(3)])
    with pytest.raises(DeviceFaultError, match="outside the disk tier of 10; nothing was written"):
        tier.write(ids(*blocks), [content_of(0)] * 2)
    with pytest.raises(DeviceFaultError, match="outside the disk tier of 10; nothing was read"):
        tier.read(ids(*blocks))
    assert read_all(tier, [3]) == [content_of(3)]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([content_of(0)], "fewer contents"),
        ([content_of(0)] * 3, "more contents than the 2"),
        ([content_of(0), b"x" * 4999], "a KV block of 4999 bytes for a disk tier of blocks of 5000"),
    ],
)
def test_contents_that_do_not_match_the_blocks_are_a_bug(
    make_tier: MakeTier, contents: list[bytes], message: str
) -> None:
    with pytest.raises(InvariantError, match=message):
        make_tier().write(ids(0, 1), contents)


def test_a_reader_notices_that_the_tier_was_used_in_between(make_tier: MakeTier) -> None:
    # Goal: the contents handed out lie in a buffer that the next call reuses.
    tier = make_tier()
    tier.write(ids(0, 1, 2), map(content_of, range(3)))
    for disturb in (lambda: tier.write(ids(5), [content_of(5)]), lambda: read_all(tier, [2])):
        contents = tier.read(ids(0, 1))
        assert next(contents) == content_of(0)
        disturb()
        with pytest.raises(InvariantError, match="used while somebody read from it"):
            next(contents)


def test_a_closed_tier_is_closed_once_and_not_used_again(make_tier: MakeTier) -> None:
    tier = make_tier()
    tier.write(ids(0, 1), [content_of(0), content_of(1)])
    contents = tier.read(ids(0, 1))
    kept = next(contents)
    tier.close()
    descriptor = os.open(os.devnull, os.O_RDONLY)  # most likely the number that just became free
    tier.close()
    os.close(descriptor)
    assert kept == content_of(0)
    with pytest.raises(InvariantError, match="used while"):
        next(contents)
    for use in (lambda: tier.write(ids(0), [content_of(0)]), lambda: list(tier.read(ids(0)))):
        with pytest.raises(InvariantError, match=r"after close\(\)"):
            use()


def test_a_tier_that_nobody_closed_lets_go_of_its_file(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, num_blocks=1, block_bytes=1)
    descriptor = descriptor_of(tier)
    del tier
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


# -- wrong content ----------------------------------------------------------------------------------------------------


def overwrite(tier: DiskTier, offset: int, content: bytes) -> None:
    """Write behind the tier's back, past what it has open."""
    descriptor = os.open(f"/proc/self/fd/{descriptor_of(tier)}", os.O_RDWR)
    os.pwrite(descriptor, content, offset)
    os.fsync(descriptor)
    os.close(descriptor)


def raw_slot(tier: DiskTier, block: int) -> bytes:
    descriptor = os.open(f"/proc/self/fd/{descriptor_of(tier)}", os.O_RDONLY)
    found = os.pread(descriptor, SLOT_BYTES, block * SLOT_BYTES)
    os.close(descriptor)
    return found


def test_a_flipped_bit_is_found_before_the_block_is_handed_out(make_tier: MakeTier) -> None:
    tier = make_tier()
    tier.write(ids(0, 1, 2), map(content_of, range(3)))
    place = SLOT_BYTES + BLOCK_BYTES - 1  # the last byte of block 1
    overwrite(tier, place, bytes([content_of(1)[-1] ^ 0x10]))
    contents = tier.read(ids(0, 1, 2))
    assert next(contents) == content_of(0)
    with pytest.raises(DeviceFaultError, match=r"reading KV block 1 at offset 8192 .* checksum differs"):
        next(contents)
    assert read_all(tier, [2, 0]) == [content_of(2), content_of(0)]
    tier.write(ids(1), [content_of(9)])
    assert read_all(tier, [1]) == [content_of(9)]


def test_what_lies_behind_a_block_in_its_slot_does_not_matter(make_tier: MakeTier) -> None:
    tier = make_tier()
    tier.write(ids(0, 1), map(content_of, range(2)))
    overwrite(tier, BLOCK_BYTES, b"x" * 100)
    assert read_all(tier, [0, 1]) == [content_of(0), content_of(1)]


def test_blocks_that_changed_places_are_found(make_tier: MakeTier) -> None:
    # Goal: each block is intact, so a checksum stored beside it would be right.
    tier = make_tier()
    tier.write(ids(3, 4), map(content_of, (3, 4)))
    first, second = raw_slot(tier, 3), raw_slot(tier, 4)
    overwrite(tier, 3 * SLOT_BYTES, second + first)
    for block in (3, 4):
        with pytest.raises(DeviceFaultError, match=f"KV block {block} .* checksum differs"):
            read_all(tier, [block])


def test_a_write_that_the_disk_lost_is_found(make_tier: MakeTier) -> None:
    tier = make_tier()
    tier.write(ids(3), [content_of(1)])
    old = raw_slot(tier, 3)
    tier.write(ids(3), [content_of(2)])
    overwrite(tier, 3 * SLOT_BYTES, old)
    with pytest.raises(DeviceFaultError, match=r"KV block 3 .* checksum differs"):
        read_all(tier, [3])


def test_a_block_never_written_is_not_read(make_tier: MakeTier) -> None:
    tier = make_tier()
    tier.write(ids(0), [bytes(BLOCK_BYTES)])
    with pytest.raises(DeviceFaultError, match=r"reading KV block 5 at offset 40960 .* never written"):
        tier.read(ids(0, 5))
    assert read_all(tier, [0]) == [bytes(BLOCK_BYTES)]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("num_bytes", [SLOT_BYTES, SLOT_BYTES + 100, SLOT_BYTES + 4096])
def test_a_file_cut_short_is_an_error(make_tier: MakeTier, direct: bool, num_bytes: int) -> None:
    tier = make_tier(direct=direct)
    tier.write(ids(0, 1, 2), map(content_of, range(3)))
    os.truncate(f"/proc/self/fd/{descriptor_of(tier)}", num_bytes)
    with pytest.raises(DeviceFaultError, match=r"reading KV block 1 .* too short"):
        read_all(tier, [0, 1, 2])
    assert read_all(tier, [0]) == [content_of(0)]


# -- faults of the system ---------------------------------------------------------------------------------------------


def test_a_full_file_system_is_an_error_of_the_write_and_old_content_never_passes_for_new(
    make_tier: MakeTier, mount: Mount
) -> None:
    # Goal: 1 MiB of room for a sparse file of 2 MiB.
    tier = make_tier(mount("tmpfs", "size=1m"), num_blocks=256, preallocate=False)
    tier.write(ids(255), [content_of(1)])
    with pytest.raises(DeviceFaultError, match=r"writing KV block \d+ at offset \d+ .* failed: ENOSPC, No space left"):
        tier.write(ids(*range(256)), [content_of(2)] * 256)
    for block in (0, 255):  # one in the transfer that broke off, one that it did not reach
        with pytest.raises(DeviceFaultError, match="never written"):
            read_all(tier, [block])
    os.truncate(f"/proc/self/fd/{descriptor_of(tier)}", 0)
    tier.write(ids(7), [content_of(7)])
    assert read_all(tier, [7]) == [content_of(7)]


def test_reserved_room_cannot_be_taken_by_somebody_else(make_tier: MakeTier, mount: Mount) -> None:
    directory = mount("tmpfs", "size=1m")
    tier = make_tier(directory, num_blocks=100)
    with pytest.raises(OSError, match="No space left"):
        (directory / "greedy").write_bytes(bytes(1 << 20))
    tier.write(ids(*range(100)), map(content_of, range(100)))
    assert read_all(tier, range(100)) == [content_of(block) for block in range(100)]


LIMITED = """
import resource, sys
from pathlib import Path
from giveway.core.errors import ConfigError, DeviceFaultError
from giveway.runtime.disk_tier import DiskTier
tier = DiskTier(Path(sys.argv[1]), num_blocks=8, block_bytes=4096, direct=sys.argv[2] == "direct")
resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 4096, resource.RLIM_INFINITY))
tier.write([3], [b"a" * 4096])
try:
    tier.write([2, 3, 4, 5], [b"b" * 4096] * 4)
except DeviceFaultError as error:
    print(error)
try:
    DiskTier(Path(sys.argv[1]), num_blocks=8, block_bytes=4096)
except ConfigError as error:
    print(error)
"""


def run_python(code: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(SRC)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("way", ["direct", "buffered"])
def test_a_limit_of_file_size_is_an_error_with_its_name(tmp_path: Path, way: str) -> None:
    written, made = run_python(LIMITED, str(tmp_path), way)
    assert written == (
        f"writing KV block 4 at offset 16384 of the swap file in {tmp_path} failed: EFBIG, File too large"
    )
    assert made.startswith(f"the swap file of 32 KiB cannot be made in {tmp_path}: File too large (")
    assert not list(tmp_path.iterdir())


def test_an_input_or_output_error_of_the_disk_names_block_and_offset(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier()
    tier.write(ids(6), [content_of(6)])
    transfers = Transfers(monkeypatch)
    transfers.error = OSError(errno.EIO, "Input/output error")
    with pytest.raises(DeviceFaultError, match=r"reading KV block 6 at offset 49152 .* failed: EIO, Input/output"):
        read_all(tier, [6])
    transfers.error = None
    assert read_all(tier, [6]) == [content_of(6)]  # the content is still there, the disk was only busy failing
    transfers.error = OSError(errno.EIO, "Input/output error")
    with pytest.raises(DeviceFaultError, match=r"writing KV block 6 at offset 49152 .* failed: EIO"):
        tier.write(ids(6), [content_of(7)])
    transfers.error = None
    with pytest.raises(DeviceFaultError, match="never written"):
        read_all(tier, [6])
    transfers.most = 0
    with pytest.raises(DeviceFaultError, match=r"writing KV block 6 .* no bytes were transferred"):
        tier.write(ids(6), [content_of(7)])


# -- making the file --------------------------------------------------------------------------------------------------


def test_the_file_has_the_size_of_whole_slots_and_the_directory_is_made_for_this_user(
    make_tier: MakeTier, tmp_path: Path
) -> None:
    directory = tmp_path / "swap"
    tier = make_tier(directory)
    status = os.fstat(descriptor_of(tier))
    assert tier.num_bytes == status.st_size == 10 * SLOT_BYTES
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert status.st_nlink == 0
    assert not list(directory.iterdir())
    assert tier.description.startswith(f"80 KiB in {directory}")
    assert not os.get_inheritable(descriptor_of(tier))


def without_nameless_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", os.O_CREAT | os.O_DIRECTORY)  # which the kernel refuses


def test_a_file_system_without_nameless_files_gets_one_that_is_unlinked_at_once(
    make_tier: MakeTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_nameless_files(monkeypatch)
    names: list[str] = []
    unlink = Path.unlink

    def note_and_unlink(path: Path) -> None:
        names.append(path.name)
        unlink(path)

    monkeypatch.setattr(Path, "unlink", note_and_unlink)
    with caplog.at_level(logging.DEBUG, logger="giveway"):
        tier = make_tier()
    assert "one is made and unlinked" in caplog.text
    assert len(names) == 1
    assert names[0].startswith(f"giveway-kv-{os.getpid()}-")
    assert names[0].endswith(".swap")
    assert not list(tmp_path.iterdir())
    status = os.fstat(descriptor_of(tier))
    assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
    tier.write(ids(1), [content_of(1)])
    assert read_all(tier, [1]) == [content_of(1)]


def test_a_file_system_that_cannot_reserve_room_gets_a_sparse_file(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with caplog.at_level(logging.DEBUG, logger="giveway"):
        tier = make_tier()
    assert "no room can be reserved for the swap file (Operation not supported)" in caplog.text
    assert os.fstat(descriptor_of(tier)).st_size == tier.num_bytes
    tier.write(ids(9), [content_of(9)])
    assert read_all(tier, [9]) == [content_of(9)]


def test_too_little_room_is_a_configuration_error_with_numbers_and_remedy(make_tier: MakeTier, mount: Mount) -> None:
    directory = mount("tmpfs", "size=1m")
    with pytest.raises(ConfigError) as caught:
        make_tier(directory, num_blocks=256)
    assert str(caught.value) == (
        f"the swap file needs 2.0 MiB in {directory}, where 1.0 MiB are free. Lower --swap-disk (0 does without it) or "
        "name another directory with --swap-dir"
    )


def test_room_that_goes_while_it_is_reserved_is_the_same_error(
    make_tier: MakeTier, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_file, "_check_room", lambda *ignored: None)
    directory = mount("tmpfs", "size=1m")
    message = r"swap file of 2.0 MiB cannot be made in .*: No space left on device \(1.0 MiB are free\). Lower --swap-d"
    with pytest.raises(ConfigError, match=message):
        make_tier(directory, num_blocks=256)


def test_a_directory_that_cannot_be_written_is_a_configuration_error(
    make_tier: MakeTier, mount: Mount, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for directory, cause in ((tmp_path / "file", "Not a directory"), (tmp_path / "file" / "below", "Not a directory")):
        with pytest.raises(ConfigError, match=f"cannot be made in {directory}: {cause}.* --swap-dir"):
            make_tier(directory)
    with pytest.raises(ConfigError, match=r"Read-only file system .*--swap-dir"):
        make_tier(mount("tmpfs", "ro"), num_blocks=1)


@pytest.mark.parametrize("sizes", [{"num_blocks": 0}, {"block_bytes": 0}])
def test_a_tier_of_nothing_is_refused(make_tier: MakeTier, sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1 is needed"):
        make_tier(**sizes)


# -- what stays behind ------------------------------------------------------------------------------------------------

HELD = """
import os, sys, time
from pathlib import Path
from giveway.runtime.disk_tier import DiskTier
if sys.argv[2] == "named":
    os.O_TMPFILE = os.O_CREAT | os.O_DIRECTORY
tier = DiskTier(Path(sys.argv[1]), num_blocks=8, block_bytes=4096)
tier.write([0], [b"a" * 4096])
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("way", ["nameless", "named"])
def test_a_killed_process_leaves_no_file(tmp_path: Path, way: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HELD, str(tmp_path), way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(SRC)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_a_file_of_a_dead_process_is_removed_and_everything_else_is_left_alone(
    make_tier: MakeTier, tmp_path: Path
) -> None:
    stale, locked = tmp_path / "giveway-kv-1-dead.swap", tmp_path / "giveway-kv-2-alive.swap"
    others = [tmp_path / name for name in ("giveway-kv-3.swap.bak", "notes.swap", "giveway-kv-4")]
    target, link = tmp_path / "precious", tmp_path / "giveway-kv-5-link.swap"
    dangling, fifo = tmp_path / "giveway-kv-6-dangling.swap", tmp_path / "giveway-kv-7-fifo.swap"
    folder = tmp_path / "giveway-kv-8-folder.swap"
    for path in (stale, locked, target, *others):
        path.write_text("x")
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "nowhere")
    os.mkfifo(fifo)
    folder.mkdir()
    with locked.open("r+") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        make_tier()
        assert sorted(tmp_path.iterdir()) == sorted([locked, target, link, dangling, fifo, folder, *others])
        assert target.read_text() == "x"
    make_tier()  # its holder has let go
    assert not locked.exists()


def test_a_stale_file_that_cannot_be_removed_is_told_and_does_no_harm(
    make_tier: MakeTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stale = tmp_path / "giveway-kv-1-dead.swap"
    stale.write_text("x")

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    with caplog.at_level(logging.DEBUG, logger="giveway"):
        make_tier()
    assert f"swap file {stale} stays: Operation not permitted" in caplog.text


# -- between the tiers ------------------------------------------------------------------------------------------------


def dry_backend() -> DryBackend:
    backend = DryBackend()
    backend.allocate(num_device_blocks=6, num_host_blocks=5, block_size=4)
    return backend


def test_a_block_of_the_dry_backend_is_bytes_and_back_also_with_negative_hashes() -> None:
    backend = dry_backend()
    table = (DeviceBlockId(2), DeviceBlockId(4))
    prompt = tuple(range(5, 13))
    backend.forward([BatchSequence(RequestId("r"), prompt, 0, table)])
    assert min(backend._device.prefixes) < -1  # the hash of some prefix is negative; -1 stands for unwritten
    assert backend.block_bytes == 4 * 16
    for block in table:
        content = backend.read_block(MemoryPool.DEVICE, block)
        assert (content.format, content.nbytes, content.c_contiguous) == ("B", backend.block_bytes, True)
        backend.write_block(MemoryPool.HOST, block, content)
        assert backend.read_block(MemoryPool.HOST, block) == content
    backend.copy_in([(HostBlockId(2), DeviceBlockId(0)), (HostBlockId(4), DeviceBlockId(1))])
    moved = (DeviceBlockId(0), DeviceBlockId(1), DeviceBlockId(3))
    # The whole chain is read back and checked, so one wrong hash would be an InvariantError.
    sample = sample_input(prompt_token_ids=(*prompt, 9), output_index=0)
    assert backend.forward([BatchSequence(RequestId("r"), (9,), 8, moved, sample=sample)])[0].token_id is not None


@pytest.mark.parametrize(("pool", "block"), [(MemoryPool.DEVICE, 6), (MemoryPool.HOST, 5), (MemoryPool.HOST, -1)])
def test_a_block_outside_a_pool_of_the_dry_backend_is_refused(pool: MemoryPool, block: int) -> None:
    backend = dry_backend()
    with pytest.raises(DeviceFaultError, match=f"KV block {block} is outside the pool of"):
        backend.read_block(pool, block)
    with pytest.raises(DeviceFaultError, match=f"KV block {block} is outside the pool of"):
        backend.write_block(pool, block, memoryview(bytes(backend.block_bytes)))


def test_a_content_of_the_wrong_length_is_a_bug_of_whoever_brings_it() -> None:
    backend = dry_backend()
    with pytest.raises(InvariantError, match="a KV block of 56 bytes was to be written; blocks have 64"):
        backend.write_block(MemoryPool.DEVICE, 0, memoryview(bytes(56)))


@pytest.mark.parametrize("pool", list(MemoryPool))
def test_kv_parked_on_disk_from_either_pool_comes_back_to_the_device(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, pool: MemoryPool
) -> None:
    # Goal: other device blocks, whatever stands in the order of the pairs; and neighbours on disk travel together.
    backend = dry_backend()
    disk = make_tier(block_bytes=backend.block_bytes)
    prompt = tuple(range(20, 32))
    table = (DeviceBlockId(2), DeviceBlockId(0), DeviceBlockId(4))
    backend.forward([BatchSequence(RequestId("r"), prompt, 0, table)])
    source: Sequence[DeviceBlockId | HostBlockId] = table
    if pool is MemoryPool.HOST:
        source = (HostBlockId(1), HostBlockId(4), HostBlockId(0))
        backend.copy_out([(table[0], HostBlockId(1)), (table[1], HostBlockId(4)), (table[2], HostBlockId(0))])
    transfers = Transfers(monkeypatch)
    park_on_disk(backend, disk, pool, list(zip(source, ids(8, 6, 7), strict=True)))
    backend.forward([BatchSequence(RequestId("other"), (1,) * 24, 0, tuple(map(DeviceBlockId, range(6))))])
    moved = (DeviceBlockId(5), DeviceBlockId(2), DeviceBlockId(0), DeviceBlockId(1))
    fetch_from_disk(backend, disk, list(zip(ids(8, 6, 7), moved[:3], strict=True)))
    assert [name for name, _, _ in transfers.seen] == ["pwritev", "preadv"]
    sample = sample_input(prompt_token_ids=(*prompt, 9), output_index=0)
    assert backend.forward([BatchSequence(RequestId("r"), (9,), 12, moved, sample=sample)])[0].token_id is not None


def test_a_wrong_block_on_disk_never_reaches_the_device(make_tier: MakeTier) -> None:
    backend = dry_backend()
    disk = make_tier(block_bytes=backend.block_bytes)
    backend.forward([BatchSequence(RequestId("r"), (1, 2, 3, 4), 0, (DeviceBlockId(2),))])
    park_on_disk(backend, disk, MemoryPool.DEVICE, [(DeviceBlockId(2), DiskBlockId(0))])
    overwrite(disk, 3, b"\xff")
    before = bytes(backend.read_block(MemoryPool.DEVICE, 5))
    with pytest.raises(DeviceFaultError, match="checksum differs"):
        fetch_from_disk(backend, disk, [(DiskBlockId(0), DeviceBlockId(5))])
    assert backend.read_block(MemoryPool.DEVICE, 5) == before
    with pytest.raises(DeviceFaultError, match="KV block 9 is outside the pool"):
        park_on_disk(backend, disk, MemoryPool.DEVICE, [(DeviceBlockId(9), DiskBlockId(1))])
    with pytest.raises(DeviceFaultError, match="never written"):
        fetch_from_disk(backend, disk, [(DiskBlockId(1), DeviceBlockId(5))])
