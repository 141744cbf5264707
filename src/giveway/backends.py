"""Which backend computes a model: the native kernels where they can, PyTorch where they cannot."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from enum import Enum

from giveway.core.errors import ConfigError, MissingDependencyError
from giveway.options import EngineOptions
from giveway.runtime import native, torch
from giveway.runtime.backend import Backend
from giveway.runtime.model_config import ModelConfig
from giveway.runtime.weights.checkpoint import Checkpoint

logger = logging.getLogger("giveway")


class BackendName(Enum):
    """The backends that compute real models."""

    NATIVE = "native"
    TORCH = "torch"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend, and why it is this one."""

    name: BackendName
    reason: str  # for people, and why not the other; with the remedy where there is one
    is_second_best: bool = False  # the kernels are here and were to be expected, but cannot be used


def choose_backend(options: EngineOptions, config: ModelConfig) -> BackendChoice:
    """Choose the backend for a model.

    Raises ConfigError or MissingDependencyError when the one that was asked for by name cannot be had, when the
    instruction set that GIVEWAY_KERNELS_ISA forces cannot, or when no backend can.
    """
    if options.backend == BackendName.TORCH.value:
        return BackendChoice(BackendName.TORCH, "asked for by name")
    if options.backend == BackendName.NATIVE.value:
        _check_native(options, config)
        return BackendChoice(BackendName.NATIVE, "asked for by name")
    if options.device == "cuda":
        return BackendChoice(BackendName.TORCH, "the native kernels compute on the CPU only")
    if options.device == "auto" and torch.finds_cuda():
        return BackendChoice(
            BackendName.TORCH, "there is a CUDA device, and the native kernels compute on the CPU only"
        )
    missing = native.missing_reason()
    if missing and native.is_installed() and os.environ.get("GIVEWAY_KERNELS_ISA"):
        raise ConfigError(f"{missing}. Or set --backend torch.")  # whoever forces a set wants no other backend
    reason = missing or native.unsupported_reason(config, options)
    if reason is None and torch.is_installed() and native.is_slow_here():
        reason = "the processor lacks AVX2, without which the native kernels are slow; --backend native chooses them"
    if reason is None:
        other = "--backend torch chooses PyTorch" if torch.is_installed() else "PyTorch is not installed"
        return BackendChoice(BackendName.NATIVE, f"installed, and can run this model; {other}")
    if not torch.is_installed():
        or_torch = (
            f", or PyTorch with {torch.PIP_TORCH}"
            if missing
            else f"; and PyTorch is not installed. {torch.INSTALL_TORCH}"
        )
        raise MissingDependencyError(f"nothing can compute this model: {reason}{or_torch}")
    return BackendChoice(BackendName.TORCH, reason, is_second_best=native.is_installed())


def _check_native(options: EngineOptions, config: ModelConfig) -> None:
    if options.device == "cuda":
        raise ConfigError(
            "backend is 'native', which computes on the CPU, but device is 'cuda'. Set --device cpu or --backend torch."
        )
    if missing := native.missing_reason():
        raise MissingDependencyError(f"backend is 'native', but {missing}")
    if reason := native.unsupported_reason(config, options):
        raise ConfigError(f"backend is 'native', but {reason}. Or set --backend torch.")


def load_backend(options: EngineOptions, checkpoint: Checkpoint) -> Backend:
    """Load a model's weights into the backend chosen for it. Raises what choose_backend and the backends raise."""
    choice = choose_backend(options, checkpoint.config)
    if choice.name is BackendName.NATIVE:
        return native.load_backend(checkpoint, dtype=options.dtype, num_threads=options.num_threads)
    if options.backend == "auto":
        level = logging.WARNING if choice.is_second_best else logging.INFO
        logger.log(level, "PyTorch computes, not the native kernels: %s", choice.reason)
    return torch.load_backend(
        checkpoint,
        device=options.device,
        dtype=options.dtype,
        exact=options.exact,
        num_threads=options.num_threads,
    )
