"""What a weight file looks like to a backend: named tensors as raw, memory-mapped bytes."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from giveway.core.errors import TensorMismatchError
from giveway.runtime.model_config import ModelConfig

logger = logging.getLogger("giveway")

# Angles that some files keep are computed here, and a head beside tied embeddings is a copy of them.
_NO_WEIGHTS = ("rotary_emb.inv_freq", "rope_freqs.weight", ".attn_rot_embd.weight", "lm_head.weight")
_SHOWN_NAMES = 3


class Encoding(Enum):
    """How the elements of a tensor are stored. Value: (elements per block, bytes per block)."""

    F32 = ("F32", 1, 4)
    F16 = ("F16", 1, 2)
    BF16 = ("BF16", 1, 2)
    Q8_0 = ("Q8_0", 32, 34)
    Q4_0 = ("Q4_0", 32, 18)
    Q4_1 = ("Q4_1", 32, 20)

    @property
    def block_elements(self) -> int:
        """Elements of one block."""
        return self.value[1]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.value[2]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor as stored: rows of encoded elements, already in canonical (Hugging Face) row order."""

    name: str  # canonical name, see ModelConfig.tensor_shapes
    encoding: Encoding
    shape: tuple[int, ...]  # elements, slowest dimension first: [out, in] or [n]
    data: npt.NDArray[np.uint8]  # [rows, bytes per row], read-only view of the mapped file; a vector is one row


class Checkpoint(Protocol):
    """An opened model: its geometry and its tensors."""

    @property
    def config(self) -> ModelConfig:
        """Geometry of the model."""

    def tensor(self, name: str) -> RawTensor:
        """Return one tensor by canonical name.

        Raises TensorMismatchError when it is missing or its shape differs from config.tensor_shapes()[name], naming
        the tensor, the shape found and the shape wanted.
        """


def check_tensor_shape(name: str, *, found: tuple[int, ...], wanted: tuple[int, ...], file: Path) -> None:
    """Raise TensorMismatchError if a stored tensor has another shape than the configuration asks for."""
    if found != wanted:
        raise TensorMismatchError(
            f"{file}: tensor {name!r} has shape {list(found)}, but the model's configuration needs {list(wanted)}; "
            "the weights belong to another configuration"
        )


def warn_of_unused_tensors(stored: Collection[str], used: Collection[str], *, file: Path) -> None:
    """Log one warning if a file holds weights that the model's configuration does not ask for.

    stored, used: names as the file has them; those that are no weights of their own are passed over.
    """
    unused = [name for name in stored if name not in used and not name.endswith(_NO_WEIGHTS)]
    if unused:
        shown = ", ".join(map(repr, unused[:_SHOWN_NAMES])) + (", ..." if len(unused) > _SHOWN_NAMES else "")
        logger.warning(
            "%s: the model's configuration does not ask for %d of %d stored tensors, which are not used: %s; if they "
            "belong to the model, its answers will be wrong",
            file,
            len(unused),
            len(stored),
            shown,
        )
