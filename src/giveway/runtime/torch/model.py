"""The forward pass of the Llama, Mistral, Qwen2 and Qwen3 families, as plain functions over the weights.

The residual stream, norms, rotation and softmax are float32 whatever the compute dtype; products and KV have the
compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from giveway.runtime.model_config import ModelConfig
from giveway.runtime.torch.attention import Attention, Chunk
from giveway.runtime.torch.exact_ops import run_in_pieces
from giveway.runtime.torch.kv_storage import KVStorage
from giveway.runtime.torch.rope import RopeTable, turn
from giveway.runtime.torch.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model: geometry, weights and the ways to compute that fit device and exactness."""

    config: ModelConfig
    weights: ModelWeights
    rope: RopeTable
    attention: Attention
    gate: Callable[[Tensor, Tensor], Tensor]  # silu(gate) * up
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The tokens of a batch as rows, padded to a row count that the products admit."""

    num_rows: int  # without padding
    token_ids: npt.NDArray[np.int64]  # [padded rows]
    cosine: Tensor  # [padded rows, 1, head_size]
    sine: Tensor
    write_rows: Tensor  # [num_rows] rows of KVStorage.token_rows
    attention_plan: object


def plain_silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up with the library's own silu: fast, and not exact."""
    return silu(gate) * up


def build_row_batch(model: Model, token_ids: Sequence[int], chunks: Sequence[Chunk], storage: KVStorage) -> RowBatch:
    """Lay out a batch as rows. token_ids: of all chunks, one after another. Every value has been checked before."""
    num_rows, counts = len(token_ids), model.weights.row_counts
    padded = num_rows if counts is None else counts.padded(num_rows)
    ids, positions = np.zeros(padded, np.int64), np.zeros(padded, np.int64)
    ids[:num_rows] = token_ids
    block_size = storage.shape.block_size
    block_rows = storage.shape.num_layers * 2 * block_size
    write_rows = np.empty(num_rows, np.int64)
    for chunk in chunks:
        rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
        span = np.arange(chunk.start, chunk.start + chunk.num_rows)
        first_block = chunk.start // block_size
        table = np.array(chunk.table[first_block : (span[-1] // block_size) + 1], np.int64)
        positions[rows] = span
        write_rows[rows] = table[span // block_size - first_block] * block_rows + span % block_size
    device = storage.device
    where = torch.from_numpy(positions).to(device)
    return RowBatch(
        num_rows=num_rows,
        token_ids=ids,
        cosine=model.rope.cosine.index_select(0, where),
        sine=model.rope.sine.index_select(0, where),
        write_rows=torch.from_numpy(write_rows).to(device),
        attention_plan=model.attention.plan(chunks, padded, storage),
    )


def forward_hidden(model: Model, batch: RowBatch, storage: KVStorage) -> Tensor:
    """Run all layers, writing the KV of every row; returns the state [padded rows, hidden] before the last norm."""
    hidden = model.weights.embedding(batch.token_ids)
    for index, layer in enumerate(model.weights.layers):
        hidden = hidden.add_(_attention_block(model, layer, index, hidden, batch, storage))
        hidden = hidden.add_(_feed_forward(model, layer, hidden))
    return hidden


def logits_of(model: Model, hidden: Tensor) -> Tensor:
    """Return logits, float32 [rows, vocab], of hidden states [rows, hidden] picked from forward_hidden's result."""
    counts, num_rows = model.weights.head_row_counts, hidden.shape[0]
    if counts is not None and (missing := counts.padded(num_rows) - num_rows):
        hidden = torch.cat([hidden, hidden[-1:].expand(missing, -1)])
    normed = _norm(model, hidden, model.weights.final_norm)
    return run_in_pieces(model.weights.head, normed, counts)[:num_rows].float()


def _attention_block(
    model: Model, layer: LayerWeights, index: int, hidden: Tensor, batch: RowBatch, storage: KVStorage
) -> Tensor:
    config, counts = model.config, model.weights.row_counts
    num_turned = config.num_heads + config.num_kv_heads
    projected = run_in_pieces(layer.qkv, _norm(model, hidden, layer.input_norm), counts)
    projected = projected.view(hidden.shape[0], -1, config.head_size)
    heads = projected[:, :num_turned]
    if layer.qk_norm is not None:
        heads = rms_norm(heads.float(), (config.head_size,), None, config.rms_norm_eps) * layer.qk_norm
    heads = turn(heads, batch.cosine, batch.sine).to(model.dtype)
    for which, new in ((0, heads[:, config.num_heads :]), (1, projected[:, num_turned:])):
        storage.token_rows(index, which).index_copy_(0, batch.write_rows, new[: batch.num_rows].flatten(1))
    attended = model.attention.attend(heads, index, batch.attention_plan, storage)
    return run_in_pieces(layer.output, attended, counts)


def _feed_forward(model: Model, layer: LayerWeights, hidden: Tensor) -> Tensor:
    counts = model.weights.row_counts
    gate, up = run_in_pieces(layer.gate_up, _norm(model, hidden, layer.post_norm), counts).chunk(2, -1)
    return run_in_pieces(layer.down, model.gate(gate, up).to(model.dtype), counts)


def _norm(model: Model, hidden: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(hidden, weight.shape, weight, model.config.rms_norm_eps).to(model.dtype)
