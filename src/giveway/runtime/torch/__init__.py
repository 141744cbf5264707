"""The PyTorch backend: reference on CPU, and CUDA. Importing this package does not import torch yet."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from giveway.core.errors import MissingDependencyError

# PyTorch's threads wait for each other by spinning, by default for milliseconds. When another process wants the cores,
# the thread that is waited for does not run meanwhile: a step of 20 ms was seen to take 500. Ten thousand turns, some
# tens of microseconds, are as fast on a quiet machine and harmless on a busy one. Read when PyTorch is loaded.
_SPIN_TURNS = "10000"

if TYPE_CHECKING:
    from giveway.runtime.torch.backend import TorchBackend
    from giveway.runtime.weights.checkpoint import Checkpoint


def limit_spinning() -> None:
    """Keep OpenMP's threads from spinning long for each other; call before torch is imported.

    Sets the environment variable GOMP_SPINCOUNT unless it, or OMP_WAIT_POLICY, is set.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_TURNS)


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
