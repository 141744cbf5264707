"""The layers of a Llama model as plainly as numpy says them, in float64: what the kernels are compared with.

Rounding of `bf16` is done where the kernels do it (activations, keys, values, weights of attention); sums are
exact enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.native.small_model import SmallModel, Stored

Doubles = npt.NDArray[np.float64]
Rounding = Callable[[Doubles], Doubles]


def round_to_bf16(values: Doubles) -> Doubles:
    """Round to the nearest bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)


def reference_logits(model: SmallModel, tokens: list[int], compute: str) -> Doubles:
    """Logits after every token of one request, [tokens, vocab]."""
    rounded: Rounding = round_to_bf16 if compute == "bf16" else lambda values: values
    eps = model.shape["norm_eps"]
    hidden = rounded(_matrix(model.embedding))[tokens]  # float32 is not kept where bfloat16 is multiplied
    for layer in model.layers:
        normed = rounded(_norm(hidden, _vector(layer["input_norm"]), eps))
        hidden = hidden + _product(rounded(_attend(model, layer, normed, rounded)), layer, "output", rounded)
        normed = rounded(_norm(hidden, _vector(layer["post_norm"]), eps))
        gate, up = (_product(normed, layer, name, rounded) for name in ("gate", "up"))
        hidden = hidden + _product(rounded(_activate(gate, model.shape["gate"]) * up), layer, "down", rounded)
    return rounded(_norm(hidden, _vector(model.final_norm), eps)) @ rounded(_matrix(model.head)).T


def _matrix(weight: Any) -> Doubles:
    assert isinstance(weight, Stored)
    return weight.values.astype(np.float64)


def _vector(weight: Any) -> Doubles:
    return np.asarray(weight, np.float64)


def _norm(rows: Doubles, weight: Doubles, eps: float) -> Doubles:
    scale: Doubles = weight / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + eps)
    return rows * scale


def _product(rows: Doubles, layer: dict[str, Any], name: str, rounded: Rounding) -> Doubles:
    return rows @ rounded(_matrix(layer[name])).T + _vector(layer.get(f"{name}_bias", 0.0))


def _activate(gate: Doubles, kind: str) -> Doubles:
    share: Doubles
    if kind == "silu":
        share = 1 / (1 + np.exp(-gate))
    else:
        share = (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2
    return gate * share


def _heads(model: SmallModel, layer: dict[str, Any], name: str, rows: Doubles, rounded: Rounding) -> Doubles:
    """Project and split: [heads, tokens, head size]; queries and keys normed where the model does, and turned."""
    size = model.shape["head_size"]
    heads = _product(rows, layer, name, rounded).reshape(len(rows), -1, size).transpose(1, 0, 2)
    if name == "value":
        return rounded(heads)
    if f"{name}_norm" in layer:
        heads = _norm(heads, _vector(layer[f"{name}_norm"]), model.shape["norm_eps"])
    cosine, sine = (_vector(table[: len(rows)]) for table in (model.cosine, model.sine))
    first, second = heads[..., : size // 2], heads[..., size // 2 :]
    return rounded(np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1))


def _attend(model: SmallModel, layer: dict[str, Any], normed: Doubles, rounded: Rounding) -> Doubles:
    """Attention of one request, [tokens, heads * head size]."""
    shape = model.shape
    group = shape["num_heads"] // shape["num_kv_heads"]
    queries, keys, values = (_heads(model, layer, name, normed, rounded) for name in ("query", "key", "value"))
    keys, values = (np.repeat(heads, group, axis=0) for heads in (keys, values))
    scores = queries @ keys.transpose(0, 2, 1) / np.sqrt(shape["head_size"])
    if cap := shape["soft_cap"]:
        scores = cap * np.tanh(scores / cap)
    distance = np.subtract.outer(np.arange(len(normed)), np.arange(len(normed)))
    is_seen = (distance >= 0) & (distance < (shape["window"] or len(normed)))
    scores = np.where(is_seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended: Doubles = rounded(weights) @ values / weights.sum(axis=-1, keepdims=True)
    return attended.transpose(1, 0, 2).reshape(len(normed), -1)
