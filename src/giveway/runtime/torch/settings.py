"""Which device and dtype to compute with."""

from __future__ import annotations

import torch

from giveway.core.errors import ConfigError
from giveway.runtime.model_config import ModelConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def has_cuda() -> bool:
    """Whether there is a CUDA device."""
    return torch.cuda.is_available()


def choose_device(name: str) -> torch.device:
    """Return the device of that name; "auto": CUDA if there is one. Raises ConfigError when it is unknown or absent."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise ConfigError(f"device is {name!r}; it must be 'auto', 'cpu' or 'cuda'")
    if not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but PyTorch finds no CUDA device. Use device='cpu'.")
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(name: str, device: torch.device, config: ModelConfig) -> torch.dtype:
    """Return the compute dtype. Raises ConfigError for an unknown name, or one that the device cannot compute with."""
    if name == "auto":
        return _auto_dtype(device, config)
    if name not in _DTYPES:
        raise ConfigError(f"dtype is {name!r}; it must be 'auto', {', '.join(map(repr, _DTYPES))}")
    dtype = _DTYPES[name]
    if device.type == "cpu" and dtype is torch.float16:
        raise ConfigError("dtype is 'float16', which has no fast products on CPU. Use 'float32' or 'bfloat16'.")
    if device.type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise ConfigError("dtype is 'bfloat16', which this CUDA device lacks. Use 'float16' or 'float32'.")
    return dtype


def _auto_dtype(device: torch.device, config: ModelConfig) -> torch.dtype:
    # Measured with a 135M model on two Zen 5 cores, which multiply bfloat16 natively: it gains a fifth to a third in
    # tokens per second, but its logits near 25 are 1/8 apart, so greedy answers meet ties that the model does not have.
    if device.type == "cpu":
        return torch.float32
    stored = _DTYPES[config.dtype]
    if stored is torch.float16:
        return stored
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
