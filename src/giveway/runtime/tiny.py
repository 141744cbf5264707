"""A seeded tiny transformer made in memory: for tests, and to try things without a model file."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from giveway.core.errors import TensorMismatchError
from giveway.runtime.model_config import ModelConfig
from giveway.runtime.weights.checkpoint import Encoding, RawTensor


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """A Checkpoint whose tensors are drawn when asked for; the same seed gives the same weights on every machine."""

    config: ModelConfig
    seed: int
    overrides: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)  # weights to use instead, by name

    def tensor(self, name: str) -> RawTensor:
        """Return one tensor as float32. Raises TensorMismatchError for a name the model does not have."""
        shape = self.config.tensor_shapes().get(name)
        if shape is None:
            raise TensorMismatchError(f"the tiny model has no tensor {name!r}")
        values = self.overrides.get(name)
        if values is None:
            values = self._draw(name, shape)
        data = np.ascontiguousarray(values, dtype="<f4").reshape(shape[0] if len(shape) > 1 else 1, -1)
        return RawTensor(name=name, encoding=Encoding.F32, shape=shape, data=data.view(np.uint8))

    def _draw(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        # A generator of its own for each name, so that a tensor does not depend on the order of loading. Philox and
        # raw integers, because the streams of numpy's distributions may change from version to version.
        generator = np.random.Philox(key=[self.seed, zlib.crc32(name.encode())])
        raw = generator.random_raw(math.prod(shape)) >> np.uint64(40)
        uniform = (raw.astype(np.float64) / 2.0**23 - 1.0).reshape(shape)  # [-1, 1)
        if name.endswith("norm.weight"):
            return (1.0 + 0.25 * uniform).astype(np.float32)
        if name.endswith("bias"):
            return (0.5 * uniform).astype(np.float32)
        return (_spread(name, shape) * uniform).astype(np.float32)


def _spread(name: str, shape: tuple[int, ...]) -> float:
    """Half width of a weight's distribution: layers must outweigh the embedding, or the output repeats its input."""
    if name == "model.embed_tokens.weight":
        return 1.0
    scale = math.sqrt(3.0 / shape[-1])  # keeps the variance of what goes through
    if name == "lm_head.weight":
        return 3.0 * scale
    return 2.5 * scale if "q_proj" in name or "k_proj" in name else 1.5 * scale


def tiny_checkpoint(
    seed: int = 0,
    *,
    vocab_size: int = 260,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    max_positions: int = 4096,
    overrides: dict[str, npt.NDArray[np.float32]] | None = None,
    **settings: object,
) -> TinyCheckpoint:
    """Return a small Llama-like checkpoint; further `settings` are fields of ModelConfig (qk_norm, sliding_window)."""
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_positions=max_positions,
        **{"architecture": "llama", "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, **settings},  # type: ignore[arg-type]
    )
    return TinyCheckpoint(config=config, seed=seed, overrides=dict(overrides or {}))
