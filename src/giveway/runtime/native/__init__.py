"""The native backend: CPU kernels in C++, no tensor library. Importing this package does not import them yet."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Protocol

from giveway.core.errors import ConfigError, MissingDependencyError
from giveway.runtime.threads import check_num_threads, default_num_threads, limit_spinning

if TYPE_CHECKING:
    from giveway.runtime.model_config import ModelConfig
    from giveway.runtime.native.backend import NativeBackend
    from giveway.runtime.weights.checkpoint import Checkpoint

INSTALL_KERNELS = "Install them with `pip install giveway-kernels` (from a clone: `pip install ./native`)"

_LARGEST_HEAD = 256
COMPUTE_TYPES = {"float32": "f32", "bfloat16": "bf16"}  # our name of a dtype -> that of the kernels


class Settings(Protocol):
    """What matters to the kernels of an engine's options."""

    @property
    def dtype(self) -> str:
        """One of "auto", "float32", "bfloat16" and "float16"."""

    @property
    def block_size(self) -> int:
        """Tokens in one KV block."""


def is_installed() -> bool:
    """Whether the package of the kernels is here."""
    return importlib.util.find_spec("giveway_kernels") is not None


def missing_reason() -> str | None:
    """Say why the kernels cannot be loaded, and what helps; None: they can. Loads them where they are installed.

    Limits OpenMP's spinning on the way.
    """
    if not is_installed():
        return f"the native kernels are not installed. {INSTALL_KERNELS}"
    limit_spinning()
    try:
        import giveway_kernels

        giveway_kernels.chosen_instruction_set()
    except ImportError as error:
        return f"the native kernels are installed but cannot be loaded ({error}). {INSTALL_KERNELS} once more"
    except RuntimeError as error:
        return f"GIVEWAY_KERNELS_ISA names what cannot run here: {error}"
    return None


def is_slow_here() -> bool:
    """Whether only the plain C++ of the kernels runs on this processor, and nobody asked for it.

    Without fused multiply-adds that is many times slower than any tensor library. The kernels can be loaded.
    """
    import giveway_kernels

    return "GIVEWAY_KERNELS_ISA" not in os.environ and giveway_kernels.chosen_instruction_set() == "scalar"


def unsupported_reason(config: ModelConfig, settings: Settings) -> str | None:
    """Say why the kernels cannot run this model with these settings, and what helps; None: they can."""
    if config.head_size % 16 or config.head_size > _LARGEST_HEAD:
        return f"the head size is {config.head_size}; the native kernels need a multiple of 16, at most {_LARGEST_HEAD}"
    if config.intermediate_size % 16:
        return f"the intermediate size is {config.intermediate_size}; the native kernels need a multiple of 16"
    if config.hidden_size % 2:
        return f"the hidden size is {config.hidden_size}; the native kernels need an even one"
    if settings.block_size % 16:
        return (
            f"the block size is {settings.block_size}; the native kernels need a multiple of 16 tokens, such as "
            "--block-size 16"
        )
    if settings.dtype not in ("auto", *COMPUTE_TYPES):
        return f"the dtype is {settings.dtype}; the native kernels compute in float32 or bfloat16: --dtype bfloat16"
    return None


def choose_dtype(dtype: str) -> str:
    """Return "float32" or "bfloat16"; "auto": bfloat16 where this processor multiplies it faster.

    Raises ConfigError for anything else.
    """
    if dtype == "auto":
        import giveway_kernels

        fastest = giveway_kernels.default_compute()
        return next(name for name, compute in COMPUTE_TYPES.items() if compute == fastest)
    if dtype not in COMPUTE_TYPES:
        raise ConfigError(f"dtype is {dtype!r}; the native kernels compute in 'float32' or 'bfloat16'")
    return dtype


def load_backend(checkpoint: Checkpoint, *, dtype: str = "auto", num_threads: int | None = None) -> NativeBackend:
    """Pack the weights of `checkpoint` into a new NativeBackend.

    num_threads: None for one a physical core. Limits OpenMP's spinning on the way. Raises MissingDependencyError when
    the kernels cannot be loaded, ConfigError when a setting is wrong.
    """
    if reason := missing_reason():
        raise MissingDependencyError(f"the native backend cannot be used: {reason}")
    check_num_threads(num_threads)
    from giveway.runtime.native.backend import NativeBackend

    return NativeBackend(checkpoint, dtype=choose_dtype(dtype), num_threads=num_threads or default_num_threads())
