"""Which backend computes a model: the native kernels where they can, PyTorch where they cannot."""

from __future__ import annotations

import importlib.util
import logging
from enum import Enum

from giveway.core.errors import ConfigError, MissingDependencyError
from giveway.options import EngineOptions
from giveway.runtime import native
from giveway.runtime.backend import Backend
from giveway.runtime.model_config import ModelConfig
from giveway.runtime.model_source import INSTALL_TORCH
from giveway.runtime.weights.checkpoint import Checkpoint

logger = logging.getLogger("giveway")


class BackendName(Enum):
    """The backends that compute real models."""

    NATIVE = "native"
    TORCH = "torch"


def choose_backend(options: EngineOptions, config: ModelConfig) -> tuple[BackendName, str | None]:
    """Return the backend for a model, and why it is not the native one (None where it is, or was not wanted).

    Raises ConfigError or MissingDependencyError when the one that was asked for by name cannot be had, or none can.
    """
    if options.backend == BackendName.TORCH.value:
        return BackendName.TORCH, None
    reason = _why_not_native(options, config)
    if reason is None:
        return BackendName.NATIVE, None
    if options.backend == BackendName.NATIVE.value:
        failure = ConfigError if native.is_installed() else MissingDependencyError
        raise failure(f"backend is 'native', but {reason}")
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(
            f"no backend can run this model: {reason}. PyTorch is missing too. {INSTALL_TORCH}"
        )
    return BackendName.TORCH, reason


def _why_not_native(options: EngineOptions, config: ModelConfig) -> str | None:
    if options.device == "cuda":
        return "the device is cuda, and the native kernels compute on the CPU"
    if options.device == "auto" and options.backend == "auto" and _has_cuda():
        return "there is a CUDA device"
    if not native.is_installed():
        return f"the native kernels are not installed. {native.INSTALL_KERNELS}"
    return native.unsupported_reason(config, dtype=options.dtype, block_size=options.block_size)


def _has_cuda() -> bool:
    """Whether PyTorch finds a CUDA device; loads PyTorch only where the system has a driver at all."""
    import ctypes.util

    if importlib.util.find_spec("torch") is None or ctypes.util.find_library("cuda") is None:
        return False
    import torch

    return torch.cuda.is_available()


def load_backend(options: EngineOptions, checkpoint: Checkpoint) -> Backend:
    """Load a model's weights into the backend chosen for it. Raises what choose_backend and the backends raise."""
    name, reason = choose_backend(options, checkpoint.config)
    if name is BackendName.NATIVE:
        return native.load_backend(checkpoint, dtype=options.dtype, num_threads=options.num_threads)
    if reason is not None and options.device != "cuda":
        logger.info("PyTorch computes: %s", reason)
    from giveway.runtime import torch as torch_backend

    return torch_backend.load_backend(
        checkpoint,
        device=options.device,
        dtype=options.dtype,
        exact=options.exact,
        num_threads=options.num_threads,
    )
