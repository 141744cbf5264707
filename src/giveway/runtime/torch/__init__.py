"""The PyTorch backend: reference on CPU, and CUDA. Importing this package does not import torch yet."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from giveway.core.errors import MissingDependencyError
from giveway.runtime.threads import limit_spinning

if TYPE_CHECKING:
    from giveway.runtime.torch.backend import TorchBackend
    from giveway.runtime.weights.checkpoint import Checkpoint


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
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(
            "the PyTorch backend needs the package 'torch', which is not installed. Run: pip install 'giveway[torch]' "
            "(in a clone: pip install '.[torch]')"
        )
    limit_spinning()
    from giveway.runtime.torch.backend import TorchBackend

    return TorchBackend(checkpoint, device=device, dtype=dtype, exact=exact, num_threads=num_threads)
