"""A multipart upload on its way to the disk: in pieces, straight into the data directory, never whole in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from giveway.server.batch_jobs.file_table import Upload
from giveway.server.batch_jobs.records import FilePurpose, FileRecord
from giveway.server.http_errors import ApiError

_PIECE_BYTES = 1 << 20  # handed to a thread at a time
_MAX_FIELDS = 16
_MAX_FIELD_BYTES = 4096
_MAX_FILENAME_CHARACTERS = 255
_SHORTEST_S, _LONGEST_S = 3600, 30 * 86400  # OpenAI's limits of expires_after


class InThread(Protocol):
    """Runs something that waits for the disk in a thread."""

    def __call__(self, function: Callable[[bytes], None], data: bytes, /) -> Awaitable[None]:
        """Run `function(data)` and wait for it."""


@dataclass(slots=True)
class _Part:
    """One part of the form, as far as it has come."""

    name: str = ""
    is_file: bool = False


class UploadForm:
    """Reads a form: its one file goes into an `Upload`, its fields are kept."""

    def __init__(self, content_type: str, upload: Upload) -> None:
        """content_type: the header. Raises ApiError (400) if it is no multipart form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(400, "the body must be multipart/form-data with a boundary")
        self._upload = upload
        self._fields: dict[str, bytearray] = {}
        self._filename: str | None = None  # None: no file has come
        self._part = _Part()
        self._header_name, self._header_value = bytearray(), bytearray()
        self._disposition = b""
        self._is_complete = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_part_data": self._on_part_data,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise ApiError(400, f"the body is no valid multipart form: {error}") from error

    async def read(self, pieces: AsyncIterator[bytes], in_thread: InThread) -> None:
        """Read the body to its end. Raises ApiError: 400 for a malformed form, 413 beyond a limit; OutputFileError."""
        gathered = bytearray()
        async for piece in pieces:
            gathered += piece
            if len(gathered) >= _PIECE_BYTES:
                await in_thread(self._write, bytes(gathered))
                gathered.clear()
        if gathered:
            await in_thread(self._write, bytes(gathered))
        if not self._is_complete:
            raise ApiError(400, "the body ends before the end of the multipart form")

    def keep(self) -> FileRecord:
        """Make a file of what was read.

        Raises ApiError (400) for missing or wrong fields, and whatever `Upload.keep` raises.
        """
        purpose = self._text("purpose")
        if purpose is None:
            raise ApiError(400, "purpose is missing; it must be 'batch'", param="purpose")
        if purpose != FilePurpose.BATCH:
            raise ApiError(400, f"the purpose {purpose[:60]!r} is not supported; only 'batch' is", param="purpose")
        expires_after_s = self._expires_after_s()
        if self._filename is None:
            raise ApiError(400, "file is missing", param="file")
        return self._upload.keep(FilePurpose.BATCH, self._filename, expires_after_s)

    def _write(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise ApiError(400, f"the body is no valid multipart form: {error}") from error

    def _on_part_begin(self) -> None:
        self._part = _Part()
        self._disposition = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if bytes(self._header_name).lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name")
        if name is None:
            raise ApiError(400, "a part of the form has no name")
        self._part.name = _text(name)
        filename = options.get(b"filename")
        if filename is not None:
            self._begin_file(filename)
        else:
            if len(self._fields) == _MAX_FIELDS or self._part.name in self._fields:
                raise ApiError(400, f"the form has more than {_MAX_FIELDS} fields, or one of them twice")
            self._fields[self._part.name] = bytearray()

    def _begin_file(self, filename: bytes) -> None:
        if self._part.name != "file" or self._filename is not None:
            raise ApiError(400, "the form must hold exactly one file, in the field 'file'", param="file")
        self._part.is_file = True
        text = "".join(character for character in _text(filename) if character.isprintable())
        self._filename = text[:_MAX_FILENAME_CHARACTERS] or "file"

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.is_file:
            self._upload.write(memoryview(data)[start:end])
            return
        value = self._fields[self._part.name]
        if len(value) + end - start > _MAX_FIELD_BYTES:
            raise ApiError(400, f"a field of the form is longer than {_MAX_FIELD_BYTES} bytes")
        value += data[start:end]

    def _on_end(self) -> None:
        self._is_complete = True

    def _text(self, name: str) -> str | None:
        value = self._fields.get(name)
        return None if value is None else _text(value)

    def _expires_after_s(self) -> int | None:
        anchor, seconds = self._text("expires_after[anchor]"), self._text("expires_after[seconds]")
        if anchor is None and seconds is None:
            return None
        if anchor != "created_at":
            raise ApiError(400, "expires_after.anchor must be 'created_at'", param="expires_after.anchor")
        if seconds is None or not (seconds.isascii() and seconds.isdecimal() and len(seconds) < 10):
            raise ApiError(400, "expires_after.seconds must be a whole number", param="expires_after.seconds")
        return checked_expiry_s(int(seconds), "expires_after.seconds")


def checked_expiry_s(seconds: int, param: str) -> int:
    """Return the seconds after which a file expires. Raises ApiError (400) outside OpenAI's limits."""
    if not _SHORTEST_S <= seconds <= _LONGEST_S:
        raise ApiError(400, f"{param} is {seconds}; it must be from {_SHORTEST_S} to {_LONGEST_S}", param=param)
    return seconds


def _text(value: bytes | bytearray) -> str:
    return value.decode("utf-8", "replace")
