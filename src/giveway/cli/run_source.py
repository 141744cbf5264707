"""Where the lines of `giveway run` come from: it reads them twice, so what can be read only once is copied first."""

from __future__ import annotations

import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from giveway.cli.run_input import InputLine, read_lines
from giveway.core.errors import ConfigError

STDIN = "-"
_PIECE_BYTES = 1 << 20


class LineSource(Protocol):
    """An input that can be read from its beginning as often as wanted."""

    name: str  # for messages

    def lines(self, max_line_bytes: int) -> Iterator[InputLine]:
        """Yield its lines that are not blank. Raises ConfigError when it cannot be read."""


@contextmanager
def open_source(name: str) -> Iterator[LineSource]:
    """Give the input that was named: "-", a file, or anything else that can be opened (a pipe, a terminal).

    All but a regular file is read to its end now, into a temporary file that has no name and goes with the process.
    Raises ConfigError when it cannot be read, or there is no room for the copy.
    """
    if name != STDIN and _is_regular(Path(name)):
        yield _RegularFile(Path(name))
        return
    shown = "standard input" if name == STDIN else name
    with _temporary_file(shown) as copy:
        if name == STDIN:
            _copy(sys.stdin.buffer, copy, shown)
        else:
            with _open(Path(name)) as pipe:
                _copy(pipe, copy, shown)
        yield _Copy(shown, copy)


class _RegularFile:
    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def lines(self, max_line_bytes: int) -> Iterator[InputLine]:
        """Open it anew: an editor may have put another file in its place, and then the run says so."""
        with _open(self._path) as file:
            try:
                yield from read_lines(file, max_line_bytes)
            except OSError as error:
                raise _unreadable(self.name, error) from error


class _Copy:
    def __init__(self, name: str, file: BinaryIO) -> None:
        self.name = name
        self._file = file

    def lines(self, max_line_bytes: int) -> Iterator[InputLine]:
        """Start at the beginning; two readers at the same time would disturb each other."""
        self._file.seek(0)
        yield from read_lines(self._file, max_line_bytes)


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError) as error:
        raise _unreadable(str(path), error) from error


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(str(path), error) from error


def _unreadable(name: str, error: OSError | ValueError) -> ConfigError:
    return ConfigError(f"{name}: cannot be read: {error.strerror if isinstance(error, OSError) else error}")


@contextmanager
def _temporary_file(name: str) -> Iterator[BinaryIO]:
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115  # closed below
    except OSError as error:
        raise _no_copy(name, error) from error
    try:
        yield file
    finally:
        with suppress(OSError):  # what a full disk did not take is tried once more here
            file.close()


def _copy(source: BinaryIO, target: BinaryIO, name: str) -> None:
    for piece in _pieces(source, name):
        try:
            target.write(piece)
            target.flush()
        except OSError as error:
            raise _no_copy(name, error) from error


def _pieces(source: BinaryIO, name: str) -> Iterator[bytes]:
    try:
        while piece := source.read(_PIECE_BYTES):
            yield piece
    except OSError as error:
        raise _unreadable(name, error) from error


def _no_copy(name: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{name} can be read only once and is copied to a temporary file, which failed: {error.strerror}. Name a "
        "directory with more room in TMPDIR, or write the lines to a file and name that."
    )
