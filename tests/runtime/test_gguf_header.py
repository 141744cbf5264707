"""The GGUF header reader: what it reads, and that no damaged file gets past it with anything but a typed error."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from giveway.core.errors import ModelError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from giveway.runtime.model_source import embedded_model_path
from giveway.runtime.weights.gguf_header import GgufNumbers, GgufStrings, read_gguf_header

STRING, ARRAY = 8, 9


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file(
    keys: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


def small_file() -> bytes:
    keys = [
        key("a.text", STRING, text("héllo")),
        key("a.number", 4, struct.pack("<I", 7)),
        key("a.words", ARRAY, struct.pack("<IQ", STRING, 3) + text("x") + text("") + text("漢字")),
        key("a.floats", ARRAY, struct.pack("<IQ3f", 6, 3, 0.5, -1.0, 2.0)),
    ]
    return file(keys, [tensor("w", [4, 2], 0, 0), tensor("b", [3], 1, 32)], bytes(range(38)))


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_every_kind_of_value_is_read_as_the_reference_writer_wrote_it(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "all.gguf", "llama")
    writer.add_uint8("k.u8", 200)
    writer.add_int8("k.i8", -3)
    writer.add_uint16("k.u16", 60_000)
    writer.add_int16("k.i16", -30_000)
    writer.add_uint32("k.u32", 4_000_000_000)
    writer.add_int32("k.i32", -2_000_000_000)
    writer.add_uint64("k.u64", 2**63 + 1)
    writer.add_int64("k.i64", -(2**62))
    writer.add_float32("k.f32", 0.25)
    writer.add_float64("k.f64", 0.1)
    writer.add_bool("k.bool", True)
    writer.add_string("k.string", "naïve 🤖")
    writer.add_array("k.strings", ["a", "", "ü" * 300])
    writer.add_array("k.ints", [-1, 2, 3])
    writer.add_array("k.bools", [True, False])
    writer.add_tensor("m", np.arange(6, dtype=np.float32).reshape(2, 3))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    header = read_gguf_header(tmp_path / "all.gguf")
    scalars = {
        name: value for name, value in header.metadata.items() if not isinstance(value, GgufStrings | GgufNumbers)
    }
    assert scalars == {
        "general.architecture": "llama",
        "k.u8": 200,
        "k.i8": -3,
        "k.u16": 60_000,
        "k.i16": -30_000,
        "k.u32": 4_000_000_000,
        "k.i32": -2_000_000_000,
        "k.u64": 2**63 + 1,
        "k.i64": -(2**62),
        "k.f32": 0.25,
        "k.f64": 0.1,
        "k.bool": True,
        "k.string": "naïve 🤖",
    }
    assert scalars["k.bool"] is True
    strings, ints, bools = (header.metadata[f"k.{name}"] for name in ("strings", "ints", "bools"))
    assert isinstance(strings, GgufStrings)
    assert isinstance(ints, GgufNumbers)
    assert isinstance(bools, GgufNumbers)
    assert strings.decode() == ["a", "", "ü" * 300]
    assert ints.decode() == [-1, 2, 3]
    assert bools.decode() == [True, False]
    assert header.tensors["m"].shape == (2, 3)
    assert header.rows(header.tensors["m"]).view("<f4").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.parametrize("version", [2, 3])
def test_both_current_versions_are_read(tmp_path: Path, version: int) -> None:
    header = read_gguf_header(write(tmp_path / "f.gguf", file([key("n", 4, b"\1\0\0\0")], [], version=version)))
    assert (header.version, dict(header.metadata)) == (version, {"n": 1})


def test_tensor_bytes_are_a_read_only_view_of_the_file(tmp_path: Path) -> None:
    header = read_gguf_header(write(tmp_path / "f.gguf", small_file()))
    rows = header.rows(header.tensors["w"])
    assert rows.tolist() == [list(range(16)), list(range(16, 32))]
    assert header.rows(header.tensors["b"]).shape == (1, 6)
    assert not rows.flags.writeable
    assert not rows.flags.owndata


def test_the_alignment_of_the_file_moves_the_data(tmp_path: Path) -> None:
    keys = [key("general.alignment", 4, struct.pack("<I", 256))]
    content = file(keys, [tensor("w", [2], 0, 256)])
    content += b"\0" * (-len(content) % 256) + b"\0" * 256 + struct.pack("<2f", 1.5, 2.5)
    header = read_gguf_header(write(tmp_path / "f.gguf", content))
    assert header.rows(header.tensors["w"]).view("<f4").tolist() == [[1.5, 2.5]]


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    # Goal: wherever the download broke off, the answer is a ModelFileError that names the file.
    whole = small_file()
    for length in range(len(whole)):
        path = write(tmp_path / "cut.gguf", whole[:length])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            read_gguf_header(path)


HUGE = 2**64 - 1
HOSTILE = {
    "not GGUF": (file([], [], magic=b"PK\3\4"), "not a GGUF file"),
    "tensor count": (file([], [], num_tensors=HUGE), "tensor count is 18446744073709551615"),
    "metadata count": (file([], [], num_keys=2**40), "metadata count"),
    "key length": (file([struct.pack("<Q", HUGE) + b"abcdefghijklm"], []), "name of metadata key 0"),
    "string length": (file([key("k", STRING, struct.pack("<Q", HUGE))], []), "value of metadata key 'k'"),
    "array length": (file([key("k", ARRAY, struct.pack("<IQ", 4, HUGE))], []), "array of metadata key 'k'"),
    "string array length": (
        file([key("k", ARRAY, struct.pack("<IQ", STRING, 2**61))], []),
        "array of metadata key 'k'",
    ),
    "string in array": (
        file([key("k", ARRAY, struct.pack("<IQQ", STRING, 2, HUGE) + b"0" * 16)], []),
        "array of metadata key 'k'",
    ),
    "last string in array": (
        file([key("k", ARRAY, struct.pack("<IQQ", STRING, 1, 2**20))], []),
        "the last string runs past the end",
    ),
    "nested array": (file([key("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + b"\0" * 12)], []), "holds arrays"),
    "unknown value type": (file([key("k", 77, b"\0" * 8)], []), "type 77"),
    "not UTF-8": (file([key("k", STRING, text(b"\xff\xfe"))], []), "not UTF-8"),
    "repeated key": (file([key("k", 0, b"\1"), key("k", 0, b"\2")], []), "'k' appears twice"),
    "repeated tensor": (
        file([], [tensor("w", [1], 0, 0), tensor("w", [1], 0, 32)], b"\0" * 64),
        "'w' appears twice",
    ),
    "offset past the end": (file([], [tensor("w", [4], 0, 2**63)], b"\0" * 64), "'w' ends at byte"),
    "unaligned offset": (file([], [tensor("w", [4], 0, 8)], b"\0" * 64), "not a multiple of 32"),
    "dimensions that overflow": (file([], [tensor("w", [2**63, 2**63], 0, 0)], b"\0" * 64), "'w' ends at byte"),
    "empty tensor": (file([], [tensor("w", [0], 0, 0)], b"\0" * 64), "is empty"),
    "five dimensions": (file([], [tensor("w", [1] * 5, 0, 0)], b"\0" * 64), "5 dimensions"),
    "no dimensions": (file([], [tensor("w", [], 0, 0)], b"\0" * 64), "0 dimensions"),
    "half a block": (file([], [tensor("w", [33], 8, 0)], b"\0" * 64), "whole number of Q8_0 blocks"),
    "alignment zero": (file([key("general.alignment", 4, b"\0" * 4)], []), "general.alignment is 0"),
    "alignment three": (file([key("general.alignment", 4, b"\3\0\0\0")], []), "general.alignment is 3"),
    "alignment text": (file([key("general.alignment", STRING, text("32"))], []), "general.alignment is '32'"),
    "empty": (b"", "empty"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, message = HOSTILE[case]
    with pytest.raises(ModelFileError) as refused:
        read_gguf_header(write(tmp_path / "bad.gguf", content))
    assert message in str(refused.value)
    assert "bad.gguf" in str(refused.value)


@pytest.mark.parametrize(("version", "message"), [(1, "version 1;"), (4, "version 4;"), (3 << 24, "big-endian")])
def test_another_version_or_byte_order_is_unsupported(tmp_path: Path, version: int, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_gguf_header(write(tmp_path / "f.gguf", file([], [], version=version)))


def test_an_encoding_that_is_not_implemented_is_named_with_its_tensor(tmp_path: Path) -> None:
    header = read_gguf_header(
        write(tmp_path / "f.gguf", file([], [tensor("w", [256], 12, 0), tensor("v", [1], 99, 0)]))
    )
    with pytest.raises(UnsupportedModelError, match=r"'w' is stored as Q4_K; supported: F32, F16, Q4_0"):
        header.rows(header.tensors["w"])
    with pytest.raises(UnsupportedModelError, match="'v' is stored as type 99"):
        header.rows(header.tensors["v"])


def test_a_string_that_is_not_utf8_inside_an_array_is_found_when_it_is_decoded(tmp_path: Path) -> None:
    content = file([key("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("ok") + text(b"\xc3\x28"))], [])
    strings = read_gguf_header(write(tmp_path / "f.gguf", content)).metadata["k"]
    assert isinstance(strings, GgufStrings)
    with pytest.raises(ModelFileError, match="key 'k': string 1 is not UTF-8"):
        strings.decode()


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="No such file"):
        read_gguf_header(tmp_path / "none.gguf")
    with pytest.raises(ModelNotFoundError, match="directory"):
        read_gguf_header(tmp_path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damaged_byte_causes_anything_but_a_model_error(tmp_path: Path, data: st.DataObject) -> None:
    # Goal: whatever a few bytes become, reading ends at once, either well or with a ModelError.
    content = bytearray(small_file())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = write(tmp_path / "fuzzed.gguf", bytes(content))
    try:
        header = read_gguf_header(path)
        for value in header.metadata.values():
            if isinstance(value, GgufStrings | GgufNumbers):
                value.decode()
        for info in header.tensors.values():
            header.rows(info)
    except ModelError:
        pass


def test_the_embedded_model_is_read_like_the_reference_reads_it() -> None:
    path = embedded_model_path()
    start = time.perf_counter()
    header = read_gguf_header(path)
    elapsed = time.perf_counter() - start
    assert len(header.tensors) == 272
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GgufStrings)
    assert tokens.decode()[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert header.tensors["token_embd.weight"].shape == (49152, 576)
    assert elapsed < 5  # it takes 0.01 s; a reader that builds an object for every token takes seconds
