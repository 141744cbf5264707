"""GGUF checkpoints: geometry from metadata, tensors in canonical order, refusals that name what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from giveway.core.errors import ModelFileError, TensorMismatchError, UnsupportedModelError
from giveway.runtime.model_source import embedded_model_path
from giveway.runtime.weights.checkpoint import Encoding
from giveway.runtime.weights.dequantize import dequantize
from giveway.runtime.weights.gguf_checkpoint import GgufCheckpoint, gguf_tensor_name
from giveway.runtime.weights.safetensors_checkpoint import SafetensorsCheckpoint
from tests.checkpoints import Family, gguf_name, llama3_divisors, write_gguf_checkpoint, write_hf_checkpoint

FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    root = tmp_path_factory.mktemp("hf")

    def directory(family: Family) -> Path:
        path = root / family
        return path if path.exists() else write_hf_checkpoint(path, family, tied=family == "qwen3")

    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unquantized_file_holds_the_same_numbers_as_the_directory(
    tmp_path: Path, hf: Callable[[Family], Path], family: Family
) -> None:
    # Goal: rows of Q and K, weights and biases, come back in Hugging Face's order.
    reference = SafetensorsCheckpoint(hf(family))
    stored = GgufCheckpoint(write_gguf_checkpoint(hf(family), tmp_path / "m.gguf", encoding=Encoding.F32))
    assert stored.config.tensor_shapes() == reference.config.tensor_shapes()
    for name in reference.config.tensor_shapes():
        assert np.array_equal(dequantize(stored.tensor(name)), dequantize(reference.tensor(name))), name


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("encoding", [Encoding.F16, Encoding.BF16, Encoding.Q8_0, Encoding.Q4_0, Encoding.Q4_1])
def test_a_quantized_file_holds_the_rounded_rows_in_canonical_order(
    tmp_path: Path, hf: Callable[[Family], Path], family: Family, encoding: Encoding
) -> None:
    # Goal: whole encoded rows are reordered, so the result is the quantization of the canonical matrix itself.
    reference = SafetensorsCheckpoint(hf(family))
    stored = GgufCheckpoint(write_gguf_checkpoint(hf(family), tmp_path / "m.gguf", encoding=encoding))
    kind = gguf.GGMLQuantizationType[encoding.name]
    for name, shape in reference.config.tensor_shapes().items():
        raw = stored.tensor(name)
        assert raw.shape == shape
        if len(shape) == 2:
            assert raw.encoding is encoding
            wanted = gguf.quants.quantize(dequantize(reference.tensor(name)), kind).view(np.uint8).reshape(shape[0], -1)
            assert np.array_equal(raw.data, wanted), name
        assert not raw.data.flags.writeable


@pytest.mark.parametrize("family", FAMILIES)
def test_geometry_is_that_of_config_json(tmp_path: Path, hf: Callable[[Family], Path], family: Family) -> None:
    stored = GgufCheckpoint(write_gguf_checkpoint(hf(family), tmp_path / "m.gguf", encoding=Encoding.F16)).config
    config = SafetensorsCheckpoint(hf(family)).config
    same: tuple[str, ...] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_size",
    )
    same += ("max_positions", "rope_theta", "tied_embeddings", "qkv_bias", "o_bias", "qk_norm", "sliding_window")
    assert {name: getattr(stored, name) for name in same} == {name: getattr(config, name) for name in same}
    assert stored.rms_norm_eps == pytest.approx(config.rms_norm_eps, rel=1e-6)
    assert stored.dtype == "float16"
    assert stored.architecture == ("llama" if family == "mistral" else family)


def test_rotary_divisors_of_llama_3_are_read_from_their_tensor(tmp_path: Path) -> None:
    directory = write_hf_checkpoint(tmp_path / "hf", "llama", tied=True, rope_llama3=True)
    config = GgufCheckpoint(write_gguf_checkpoint(directory, tmp_path / "m.gguf", encoding=Encoding.F32)).config
    rope = {"rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wanted = llama3_divisors(rope | {"original_max_position_embeddings": 64}, config.head_size)
    assert config.rope_freq_factors == tuple(map(float, wanted))
    assert config.rope_freq_factors is not None
    assert config.rope_freq_factors[0] == 1.0
    assert config.rope_freq_factors[-1] == 8.0
    assert config.rope_scaling is None


def test_layers_beyond_the_count_of_the_file_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_hf_checkpoint(tmp_path / "hf", "llama", tied=True, rope_llama3=True)
    GgufCheckpoint(write_gguf_checkpoint(directory, tmp_path / "whole.gguf", encoding=Encoding.F32))
    assert not caplog.records  # nor are the divisors of the angles
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1}))
    GgufCheckpoint(write_gguf_checkpoint(directory, tmp_path / "m.gguf", encoding=Encoding.F32))
    (told,) = (record.getMessage() for record in caplog.records)
    assert "does not ask for 9 of 21 stored tensors, which are not used: 'blk.1." in told


def test_the_embedded_model_has_the_geometry_of_smollm2(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = GgufCheckpoint(embedded_model_path())
    assert not caplog.records
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_size) == (30, 9, 3, 64)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (576, 1536, 49152)
    assert (config.max_positions, config.rope_theta, config.tied_embeddings) == (8192, 100_000.0, True)
    assert checkpoint.tensor("model.embed_tokens.weight").encoding is Encoding.Q8_0
    assert checkpoint.tensor("model.layers.7.self_attn.q_proj.weight").encoding is Encoding.Q4_1


def test_names_are_translated_both_ways() -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.12.self_attn.k_norm.weight"):
        assert gguf_tensor_name(name) == gguf_name(name)
    assert gguf_tensor_name("model.layers.0.mlp.unknown.weight") == "model.layers.0.mlp.unknown.weight"


def write(path: Path, architecture: str, change: dict[str, object], *, without: str = "", extra: str = "") -> Path:
    """A one-layer model of hidden size 32; `change` overrides keys, None leaves one out."""
    keys: dict[str, object] = {
        "context_length": 64,
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 32,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (keys | change).items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{name}", value)
        elif isinstance(value, int):
            add = writer.add_uint32 if value >= 0 else writer.add_int32
            add(f"{architecture}.{name}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{name}", value)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (40, 32), "output_norm.weight": (32,)}
    layer = {"attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32)}
    layer |= {"attn_output": (32, 32), "ffn_gate": (32, 32), "ffn_up": (32, 32), "ffn_down": (32, 32)}
    shapes |= {f"blk.0.{name}.weight": shape for name, shape in layer.items()}
    for name, shape in shapes.items():
        if name == extra:
            writer.add_tensor(name, np.zeros((32, 18), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ4_NL)
        elif name != without:
            writer.add_tensor(name, np.zeros(shape, np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def test_a_file_without_optional_keys_takes_their_defaults(tmp_path: Path) -> None:
    config = GgufCheckpoint(write(tmp_path / "m.gguf", "llama", {"attention.sliding_window": 48})).config
    assert (config.rope_theta, config.head_size, config.tied_embeddings) == (10_000.0, 16, True)
    assert config.sliding_window == 48


def test_a_window_that_reaches_beyond_all_positions_is_none(tmp_path: Path) -> None:
    for window, expected in ((0, None), (63, 63), (64, None), (2**31, None)):
        path = write(tmp_path / f"{window}.gguf", "llama", {"attention.sliding_window": window, "context_length": 64})
        assert GgufCheckpoint(path).config.sliding_window == expected


REFUSED: dict[str, tuple[str, dict[str, object], type[Exception], str]] = {
    "architecture": ("mamba", {}, UnsupportedModelError, "'mamba' is not implemented; supported: llama"),
    "linear scaling": (
        "llama",
        {"rope.scaling.type": "linear"},
        UnsupportedModelError,
        "'llama.rope.scaling.type' is 'linear'",
    ),
    "partly rotated heads": ("qwen2", {"rope.dimension_count": 8}, UnsupportedModelError, "rope.dimension_count' is 8"),
    "other value heads": ("llama", {"attention.value_length": 8}, UnsupportedModelError, "value heads of 8"),
    "missing key": ("llama", {"context_length": None}, ModelFileError, "'llama.context_length' is missing"),
    "text for a number": (
        "llama",
        {"embedding_length": "big"},
        ModelFileError,
        "'llama.embedding_length' is str 'big'",
    ),
    "no heads": ("llama", {"attention.head_count": 0}, ModelFileError, "'llama.attention.head_count' is 0"),
    "no heads of a known size": (
        "llama",
        {"attention.head_count": 0, "attention.key_length": 16},
        UnsupportedModelError,
        "num_heads is 0",
    ),
    "damaged hidden size": (
        "llama",
        {"embedding_length": 64, "rope.dimension_count": 16},
        TensorMismatchError,
        "'llama.embedding_length' is 64, but the rows of tensor 'token_embd.weight' have 32 elements",
    ),
    "damaged number of heads": (
        "llama",
        {"attention.head_count": 7, "rope.dimension_count": 16},
        ModelFileError,
        "'llama.attention.head_count' is 7, which does not divide 'llama.embedding_length', 32, evenly",
    ),
    "another number of heads": (
        "llama",
        {"attention.head_count": 4, "rope.dimension_count": 16},
        UnsupportedModelError,
        "is 16; only whole heads can be rotated, and one has 8 elements (key_length, or embedding_length over ",
    ),
    "uneven KV heads": ("llama", {"attention.head_count_kv": 3}, UnsupportedModelError, "cannot share 3 KV heads"),
    "epsilon": ("llama", {"attention.layer_norm_rms_epsilon": float("nan")}, ModelFileError, "not a positive number"),
    "negative window": ("llama", {"attention.sliding_window": -5}, ModelFileError, "int '-5', not a whole number of"),
    "a billion layers": ("llama", {"block_count": 10**9}, ModelFileError, "block_count' is 1000000000"),
    "other inner size": (
        "llama",
        {"feed_forward_length": 64},
        TensorMismatchError,
        "'model.layers.0.mlp.gate_proj.weight' has shape [32, 32], but the model's configuration needs [64, 32]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused_when_it_is_opened(tmp_path: Path, case: str) -> None:
    architecture, change, error, message = REFUSED[case]
    with pytest.raises(error) as refused:
        GgufCheckpoint(write(tmp_path / "m.gguf", architecture, change))
    assert message in str(refused.value)


def test_a_missing_tensor_is_named_with_the_shape_it_should_have(tmp_path: Path) -> None:
    with pytest.raises(TensorMismatchError, match=r"'model.layers.0.mlp.up_proj.weight' .*missing.*\[32, 32\]"):
        GgufCheckpoint(write(tmp_path / "m.gguf", "llama", {}, without="blk.0.ffn_up.weight"))
    with pytest.raises(TensorMismatchError, match=r"'token_embd.weight' is missing"):
        GgufCheckpoint(write(tmp_path / "n.gguf", "llama", {}, without="token_embd.weight"))


def test_an_unknown_encoding_is_refused_when_the_file_is_opened(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'blk.0.ffn_up.weight' is stored as IQ4_NL"):
        GgufCheckpoint(write(tmp_path / "m.gguf", "llama", {}, extra="blk.0.ffn_up.weight"))
