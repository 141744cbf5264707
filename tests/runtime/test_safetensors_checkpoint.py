"""Hugging Face directories: both spellings of config.json, shards, and refusals that name what is wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from giveway.core.errors import (
    ModelError,
    ModelFileError,
    ModelNotFoundError,
    TensorMismatchError,
    UnsupportedModelError,
)
from giveway.runtime.model_config import ModelConfig, RopeScaling
from giveway.runtime.weights.dequantize import dequantize
from giveway.runtime.weights.hf_config import model_config_from_json
from giveway.runtime.weights.safetensors_checkpoint import SafetensorsCheckpoint, SafetensorsFile
from tests.checkpoints import Family, write_hf_checkpoint


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_tensor_is_that_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    write_hf_checkpoint(tmp_path, "qwen2", tied=False, dtype=dtype)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.config.dtype == str(dtype).removeprefix("torch.")
    reference = load_file(tmp_path / "model.safetensors")
    assert set(reference) == set(checkpoint.config.tensor_shapes())
    for name, wanted in reference.items():
        raw = checkpoint.tensor(name)
        assert not raw.data.flags.owndata
        assert not raw.data.flags.writeable
        assert np.array_equal(dequantize(raw), wanted.float().numpy()), name


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_shards_make_the_same_model_as_one_file(tmp_path: Path, family: Family) -> None:
    one = SafetensorsCheckpoint(write_hf_checkpoint(tmp_path / "one", family, tied=True))
    many = SafetensorsCheckpoint(write_hf_checkpoint(tmp_path / "many", family, tied=True, shards=3))
    assert one.config == many.config
    assert one.config.architecture == family
    for name in one.config.tensor_shapes():
        assert np.array_equal(one.tensor(name).data, many.tensor(name).data)


def config(change: dict[str, Any], architecture: str = "LlamaForCausalLM") -> ModelConfig:
    values: dict[str, Any] = {
        "architectures": [architecture],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    values |= change
    return model_config_from_json(
        {name: value for name, value in values.items() if value != "absent"}, path=Path("c.json")
    )


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_the_older_and_the_newer_spelling_mean_the_same() -> None:
    older = {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}, "torch_dtype": "bfloat16"}
    newer = {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}, "dtype": "bfloat16"}
    assert config(older) == config(newer)
    assert config(newer).rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)
    assert (config(newer).rope_theta, config(newer).dtype) == (5e5, "bfloat16")


def test_the_oldest_spelling_calls_the_type_of_scaling_type() -> None:
    assert config({"rope_scaling": LLAMA3 | {"type": "llama3"}}).rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)
    assert config({"rope_scaling": None, "rope_theta": 1e6}).rope_theta == 1e6
    assert config({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}).rope_scaling is None


def test_optional_members_take_their_defaults() -> None:
    found = config({"num_key_value_heads": "absent", "max_position_embeddings": "absent"})
    assert (found.num_kv_heads, found.head_size, found.max_positions) == (4, 16, 2048)
    assert (found.rope_theta, found.rms_norm_eps, found.tied_embeddings, found.dtype) == (1e4, 1e-6, False, "float32")
    assert config({"head_dim": 32}).head_size == 32
    assert config({"head_dim": None}).head_size == 16


def test_each_family_has_its_own_biases_and_norms() -> None:
    def parts(architecture: str, **change: Any) -> tuple[bool, bool, bool]:
        found = config(change, architecture)
        return found.qkv_bias, found.o_bias, found.qk_norm

    assert parts("LlamaForCausalLM") == (False, False, False)
    assert parts("LlamaForCausalLM", attention_bias=True) == (True, True, False)
    assert parts("MistralForCausalLM") == (False, False, False)
    assert parts("Qwen2ForCausalLM") == (True, False, False)
    assert parts("Qwen3ForCausalLM") == (False, False, True)


def test_a_sliding_window_counts_where_the_family_uses_it() -> None:
    qwen2 = "Qwen2ForCausalLM"
    assert config({"sliding_window": 16}, "MistralForCausalLM").sliding_window == 16
    assert config({"sliding_window": None}, "MistralForCausalLM").sliding_window is None
    assert config({"sliding_window": 16, "use_sliding_window": False}, qwen2).sliding_window is None
    assert config({"sliding_window": 16, "use_sliding_window": True}, qwen2).sliding_window is None  # from layer 28 on
    everywhere = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}
    assert config(everywhere, qwen2).sliding_window == 16
    assert config(everywhere | {"layer_types": ["full_attention"] * 2}, qwen2).sliding_window is None


def test_a_window_that_reaches_beyond_all_positions_is_none() -> None:
    for window, expected in ((127, 127), (128, None), (2**63 - 1, None), (2**63, None), (2**70, None)):
        found = config({"sliding_window": window, "max_position_embeddings": 128}, "MistralForCausalLM")
        assert found.sliding_window == expected


@pytest.mark.parametrize("window", [0, -1, 16.0, True, "16"])
def test_a_window_that_is_no_number_of_positions_is_refused(window: object) -> None:
    with pytest.raises(ModelFileError, match=r"sliding_window is .*; a positive whole number or null is needed"):
        config({"sliding_window": window}, "MistralForCausalLM")


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "architecture": (
        {"architectures": ["FalconForCausalLM"]},
        UnsupportedModelError,
        "FalconForCausalLM is not implemented",
    ),
    "no architecture": ({"architectures": "absent"}, UnsupportedModelError, "model_type None is not enough"),
    "architecture is null": (
        {"architectures": None, "model_type": "llama"},
        UnsupportedModelError,
        "architectures names no model, and model_type 'llama' is not enough",
    ),
    "MLP bias": ({"mlp_bias": True}, UnsupportedModelError, "mlp_bias is True"),
    "activation": ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act is 'gelu'"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModelError, "is 'gptq'"),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, UnsupportedModelError, "rope_type is 'yarn'"),
    "linear": ({"rope_parameters": {"rope_type": "linear"}}, UnsupportedModelError, "rope_type is 'linear'"),
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic"}}, UnsupportedModelError, "rope_type is 'dynamic'"),
    "partly rotated": ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor is 0.5"),
    "dtype": ({"dtype": "float8_e4m3fn"}, UnsupportedModelError, "dtype is 'float8_e4m3fn'"),
    "missing size": ({"hidden_size": "absent"}, ModelFileError, "hidden_size is missing"),
    "text for a size": ({"num_hidden_layers": "two"}, ModelFileError, "num_hidden_layers is 'two'"),
    "true for a size": ({"vocab_size": True}, ModelFileError, "vocab_size is True"),
    "epsilon": ({"rms_norm_eps": -1.0}, ModelFileError, "rms_norm_eps is -1.0"),
    "theta": ({"rope_theta": float("inf")}, ModelFileError, "rope_theta is inf"),
    "flag": ({"tie_word_embeddings": "yes"}, ModelFileError, "tie_word_embeddings is 'yes'"),
    "rope": ({"rope_scaling": [1]}, ModelFileError, "rope_scaling is [1]"),
    "llama3 without factor": (
        {"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 64}},
        ModelFileError,
        "factor is missing",
    ),
    "no positions": ({"max_position_embeddings": 0}, UnsupportedModelError, "max_positions is 0"),
    "too many positions": ({"max_position_embeddings": 2**70}, UnsupportedModelError, "at most 1099511627776"),
    "odd head": ({"head_dim": 7}, UnsupportedModelError, "head size 7"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_configuration_that_cannot_be_run_is_refused(case: str) -> None:
    change, error, message = REFUSED[case]
    with pytest.raises(error) as refused:
        config(change)
    assert message in str(refused.value)


def test_a_mix_of_windowed_and_full_layers_is_refused() -> None:
    change = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}
    with pytest.raises(UnsupportedModelError, match="on 1 of 2 layers"):
        config(change, "Qwen2ForCausalLM")


def edit(path: Path, **change: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_a_shape_that_contradicts_the_configuration_is_named(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama", tied=True)
    edit(tmp_path / "config.json", intermediate_size=96)
    with pytest.raises(TensorMismatchError, match=r"mlp.gate_proj.weight' has shape \[128, 64\].* needs \[96, 64\]"):
        SafetensorsCheckpoint(tmp_path)


def test_a_missing_tensor_is_named_with_the_shape_it_should_have(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama", tied=True)
    edit(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(TensorMismatchError, match=r"'lm_head.weight' is missing.*\[320, 64\]"):
        SafetensorsCheckpoint(tmp_path)
    edit(tmp_path / "config.json", num_hidden_layers=10**9)
    with pytest.raises(TensorMismatchError, match="claims 1000000000 layers"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "..", "", "a\\b", "sub/a.safetensors"])
def test_an_index_cannot_point_outside_its_directory(tmp_path: Path, name: str) -> None:
    write_hf_checkpoint(tmp_path / "m", "llama", tied=True, shards=2)
    (tmp_path / "elsewhere.safetensors").write_bytes(b"")
    index = tmp_path / "m" / "model.safetensors.index.json"
    edit(index, weight_map=json.loads(index.read_text())["weight_map"] | {"model.norm.weight": name})
    with pytest.raises(ModelFileError, match="leaves the model's directory"):
        SafetensorsCheckpoint(tmp_path / "m")


def test_an_index_that_names_a_missing_file_or_tensor_is_refused(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama", tied=True, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map=good | {"x": "model-00001-of-00002.safetensors"})
    with pytest.raises(ModelFileError, match="holds tensor 'x', but it does not"):
        SafetensorsCheckpoint(tmp_path)
    edit(index, weight_map=good | {"x": "model-00009-of-00002.safetensors"})
    with pytest.raises(ModelNotFoundError, match="model-00009"):
        SafetensorsCheckpoint(tmp_path)
    edit(index, weight_map=["x"])
    with pytest.raises(ModelFileError, match="'weight_map' must be an object"):
        SafetensorsCheckpoint(tmp_path)


def test_a_directory_without_configuration_or_weights_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        SafetensorsCheckpoint(tmp_path)
    write_hf_checkpoint(tmp_path, "llama", tied=True)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"neither model\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1, "a": 2}', '{"a":' * 100_000])
def test_a_configuration_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"config\.json"):
        SafetensorsCheckpoint(tmp_path)


def entry(**change: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | change


def weights(path: Path, header: Any, data: bytes = b"\0" * 32, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


HOSTILE: dict[str, tuple[Any, str]] = {
    "offsets past the end": ({"w": entry(data_offsets=[0, 2**60])}, "but the file has"),
    "offsets backwards": ({"w": entry(data_offsets=[16, 0])}, "but the file has"),
    "negative offset": ({"w": entry(data_offsets=[-16, 0])}, "lacks a proper"),
    "fraction": ({"w": entry(shape=[1.5])}, "lacks a proper"),
    "three offsets": ({"w": entry(data_offsets=[0, 8, 16])}, "lacks a proper"),
    "no dtype": ({"w": entry(dtype=None)}, "lacks a proper"),
    "no object": ({"w": 7}, "lacks a proper"),
    "wrong size": ({"w": entry(shape=[2, 3])}, "does not take 16 bytes"),
    "size that overflows": ({"w": entry(shape=[2**62, 4])}, "does not take 16 bytes"),
    "overlap": ({"v": entry(), "w": entry(data_offsets=[8, 24])}, "'v' and 'w' overlap"),
    "repeated": (b'{"w": {}, "w": {}}', "'w' appears twice"),
    "not JSON": (b"\xff\xfe\xfd", "not valid JSON"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path: Path, case: str) -> None:
    header, message = HOSTILE[case]
    with pytest.raises(ModelFileError) as refused:
        SafetensorsFile(weights(tmp_path / "bad.safetensors", header))
    assert message in str(refused.value)
    assert "bad.safetensors" in str(refused.value)


@pytest.mark.parametrize("length", [2**64 - 1, 10**8 + 1, 500])
def test_a_header_length_beyond_the_file_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(ModelFileError, match=f"claims {length} bytes"):
        SafetensorsFile(weights(tmp_path / "w.safetensors", {"w": entry()}, length=length))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = weights(tmp_path / "w.safetensors", {"w": entry()}, b"\0" * 16).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "w.safetensors").write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"w\.safetensors"):
            SafetensorsFile(tmp_path / "w.safetensors")


def test_an_encoding_that_is_not_implemented_is_named(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama", tied=True)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"I32"'))
    with pytest.raises(UnsupportedModelError, match="is stored as I32; supported: F32, F16, BF16"):
        SafetensorsCheckpoint(tmp_path)


def warnings_of(directory: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    SafetensorsCheckpoint(directory)
    return [record.getMessage() for record in caplog.records]


def test_stored_weights_that_the_configuration_does_not_ask_for_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_hf_checkpoint(tmp_path, "llama", tied=True)
    assert warnings_of(tmp_path, caplog) == []
    weights = tmp_path / "model.safetensors"
    stored = load_file(weights)
    save_file(stored | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, weights)
    (told,) = warnings_of(tmp_path, caplog)
    assert told.startswith(f"{tmp_path}: the model's configuration does not ask for 1 of {len(stored) + 1} stored ")
    assert "not used: 'model.layers.0.self_attn.q_proj.bias'; " in told
    save_file(stored, weights)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1}))
    (told,) = warnings_of(tmp_path, caplog)
    assert f"does not ask for 9 of {len(stored)} stored tensors" in told
    assert told.count("'model.layers.1.") == 3
    assert ", ...; if they" in told


def test_stored_tensors_that_are_no_weights_of_their_own_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_hf_checkpoint(tmp_path, "llama", tied=True)
    weights = tmp_path / "model.safetensors"
    stored = load_file(weights)
    copy = {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}
    angles = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(stored | copy | angles, weights)
    assert warnings_of(tmp_path, caplog) == []
