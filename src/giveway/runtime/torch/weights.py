"""The weights of a model as this backend uses them, loaded one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from giveway.runtime.model_config import ModelConfig
from giveway.runtime.torch.exact_ops import ROW_COUNTS, Product, RowCounts, admitted_row_counts, common_counts
from giveway.runtime.weights.checkpoint import Checkpoint
from giveway.runtime.weights.dequantize import dequantize

# Logits are computed for the rows that are sampled; more at once than this come only from prompt log-probabilities.
LARGEST_HEAD_PIECE = 64


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer. Products map [rows, in] to [rows, out]; norms are float32 [in]."""

    input_norm: Tensor
    qkv: Product  # rows of the result: all query heads, all key heads, all value heads
    qk_norm: Tensor | None  # [query heads + key heads, head_size]: Qwen3's two norms, one row for each head
    output: Product
    post_norm: Tensor
    gate_up: Product  # [gate | up]
    down: Product


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights. The row counts are None when products may run with any number of rows (not exact)."""

    embedding: Callable[[npt.NDArray[np.int64]], Tensor]  # token ids [rows] -> float32 [rows, hidden] on the device
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Product  # logits
    row_counts: RowCounts | None  # of the products inside the layers
    head_row_counts: RowCounts | None


class _Loader:
    """Reads tensors by name into (device, dtype) and builds products from them."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.checkpoint = checkpoint
        self.config: ModelConfig = checkpoint.config
        self.device = device
        self.dtype = dtype
        self.make_product = choose_product(device, dtype)
        self.products: dict[tuple[int, int], Product] = {}  # one of each weight shape, for the probe

    def vector(self, name: str) -> Tensor:
        """Load a norm, float32 on the device."""
        return torch.from_numpy(dequantize(self.checkpoint.tensor(name))).to(self.device)

    def rows(self, names: Sequence[str]) -> Tensor:
        """Load tensors below one another into a single one; only one is held as float32 at a time."""
        shapes = self.config.tensor_shapes()
        first = shapes[names[0]]
        joined = torch.empty((sum(shapes[name][0] for name in names), *first[1:]), dtype=self.dtype, device=self.device)
        start = 0
        for name in names:
            part = dequantize(self.checkpoint.tensor(name))
            joined[start : start + len(part)].copy_(torch.from_numpy(part))
            start += len(part)
        return joined

    def product(self, names: Sequence[str], *, has_bias: bool) -> Product:
        """Load a projection, or several side by side, with their biases."""
        weight = self.rows([f"{name}.weight" for name in names])
        bias = self.rows([f"{name}.bias" for name in names]) if has_bias else None
        product = self.make_product(weight, bias)
        self.products.setdefault((weight.shape[0], weight.shape[1]), product)
        return product

    def layer(self, index: int) -> LayerWeights:
        """Load one layer."""
        config, prefix = self.config, f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qk_norm = None
        if config.qk_norm:
            query, key = self.vector(attention + "q_norm.weight"), self.vector(attention + "k_norm.weight")
            qk_norm = torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)])
        return LayerWeights(
            input_norm=self.vector(prefix + "input_layernorm.weight"),
            qkv=self.product([attention + f"{name}_proj" for name in "qkv"], has_bias=config.qkv_bias),
            qk_norm=qk_norm,
            output=self.product([attention + "o_proj"], has_bias=config.o_bias),
            post_norm=self.vector(prefix + "post_attention_layernorm.weight"),
            gate_up=self.product([mlp + "gate_proj", mlp + "up_proj"], has_bias=False),
            down=self.product([mlp + "down_proj"], has_bias=False),
        )

    def probe(self, product: Product, shape: tuple[int, int], *, largest: int = ROW_COUNTS[-1]) -> RowCounts:
        """Find the row counts with which products of this weight shape may run."""
        return admitted_row_counts(
            lambda weight: self.make_product(weight, None),
            shape,
            product=product,
            device=self.device,
            dtype=self.dtype,
            largest=largest,
        )


def load_weights(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype, exact: bool) -> ModelWeights:
    """Load a checkpoint; with `exact`, also find the row counts with which its products may run.

    Peak memory is the result and one tensor as float32: no second copy of the model exists at any time.
    """
    loader = _Loader(checkpoint, device, dtype)
    head_name = "model.embed_tokens.weight" if checkpoint.config.tied_embeddings else "lm_head.weight"
    head_weight = loader.rows([head_name])
    head, head_shape = loader.make_product(head_weight, None), (head_weight.shape[0], head_weight.shape[1])
    embedding = _embedding(loader, head_weight)
    del head_weight
    # Every layer has the same shapes, so the first one tells the row counts of all. Probing before the others are
    # loaded lets them have the memory that the probes needed.
    first_layer = loader.layer(0)
    row_counts = head_row_counts = None
    if exact:
        head_row_counts = loader.probe(head, head_shape, largest=LARGEST_HEAD_PIECE)
        row_counts = common_counts(loader.probe(product, shape) for shape, product in loader.products.items())
    return ModelWeights(
        embedding=embedding,
        layers=(first_layer, *(loader.layer(index) for index in range(1, checkpoint.config.num_layers))),
        final_norm=loader.vector("model.norm.weight"),
        head=head,
        row_counts=row_counts,
        head_row_counts=head_row_counts,
    )


def _embedding(loader: _Loader, head_weight: Tensor) -> Callable[[npt.NDArray[np.int64]], Tensor]:
    """Return the lookup of embedding rows.

    On CPU they are decoded from the mapped file, row by row when a token needs them: a table would be the largest
    tensor of a small model, and a second copy of the packed head if the two are tied.
    """
    stored = loader.checkpoint.tensor("model.embed_tokens.weight")
    if loader.device.type == "cpu":

        def decode_rows(ids: npt.NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(
                dequantize(replace(stored, shape=(len(ids), stored.shape[1]), data=stored.data[ids]))
            )

        return decode_rows
    table = head_weight if loader.config.tied_embeddings else loader.rows([stored.name])
    return lambda ids: table.index_select(0, torch.from_numpy(ids).to(table.device)).float()


def choose_product(device: torch.device, dtype: torch.dtype) -> Callable[[Tensor, Tensor | None], Product]:
    """Return the builder of x -> x @ weight.T + bias for this device and dtype.

    On CPU the weight is repacked once for oneDNN where that is available: measured on a Zen 5 core, float32 products
    take less than half the time of `linear`, whose library is not tuned for that vendor, and bfloat16 a little less.
    """
    if device.type == "cpu" and _can_pack(dtype):
        return _packed_product
    return _plain_product


def _plain_product(weight: Tensor, bias: Tensor | None) -> Product:
    linear = torch.nn.functional.linear
    return lambda rows: linear(rows, weight, bias)


def _packed_product(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    no_arguments: list[float] = []
    return lambda rows: multiply(rows, packed, bias, "none", no_arguments, "")


def _can_pack(dtype: torch.dtype) -> bool:
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_library or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    weight = torch.ones(32, 32, dtype=dtype)
    try:
        product = _packed_product(weight, None)
        return bool((product(torch.ones(4, 32, dtype=dtype)) == 32).all())
    except RuntimeError:  # this build or this CPU cannot pack this dtype; `linear` always works
        return False
