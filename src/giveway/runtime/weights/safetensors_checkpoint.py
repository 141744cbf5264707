"""A Hugging Face directory of safetensors files as a checkpoint.

Our own reader of the format (eight bytes of length, a JSON header, bytes) rather than the `safetensors` package,
because a backend wants raw, mapped bytes of every encoding and numpy has no bfloat16 for that package to hand out.
Source: https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from giveway.core.errors import ModelFileError, ModelNotFoundError, TensorMismatchError, UnsupportedModelError
from giveway.runtime.json_file import parse_json_object, read_json_object
from giveway.runtime.model_config import ModelConfig
from giveway.runtime.weights.checkpoint import Encoding, RawTensor, check_tensor_shape, warn_of_unused_tensors
from giveway.runtime.weights.gguf_header import ByteView
from giveway.runtime.weights.hf_config import model_config_from_json
from giveway.runtime.weights.mapped_file import map_file

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit

_ENCODINGS = {"F32": Encoding.F32, "F16": Encoding.F16, "BF16": Encoding.BF16}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies in its file. start and end count from the beginning of the file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One mapped .safetensors file whose header has been checked."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its header. Raises ModelNotFoundError or ModelFileError."""
        self.path = path
        mapped = map_file(path, "safetensors")
        self._bytes: ByteView = np.frombuffer(mapped, np.uint8)
        self.tensors = _read_header(mapped, path)

    def rows(self, name: str) -> ByteView:
        """View of a tensor's bytes, [rows, bytes per row]; a vector is one row."""
        stored = self.tensors[name]
        data = self._bytes[stored.start : stored.end]
        return data.reshape(prod(stored.shape[:-1]), -1)


class SafetensorsCheckpoint:
    """An opened directory. Opening checks that every tensor is there, with its shape and a known encoding."""

    def __init__(self, directory: Path) -> None:
        """Read config.json, the index if there is one, and the headers of the weight files.

        Raises ModelNotFoundError, ModelFileError, UnsupportedModelError or TensorMismatchError.
        """
        self._directory = directory
        config_path = directory / "config.json"
        self._config = model_config_from_json(read_json_object(config_path), path=config_path)
        self._files = _open_files(directory)
        self._check_layer_count()
        shapes = self._config.tensor_shapes()
        for name, wanted in shapes.items():
            file, stored, _ = self._locate(name)
            check_tensor_shape(name, found=stored.shape, wanted=wanted, file=file.path)
        warn_of_unused_tensors(self._files, shapes, file=directory)

    @property
    def config(self) -> ModelConfig:
        """Geometry of the model."""
        return self._config

    def tensor(self, name: str) -> RawTensor:
        """Return one tensor by canonical name, as a view of the mapped file.

        Raises TensorMismatchError if there is no such tensor.
        """
        file, stored, encoding = self._locate(name)
        return RawTensor(name=name, encoding=encoding, shape=stored.shape, data=file.rows(name))

    def _locate(self, name: str) -> tuple[SafetensorsFile, StoredTensor, Encoding]:
        file = self._files.get(name)
        if file is None:
            wanted = list(self._config.tensor_shapes().get(name, ()))
            raise TensorMismatchError(
                f"{self._directory}: tensor {name!r} is missing; found none, wanted shape {wanted}"
            )
        stored = file.tensors[name]
        if stored.dtype not in _ENCODINGS:
            raise UnsupportedModelError(
                f"{file.path}: tensor {name!r} is stored as {stored.dtype}; supported: {', '.join(_ENCODINGS)}"
            )
        return file, stored, _ENCODINGS[stored.dtype]

    def _check_layer_count(self) -> None:
        """Refuse a layer count beyond what is stored before anything is sized by it."""
        if self._config.num_layers > len(self._files):
            raise TensorMismatchError(
                f"{self._directory}: config.json claims {self._config.num_layers} layers, but only {len(self._files)} "
                "tensors are stored"
            )


def _open_files(directory: Path) -> dict[str, SafetensorsFile]:
    """Every tensor name of the directory and the file that holds it."""
    single, index = directory / _SINGLE, directory / _INDEX
    if single.exists():
        file = SafetensorsFile(single)
        return dict.fromkeys(file.tensors, file)
    if not index.exists():
        raise ModelNotFoundError(f"{directory}: neither {_SINGLE} nor {_INDEX} is there")
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelFileError(f"{index}: 'weight_map' must be an object of tensor name to file name")
    files = {name: SafetensorsFile(_inside(directory, name, index)) for name in sorted(set(weight_map.values()))}
    for tensor, name in weight_map.items():
        if tensor not in files[name].tensors:
            raise ModelFileError(f"{index}: says that {name!r} holds tensor {tensor!r}, but it does not")
    return {tensor: files[name] for tensor, name in weight_map.items()}


def _inside(directory: Path, name: str, index: Path) -> Path:
    """Path of a shard; only a plain file name may stand in an index.

    The file itself may be a symbolic link: that is how the Hugging Face cache stores every file.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ModelFileError(f"{index}: file name {name[:100]!r} leaves the model's directory")
    return directory / name


def _read_header(mapped: mmap.mmap, path: Path) -> dict[str, StoredTensor]:
    size = len(mapped)
    if size < 8:
        raise ModelFileError(f"{path}: {size} bytes; a safetensors file has at least 8")
    (length,) = struct.unpack_from("<Q", mapped)
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise ModelFileError(
            f"{path}: the header claims {length} bytes, the file has {size - 8} after its length and the limit is "
            f"{MAX_HEADER_BYTES}; the file is truncated or not safetensors"
        )
    header = parse_json_object(mapped[8 : 8 + length], source=path)
    header.pop("__metadata__", None)
    base = 8 + length
    tensors = {name: _stored_tensor(name, entry, path, base=base, size=size) for name, entry in header.items()}
    _refuse_overlaps(tensors, path)
    return tensors


def _stored_tensor(name: str, entry: Any, path: Path, *, base: int, size: int) -> StoredTensor:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ModelFileError(f"{path}: header entry of tensor {name!r} lacks a proper dtype, shape or data_offsets")
    start, end = base + offsets[0], base + offsets[1]
    if not base <= start <= end <= size:
        raise ModelFileError(
            f"{path}: tensor {name!r} takes bytes {start} to {end}, but the file has {size}: truncated or damaged"
        )
    encoding = _ENCODINGS.get(dtype)
    if encoding is not None and prod(shape) * encoding.block_bytes != end - start:
        raise ModelFileError(f"{path}: tensor {name!r} of shape {shape} as {dtype} does not take {end - start} bytes")
    return StoredTensor(dtype, tuple(shape), start, end)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _refuse_overlaps(tensors: dict[str, StoredTensor], path: Path) -> None:
    placed = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end))
    for (before, left), (after, right) in pairwise(placed):
        if right.start < left.end:
            raise ModelFileError(f"{path}: tensors {before!r} and {after!r} overlap; the file is damaged")
