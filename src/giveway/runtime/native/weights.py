"""The weights of a model, packed for the native kernels one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from giveway_kernels import Matrix, Model

from giveway.runtime.model_config import ModelConfig
from giveway.runtime.weights.checkpoint import Checkpoint
from giveway.runtime.weights.dequantize import dequantize

_Floats = npt.NDArray[np.float32]


class _Packer:
    """Reads tensors by name and packs them; they stay in their own encodings where the kernels know these."""

    def __init__(self, checkpoint: Checkpoint, compute: str, num_threads: int) -> None:
        self.checkpoint = checkpoint
        self.compute = compute
        self.num_threads = num_threads

    def vector(self, name: str) -> _Floats:
        """Load a norm or a bias, float32."""
        return np.ascontiguousarray(dequantize(self.checkpoint.tensor(name)).reshape(-1))

    def matrix(self, names: Sequence[str], *, is_interleaved: bool = False) -> Matrix:
        """Pack one tensor, or several by panels of 16 outputs in turn."""
        tensors = [self.checkpoint.tensor(name) for name in names]
        return Matrix.pack(
            [(tensor.encoding.name, np.ascontiguousarray(tensor.data)) for tensor in tensors],
            num_inputs=tensors[0].shape[1],
            compute=self.compute,
            is_interleaved=is_interleaved,
            num_threads=self.num_threads,
        )

    def layer(self, index: int) -> dict[str, Matrix | _Floats]:
        """Pack one layer, by the names that giveway_kernels.Model knows."""
        config, prefix = self.checkpoint.config, f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        layer: dict[str, Matrix | _Floats] = {
            "input_norm": self.vector(prefix + "input_layernorm.weight"),
            "post_norm": self.vector(prefix + "post_attention_layernorm.weight"),
            "output": self.matrix([attention + "o_proj.weight"]),
            "gate_up": self.matrix([mlp + "gate_proj.weight", mlp + "up_proj.weight"], is_interleaved=True),
            "down": self.matrix([mlp + "down_proj.weight"]),
        }
        for name in ("query", "key", "value"):
            layer[name] = self.matrix([f"{attention}{name[0]}_proj.weight"])
            if config.qkv_bias:
                layer[f"{name}_bias"] = self.vector(f"{attention}{name[0]}_proj.bias")
        if config.o_bias:
            layer["output_bias"] = self.vector(attention + "o_proj.bias")
        if config.qk_norm:
            layer["query_norm"] = self.vector(attention + "q_norm.weight")
            layer["key_norm"] = self.vector(attention + "k_norm.weight")
        return layer


def load_model(checkpoint: Checkpoint, *, compute: str, num_threads: int) -> Model:
    """Pack a checkpoint for the instruction set chosen on this machine. compute: "f32" or "bf16".

    It has no angles yet: how many positions need some is known with the pool. Peak memory is the packed weights and one
    tensor: no second copy of the model exists at any time.
    """
    packer, config = _Packer(checkpoint, compute, num_threads), checkpoint.config
    embedding = packer.matrix(["model.embed_tokens.weight"])
    return Model.make(
        model_shape(config, compute),
        [packer.layer(index) for index in range(config.num_layers)],
        embedding=embedding,
        head=embedding if config.tied_embeddings else packer.matrix(["lm_head.weight"]),
        final_norm=packer.vector("model.norm.weight"),
    )


def model_shape(config: ModelConfig, compute: str) -> dict[str, Any]:
    """Return the sizes of a model by the names that giveway_kernels.Model knows."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_size": config.head_size,
        "norm_eps": config.rms_norm_eps,
        "window": config.sliding_window or 0,
        "soft_cap": 0.0,
        "gate": "silu",
        "compute": compute,
    }
