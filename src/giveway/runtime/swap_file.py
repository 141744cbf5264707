"""The file under the disk tier: made with its room reserved and without a name, so that nothing stays behind."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path

from giveway.core.errors import ConfigError

logger = logging.getLogger("giveway")

DIRECT_ALIGNMENT = 4096  # offset, length and address of direct I/O: enough for every disk of today

_STALE_FILES = "giveway-kv-*.swap"
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_KINDS_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}  # f_type of statfs(2)


def make_swap_file(directory: Path, num_bytes: int, *, preallocate: bool = True) -> int:
    """Make a file of `num_bytes` bytes in `directory` and return its descriptor, open for reading and writing.

    Nobody but this user can open it, and it is gone once the descriptor is closed, also by kill -9. A missing directory
    is made, for this user alone, in one that exists; files that dead processes left there are removed. preallocate:
    reserve the room now, so that a later write cannot fail for lack of it; a file system that cannot do that gets a
    sparse file.
    Raises ConfigError if that does not work.
    """
    try:
        if directory.exists() and not directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        directory.mkdir(mode=0o700, exist_ok=True)  # not its parents: a mistyped mount point must not fill another disk
        remove_stale_files(directory)
        if preallocate:
            _check_room(directory, num_bytes)
        descriptor = _open_without_name(directory)
        try:
            _give_size(descriptor, num_bytes, preallocate=preallocate)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise ConfigError(
            f"the swap file of {size_text(num_bytes)} cannot be made in {directory}: {error.strerror}"
            f"{_free_text(directory)}. Lower --swap-disk (0 does without it) or name another directory with --swap-dir"
        ) from error
    return descriptor


def remove_stale_files(directory: Path) -> None:
    """Remove swap files in `directory` that no process holds locked: their makers died before they could unlink them.

    Only regular files named like swap files are looked at, never what a symbolic link leads to. What cannot be removed
    stays, with a line in the log: it does not hinder the new file.
    """
    for path in sorted(directory.glob(_STALE_FILES)):
        try:
            if stat.S_ISREG(path.lstat().st_mode):
                _remove_if_unlocked(path)
        except OSError as error:
            logger.debug("swap file %s stays: %s", path, error.strerror)


def try_direct(descriptor: int) -> bool:
    """Switch the file to direct I/O if its file system does that at DIRECT_ALIGNMENT; returns whether it does.

    The file must be at least DIRECT_ALIGNMENT bytes long.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        # Some accept the flag and refuse the transfer: a disk of larger sectors, for example.
        is_direct = os.preadv(descriptor, [mmap.mmap(-1, DIRECT_ALIGNMENT)], 0) == DIRECT_ALIGNMENT
    except OSError:
        is_direct = False
    if not is_direct:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return is_direct


def kind_in_memory(descriptor: int) -> str | None:
    """Return "tmpfs" or "ramfs" if the file lies in one, that is in memory; None: elsewhere."""
    result = ctypes.create_string_buffer(256)  # struct statfs is smaller everywhere; f_type comes first, a long
    if ctypes.CDLL(None).fstatfs(descriptor, result):
        return None
    kind = int.from_bytes(result.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder)
    return _KINDS_IN_MEMORY.get(kind & 0xFFFFFFFF)


def size_text(num_bytes: int) -> str:
    """Return a size for people."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes / 2**10:,.0f} KiB"


def _check_room(directory: Path, num_bytes: int) -> None:
    """Raise ConfigError if the room is not there, before the attempt fills the disk for everybody else.

    A file system that does not tell its size has room until the attempt says otherwise.
    """
    free = _free_bytes(directory)
    if free is not None and num_bytes > free:
        raise ConfigError(
            f"the swap file needs {size_text(num_bytes)} in {directory}, where {size_text(free)} are free. Lower "
            "--swap-disk (0 does without it) or name another directory with --swap-dir"
        )


def _open_without_name(directory: Path) -> int:
    try:
        # O_EXCL: it can never be given a name.
        return os.open(directory, os.O_TMPFILE | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as error:  # whatever else is wrong, the attempt with a name tells it as well
        logger.debug("no file without a name in %s (%s); one is made and unlinked", directory, error.strerror)
    path = directory / f"giveway-kv-{os.getpid()}-{secrets.token_hex(8)}.swap"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR, 0o600)
    try:
        # Without a lock, or before it, somebody who tidies up may unlink the file first: that is as good.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            path.unlink()
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _give_size(descriptor: int, num_bytes: int, *, preallocate: bool) -> None:
    if preallocate:
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise
            logger.debug("no room can be reserved for the swap file (%s): it grows as it is written", error.strerror)
        else:
            return
    os.ftruncate(descriptor, num_bytes)


def _remove_if_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.lstat()):  # the name still means the file that is locked
            path.unlink()
            logger.debug("removed %s, left behind by a process that died", path)
    finally:
        os.close(descriptor)


def _free_bytes(directory: Path) -> int | None:
    """Bytes that this user may still write there; None: the file system does not tell."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _free_text(directory: Path) -> str:
    with suppress(OSError):  # there may be no directory
        free = _free_bytes(directory)
        return "" if free is None else f" ({size_text(free)} are free)"
    return ""
