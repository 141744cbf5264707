"""The native backend: CPU kernels in C++, no tensor library. Importing this package does not import them yet."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from giveway.core.errors import ConfigError, MissingDependencyError
from giveway.runtime.threads import default_num_threads, limit_spinning

if TYPE_CHECKING:
    from giveway.runtime.model_config import ModelConfig
    from giveway.runtime.native.backend import NativeBackend
    from giveway.runtime.weights.checkpoint import Checkpoint

INSTALL_KERNELS = "Install them with `pip install giveway-kernels` (from a clone: `pip install ./native`)"

_LARGEST_HEAD = 256
_COMPUTE = {"float32": "f32", "bfloat16": "bf16"}
_DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def is_installed() -> bool:
    """Whether the kernels can be imported."""
    return importlib.util.find_spec("giveway_kernels") is not None


def unsupported_reason(config: ModelConfig, *, dtype: str, block_size: int) -> str | None:
    """Say why the kernels cannot run this model with these settings; None: they can.

    dtype: "auto", "float32", "bfloat16" or "float16". block_size: tokens.
    """
    if config.head_size % 16 or config.head_size > _LARGEST_HEAD:
        return f"the head size is {config.head_size}; the native kernels need a multiple of 16, at most {_LARGEST_HEAD}"
    if config.intermediate_size % 16:
        return f"the intermediate size is {config.intermediate_size}; the native kernels need a multiple of 16"
    if block_size % 16:
        return f"the block size is {block_size}; the native kernels need a multiple of 16 tokens"
    if dtype not in ("auto", *_COMPUTE):
        return f"the dtype is {dtype}; the native kernels compute in float32 or bfloat16"
    return None


def choose_dtype(dtype: str) -> str:
    """Return "float32" or "bfloat16"; "auto": bfloat16 where this processor multiplies it faster.

    Raises ConfigError for anything else, RuntimeError when GIVEWAY_KERNELS_ISA names what cannot run here.
    """
    if dtype == "auto":
        import giveway_kernels

        return _DTYPES[giveway_kernels.default_compute()]
    if dtype not in _COMPUTE:
        raise ConfigError(f"dtype is {dtype!r}; the native kernels compute in 'float32' or 'bfloat16'")
    return dtype


def load_backend(checkpoint: Checkpoint, *, dtype: str = "auto", num_threads: int | None = None) -> NativeBackend:
    """Pack the weights of `checkpoint` into a new NativeBackend. num_threads: None for one a physical core.

    Limits OpenMP's spinning on the way. Raises MissingDependencyError when the kernels are not installed, ConfigError
    when a setting is wrong or the processor lacks what GIVEWAY_KERNELS_ISA asks for.
    """
    if not is_installed():
        raise MissingDependencyError(f"the native backend needs the package 'giveway-kernels'. {INSTALL_KERNELS}")
    if num_threads is not None and num_threads < 1:
        raise ConfigError(f"num_threads is {num_threads}; at least 1 is needed")
    limit_spinning()
    from giveway.runtime.native.backend import NativeBackend

    try:
        compute = _COMPUTE[choose_dtype(dtype)]
    except RuntimeError as error:
        raise ConfigError(f"GIVEWAY_KERNELS_ISA: {error}") from error
    return NativeBackend(checkpoint, compute=compute, num_threads=num_threads or default_num_threads())
