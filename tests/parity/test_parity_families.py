"""Logits of every supported family on tiny random checkpoints, against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from giveway.runtime.weights.checkpoint import Checkpoint, Encoding
from giveway.runtime.weights.dequantize import dequantize
from giveway.runtime.weights.gguf_checkpoint import GgufCheckpoint
from giveway.runtime.weights.safetensors_checkpoint import SafetensorsCheckpoint
from tests.backends import NAMES, load_backend
from tests.checkpoints import VOCAB_SIZE, Family, write_gguf_checkpoint, write_hf_checkpoint
from tests.runtime.backend_driver import Driver, random_tokens

FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")
PROMPT = random_tokens(11, 150, VOCAB_SIZE)


def reference_of(directory: Path, weights: Checkpoint | None = None) -> Any:
    """The model as transformers loads it; `weights`: replaced by those of this checkpoint, as float32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    if weights is not None:
        names = weights.config.tensor_shapes()
        state = {name: torch.from_numpy(dequantize(weights.tensor(name))) for name in names}
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
    return model.eval()


def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    assert isinstance(logits, torch.Tensor)
    return logits


def check_agreement(ours: torch.Tensor, reference: torch.Tensor) -> None:
    cosine = torch.nn.functional.cosine_similarity(ours.double(), reference.double(), dim=-1)
    assert float(cosine.min()) > 1 - 1e-9
    torch.testing.assert_close(ours, reference, rtol=1e-3, atol=2e-3)


def check_parity(backend: str, checkpoint: Checkpoint, model: Any) -> None:
    """Logits after every prompt token, and the greedy answer."""
    driver = Driver(load_backend(backend, checkpoint, dtype="float32"))
    check_agreement(driver.logits_in_chunks(PROMPT, 64), reference_logits(model, PROMPT))
    answer = driver.generate(PROMPT[:20], 24)
    expected = reference_logits(model, PROMPT[:20] + answer)[19:-1]
    assert answer == expected.argmax(-1).tolist()


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_from_safetensors(backend: str, tmp_path: Path, family: Family, tied: bool) -> None:
    directory = write_hf_checkpoint(tmp_path / "model", family, tied=tied, shards=2 if tied else 1)
    check_parity(backend, SafetensorsCheckpoint(directory), reference_of(directory))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_from_gguf(backend: str, tmp_path: Path, family: Family, tied: bool) -> None:
    directory = write_hf_checkpoint(tmp_path / "model", family, tied=tied)
    gguf_path = write_gguf_checkpoint(directory, tmp_path / "model.gguf", encoding=Encoding.F32)
    check_parity(backend, GgufCheckpoint(gguf_path), reference_of(directory))


@pytest.mark.parametrize("encoding", [each for each in Encoding if each is not Encoding.F32])
def test_quantized_weights_agree_with_the_same_weights_decoded(
    backend: str, tmp_path: Path, encoding: Encoding
) -> None:
    directory = write_hf_checkpoint(tmp_path / "model", "llama", tied=False)
    checkpoint = GgufCheckpoint(write_gguf_checkpoint(directory, tmp_path / "model.gguf", encoding=encoding))
    check_parity(backend, checkpoint, reference_of(directory, checkpoint))


def test_llama_3_frequencies_agree(backend: str, tmp_path: Path) -> None:
    # Goal: the formula of config.json and the divisors of a GGUF file, both beyond the original context of 64.
    directory = write_hf_checkpoint(tmp_path / "model", "llama", tied=False, rope_llama3=True)
    model = reference_of(directory)
    check_parity(backend, SafetensorsCheckpoint(directory), model)
    gguf_path = write_gguf_checkpoint(directory, tmp_path / "model.gguf", encoding=Encoding.F32)
    check_parity(backend, GgufCheckpoint(gguf_path), model)


def test_a_context_longer_than_the_sliding_window_agrees(backend: str, tmp_path: Path) -> None:
    directory = write_hf_checkpoint(tmp_path / "model", "mistral", tied=False, sliding_window=32)
    check_parity(backend, SafetensorsCheckpoint(directory), reference_of(directory))
    whole = write_hf_checkpoint(tmp_path / "whole", "mistral", tied=False)
    difference = reference_logits(reference_of(directory), PROMPT) - reference_logits(reference_of(whole), PROMPT)
    assert float(difference[:32].abs().max()) < 1e-4 < float(difference[40:].abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_are_widened_exactly(backend: str, tmp_path: Path, dtype: torch.dtype) -> None:
    directory = write_hf_checkpoint(tmp_path / "model", "qwen3", tied=True, dtype=dtype)
    check_parity(backend, SafetensorsCheckpoint(directory), reference_of(directory))


def test_bfloat16_stays_close_to_float32(backend: str, tmp_path: Path) -> None:
    # Goal: the rounding of bfloat16 and nothing else.
    directory = write_hf_checkpoint(tmp_path / "model", "llama", tied=False)
    driver = Driver(load_backend(backend, SafetensorsCheckpoint(directory), dtype="bfloat16"))
    ours, expected = driver.logits_in_chunks(PROMPT, 64), reference_logits(reference_of(directory), PROMPT)
    cosine = torch.nn.functional.cosine_similarity(ours, expected, dim=-1)
    assert float(cosine.min()) > 0.995
    assert np.mean((ours.argmax(-1) == expected.argmax(-1)).numpy()) > 0.8


def test_the_fast_path_agrees_too(tmp_path: Path) -> None:
    directory = write_hf_checkpoint(tmp_path / "model", "mistral", tied=False, sliding_window=32)
    fast = load_backend("torch", SafetensorsCheckpoint(directory), dtype="float32", exact=False)
    assert "not exact" in fast.description
    driver = Driver(fast)
    expected = reference_logits(reference_of(directory), PROMPT)
    check_agreement(driver.logits_in_chunks(PROMPT, 150), expected)
    check_agreement(driver.logits_in_chunks(PROMPT, 40), expected)
