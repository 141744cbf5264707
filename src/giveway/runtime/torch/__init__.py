"""The PyTorch backend: reference on CPU, and CUDA. Importing this package does not import torch yet."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from giveway.core.errors import MissingDependencyError
from giveway.runtime.threads import check_num_threads, limit_spinning

if TYPE_CHECKING:
    from giveway.runtime.block_shape import BlockShape
    from giveway.runtime.torch.backend import TorchBackend
    from giveway.runtime.torch.swap_probe import SwapProbe
    from giveway.runtime.weights.checkpoint import Checkpoint


PIP_TORCH = "`pip install 'giveway[torch]'` (from a clone: `pip install '.[torch]'`)"
INSTALL_TORCH = f"Install it with {PIP_TORCH}"

# One of these is there wherever a driver for a GPU is: NVIDIA's, also in a container, under WSL and on Tegra; AMD's.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap", "/dev/kfd")


def is_installed() -> bool:
    """Whether the package is here."""
    return importlib.util.find_spec("torch") is not None


def finds_cuda() -> bool:
    """Whether PyTorch finds a CUDA device. Where the system has no driver it is not asked: loading it takes seconds."""
    if not is_installed() or not any(Path(driver).exists() for driver in _DRIVERS):
        return False
    limit_spinning()
    from giveway.runtime.torch.settings import has_cuda

    return has_cuda()


def make_swap_probe(shape: BlockShape, *, num_blocks: int, device: str) -> SwapProbe:
    """Return two pools of blocks to copy between, for `giveway bench swap`; the arguments are those of SwapProbe.

    Raises MissingDependencyError without PyTorch, ConfigError when the device is absent, memory is short or
    OMP_NUM_THREADS is absurd.
    """
    _check_installed()
    check_num_threads(None)
    limit_spinning()
    from giveway.runtime.torch.swap_probe import SwapProbe

    return SwapProbe(shape, num_blocks=num_blocks, device=device)


def load_backend(
    checkpoint: Checkpoint,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    exact: bool | None = None,
    num_threads: int | None = None,
) -> TorchBackend:
    """Load the weights of `checkpoint` into a new TorchBackend; the arguments are those of TorchBackend.

    Limits OpenMP's spinning on the way. Raises MissingDependencyError when PyTorch is not installed, ConfigError when a
    setting is wrong.
    """
    _check_installed()
    limit_spinning()
    from giveway.runtime.torch.backend import TorchBackend

    return TorchBackend(checkpoint, device=device, dtype=dtype, exact=exact, num_threads=num_threads)


def _check_installed() -> None:
    if not is_installed():
        raise MissingDependencyError(f"this needs PyTorch, which is not installed. {INSTALL_TORCH}")
