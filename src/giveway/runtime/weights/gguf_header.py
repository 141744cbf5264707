"""The header of a GGUF file, read over a memory map without trusting one number in it.

Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little
endian. The `gguf` package reads the same in seconds, because it makes a numpy array of every token; this takes
hundredths of a second, because a string array is walked once and decoded only when somebody asks for it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from giveway.core.errors import ModelFileError, UnsupportedModelError
from giveway.runtime.weights.mapped_file import map_file

Scalar = int | float | bool | str
ByteView = npt.NDArray[np.uint8]

MAX_KEY_BYTES = 65_535  # the specification's own limit
MAX_NAME_BYTES = 1_024  # of a tensor; the specification says 64, files in the wild exceed it a little
MAX_KEYS = 65_536
MAX_TENSORS = 1_000_000
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20  # bytes

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_TENSOR_TAIL = struct.Struct("<IQ")  # ggml type, offset

# ggml_type: id -> (name, elements per block, bytes per block); sizes only of those that are implemented.
_IMPLEMENTED = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}
_IMPLEMENTED |= {30: ("BF16", 1, 2)}
_OTHER_NAMES = {6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"}
_OTHER_NAMES |= {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"}
_OTHER_NAMES |= {23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0"}
_OTHER_NAMES |= {35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}


@dataclass(frozen=True, slots=True)
class GgufStrings:
    """An array of strings that stays in the file until it is asked for."""

    file: mmap.mmap
    start: int  # byte of the first length
    count: int
    key: str

    def decode(self) -> list[str]:
        """Return the strings. Bytes that are not UTF-8 raise ModelFileError, naming the key and the index."""
        file, position, strings = self.file, self.start, []
        length_at = _U64.unpack_from
        try:
            for _ in range(self.count):
                (length,) = length_at(file, position)
                position += 8
                end = position + length
                strings.append(file[position:end].decode())
                position = end
        except UnicodeDecodeError as error:
            raise ModelFileError(
                f"GGUF key {self.key!r}: string {len(strings)} is not UTF-8 ({error.reason})"
            ) from error
        return strings


@dataclass(frozen=True, slots=True)
class GgufNumbers:
    """An array of numbers or booleans that stays in the file until it is asked for."""

    file: mmap.mmap
    start: int
    count: int
    item: struct.Struct

    def decode(self) -> list[int] | list[float] | list[bool]:
        """Return the numbers, in the order of the file."""
        return list(struct.unpack_from(f"<{self.count}{self.item.format[-1]}", self.file, self.start))


GgufValue = Scalar | GgufStrings | GgufNumbers


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies; its extent has been checked against the file if its type is implemented."""

    name: str
    type_name: str  # for example "Q4_1"; "type 99" if this version of the format does not know it
    shape: tuple[int, ...]  # slowest dimension first: the reverse of the file's order
    start: int  # byte in the file
    row_bytes: int | None  # bytes of one row of shape[-1] elements; None: the type is not implemented


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything a GGUF file says before its weights."""

    path: Path
    version: int
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, GgufTensor]
    bytes: ByteView  # the whole file, read-only

    def rows(self, tensor: GgufTensor) -> ByteView:
        """View of a tensor's bytes, [rows, bytes per row]; a vector is one row.

        Raises UnsupportedModelError, naming the tensor and its type, if the encoding is not implemented.
        """
        if tensor.row_bytes is None:
            known = ", ".join(name for name, *_ in _IMPLEMENTED.values())
            raise UnsupportedModelError(
                f"{self.path}: tensor {tensor.name!r} is stored as {tensor.type_name}; supported: {known}. "
                "Take a file quantized as Q8_0, Q4_1 or Q4_0, or one with F16 weights"
            )
        num_rows = prod(tensor.shape[:-1])
        end = tensor.start + num_rows * tensor.row_bytes
        return self.bytes[tensor.start : end].reshape(num_rows, tensor.row_bytes)


def read_gguf_header(path: Path) -> GgufHeader:
    """Map a GGUF file and read its header; weights are not touched.

    Raises ModelNotFoundError if it cannot be opened, UnsupportedModelError for a version or byte order that is not
    implemented and ModelFileError for anything truncated, out of range or contradictory.
    """
    return _Reader(path, map_file(path, "GGUF")).read()


class _Reader:
    """A position in the mapped file that never moves past its end."""

    def __init__(self, path: Path, file: mmap.mmap) -> None:
        self._path = path
        self._file = file
        self._size = len(file)
        self._position = 0

    def read(self) -> GgufHeader:
        version, num_tensors, num_keys = self._preamble()
        metadata: dict[str, GgufValue] = {}
        for index in range(num_keys):
            key = self._string(f"name of metadata key {index}", MAX_KEY_BYTES)
            if key in metadata:
                raise self._malformed(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(key)
        infos = self._tensor_infos(num_tensors)
        alignment = self._alignment(metadata)
        base = -(-self._position // alignment) * alignment
        tensors = {name: self._place(name, *info, base=base, alignment=alignment) for name, info in infos.items()}
        whole: ByteView = np.frombuffer(self._file, np.uint8)
        return GgufHeader(self._path, version, metadata, tensors, whole)

    def _malformed(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self._path}: {what}; the file is damaged or truncated, fetch it again")

    def _take(self, num_bytes: int, what: str) -> int:
        """Step over num_bytes and return where they start."""
        start = self._position
        if num_bytes > self._size - start:
            raise self._malformed(
                f"{what} needs {num_bytes} bytes at byte {start}, but the file ends at byte {self._size}"
            )
        self._position = start + num_bytes
        return start

    def _u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._file, self._take(4, what))[0]
        return value

    def _u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._file, self._take(8, what))[0]
        return value

    def _string(self, what: str, limit: int | None = None) -> str:
        length = self._u64(f"length of {what}")
        if limit is not None and length > limit:
            raise self._malformed(f"{what} is {length} bytes long, the limit is {limit}")
        start = self._take(length, what)
        try:
            return self._file[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self._malformed(f"{what} is not UTF-8") from error

    def _preamble(self) -> tuple[int, int, int]:
        magic = self._file[:4]
        if magic != _MAGIC:
            raise ModelFileError(f"{self._path}: starts with {magic!r} instead of {_MAGIC!r}, so it is not a GGUF file")
        self._take(4, "magic")
        version = self._u32("version")
        if version not in (2, 3):
            order = " (a big-endian file?)" if version and not version & 0xFFFF else ""
            raise UnsupportedModelError(
                f"{self._path}: GGUF version {version}{order}; supported: 2 and 3, little endian"
            )
        num_tensors = self._count("tensor count", limit=MAX_TENSORS, least_bytes=24)
        num_keys = self._count("metadata count", limit=MAX_KEYS, least_bytes=13)
        return version, num_tensors, num_keys

    def _count(self, what: str, *, limit: int, least_bytes: int) -> int:
        """Read a count, and refuse one that the rest of the file could not hold at least_bytes each."""
        count = self._u64(what)
        most = min(limit, (self._size - self._position) // least_bytes)
        if count > most:
            raise self._malformed(f"{what} is {count}, but a file of {self._size} bytes has room for {most} at most")
        return count

    def _value(self, key: str) -> GgufValue:
        kind = self._u32(f"type of metadata key {key!r}")
        what = f"value of metadata key {key!r}"
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            return self._array(key)
        scalar = self._scalar(kind, what)
        start = self._take(scalar.size, what)
        value: Scalar = scalar.unpack_from(self._file, start)[0]
        return value

    def _scalar(self, kind: int, what: str) -> struct.Struct:
        try:
            return _SCALARS[kind]
        except KeyError:
            raise self._malformed(f"{what} has type {kind}, which GGUF does not define") from None

    def _array(self, key: str) -> GgufStrings | GgufNumbers:
        what = f"array of metadata key {key!r}"
        kind = self._u32(f"item type of {what}")
        count = self._u64(f"length of {what}")
        if kind == _ARRAY:
            raise self._malformed(f"{what} holds arrays; no key that describes a model does")
        if kind == _STRING:
            return self._skip_strings(key, count, what)
        item = self._scalar(kind, f"item of {what}")
        return GgufNumbers(self._file, self._take(count * item.size, what), count, item)

    def _skip_strings(self, key: str, count: int, what: str) -> GgufStrings:
        start, file, last = self._position, self._file, self._size - 8
        if count > (self._size - start) // 8:
            raise self._malformed(f"{what} says {count} strings, more than the file has room for")
        # The one hot loop of this file: no method calls, one check an iteration. A length past the end moves `position`
        # behind `last`, which the next iteration or the check after the loop catches.
        position, length_at = start, _U64.unpack_from
        for index in range(count):
            if position > last:
                raise self._malformed(f"{what} ends at string {index} of {count}")
            position += 8 + length_at(file, position)[0]
        if position > self._size:
            raise self._malformed(f"{what}: the last string runs past the end")
        self._position = position
        return GgufStrings(file, start, count, key)

    def _tensor_infos(self, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for index in range(count):
            name = self._string(f"name of tensor {index}", MAX_NAME_BYTES)
            if name in infos:
                raise self._malformed(f"tensor {name!r} appears twice")
            num_dimensions = self._u32(f"number of dimensions of tensor {name!r}")
            if not 1 <= num_dimensions <= MAX_DIMENSIONS:
                raise self._malformed(
                    f"tensor {name!r} has {num_dimensions} dimensions, 1 to {MAX_DIMENSIONS} are allowed"
                )
            fastest_first = [self._u64(f"dimensions of tensor {name!r}") for _ in range(num_dimensions)]
            start = self._take(_TENSOR_TAIL.size, f"type and offset of tensor {name!r}")
            kind, offset = _TENSOR_TAIL.unpack_from(self._file, start)
            infos[name] = (tuple(reversed(fastest_first)), kind, offset)
        return infos

    def _alignment(self, metadata: Mapping[str, GgufValue]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._malformed(f"general.alignment is {alignment!r}; a power of two up to {MAX_ALIGNMENT} is needed")
        return alignment

    def _place(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, *, base: int, alignment: int
    ) -> GgufTensor:
        if not prod(shape):
            raise self._malformed(f"tensor {name!r} of shape {list(shape)} is empty")
        if offset % alignment:
            raise self._malformed(f"tensor {name!r} starts at offset {offset}, not a multiple of {alignment}")
        if kind not in _IMPLEMENTED:
            return GgufTensor(name, _OTHER_NAMES.get(kind, f"type {kind}"), shape, base + offset, None)
        type_name, block_elements, block_bytes = _IMPLEMENTED[kind]
        if shape[-1] % block_elements:
            raise self._malformed(
                f"tensor {name!r}: a row of {shape[-1]} elements is not a whole number of {type_name} blocks"
            )
        row_bytes = shape[-1] // block_elements * block_bytes
        end = base + offset + prod(shape[:-1]) * row_bytes
        if end > self._size:
            raise self._malformed(f"tensor {name!r} ends at byte {end}, but the file ends at byte {self._size}")
        return GgufTensor(name, type_name, shape, base + offset, row_bytes)
