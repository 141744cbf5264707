"""A decoder small enough to follow by hand, with sizes that fill no panel: for the whole step and its reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from giveway_kernels import Matrix, Model

from giveway.runtime.weights.checkpoint import Encoding, RawTensor
from giveway.runtime.weights.dequantize import dequantize

Floats = npt.NDArray[np.float32]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

SHAPE: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_size": 16,
    "norm_eps": 1e-5,
    "window": 0,
    "soft_cap": 0.0,
    "gate": "silu",
}
NUM_POSITIONS = 160


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix as a file stores it, and its values."""

    tensor: RawTensor
    values: Floats  # [outputs, inputs]


@dataclass(frozen=True, slots=True)
class SmallModel:
    """Random weights by the names that Model.make knows; gate and up apart."""

    shape: dict[str, Any]
    layers: list[dict[str, Stored | Floats]]
    embedding: Stored
    head: Stored
    final_norm: Floats
    cosine: Floats
    sine: Floats

    def pack(self, *, compute: str, isa: str) -> Model:
        """Build the model of the kernels."""
        model = Model.make(
            {**self.shape, "compute": compute},
            [_packed_layer(layer, compute, isa) for layer in self.layers],
            embedding=_packed([self.embedding], compute, isa),
            head=_packed([self.head], compute, isa),
            final_norm=self.final_norm,
            isa=isa,
        )
        model.set_angles(self.cosine, self.sine)
        return model


def _packed(parts: Sequence[Stored], compute: str, isa: str, *, is_interleaved: bool = False) -> Matrix:
    return Matrix.pack(
        [(part.tensor.encoding.name, part.tensor.data) for part in parts],
        num_inputs=parts[0].values.shape[1],
        compute=compute,
        is_interleaved=is_interleaved,
        isa=isa,
    )


def _packed_layer(layer: dict[str, Stored | Floats], compute: str, isa: str) -> dict[str, Matrix | Floats]:
    packed: dict[str, Matrix | Floats] = {}
    for name, weight in layer.items():
        if isinstance(weight, Stored):
            packed[name] = _packed([weight], compute, isa)
        else:
            packed[name] = weight
    gate, up = layer["gate"], layer["up"]
    assert isinstance(gate, Stored)
    assert isinstance(up, Stored)
    del packed["gate"], packed["up"]
    packed["gate_up"] = _packed([gate, up], compute, isa, is_interleaved=True)
    return packed


def stored(values: Floats, encoding: Encoding = Encoding.F32) -> Stored:
    """Store values [outputs, inputs] as F32, BF16 (cut off) or Q8_0 (one scale for each 32, rounded)."""
    outputs, inputs = values.shape
    data: npt.NDArray[Any]
    if encoding is Encoding.F32:
        data = values
    elif encoding is Encoding.BF16:
        data = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        blocks = values.reshape(outputs, inputs // 32, 32)
        scales = (np.abs(blocks).max(axis=2, keepdims=True) / 127).astype(np.float16)
        quants = np.rint(blocks / scales).astype(np.int8)
        data = np.concatenate([scales.view(np.uint8), quants.view(np.uint8)], axis=2)
    rows = np.ascontiguousarray(data).view(np.uint8).reshape(outputs, -1)
    tensor = RawTensor("w", encoding, values.shape, rows)
    return Stored(tensor, dequantize(tensor))


def make_small_model(
    seed: int = 5, *, has_biases: bool = False, has_head_norms: bool = False, **changes: Any
) -> SmallModel:
    """Draw the weights of a model of SHAPE with changes. Head and embedding are two matrices."""
    rng = np.random.default_rng(seed)
    shape = {**SHAPE, **changes}
    hidden, inner, size = shape["hidden_size"], shape["intermediate_size"], shape["head_size"]
    columns = {"query": shape["num_heads"] * size}
    columns["key"] = columns["value"] = shape["num_kv_heads"] * size

    def matrix(outputs: int, inputs: int, encoding: Encoding = Encoding.F32) -> Stored:
        return stored(rng.normal(0, 1.5 / inputs**0.5, (outputs, inputs)).astype(np.float32), encoding)

    def vector(length: int, mean: float = 0.0) -> Floats:
        return rng.normal(mean, 0.3, length).astype(np.float32)

    layers = []
    for _ in range(shape["num_layers"]):
        layer: dict[str, Stored | Floats] = {"input_norm": vector(hidden, 1), "post_norm": vector(hidden, 1)}
        for name, outputs in columns.items():
            layer[name] = matrix(outputs, hidden, Encoding.BF16 if name == "key" else Encoding.F32)
            if has_biases:
                layer[f"{name}_bias"] = vector(outputs)
            if has_head_norms and name != "value":
                layer[f"{name}_norm"] = vector(size, 1)
        layer["output"] = matrix(hidden, columns["query"], Encoding.Q8_0)
        if has_biases:
            layer["output_bias"] = vector(hidden)
        layer |= {"gate": matrix(inner, hidden), "up": matrix(inner, hidden), "down": matrix(hidden, inner)}
        layers.append(layer)
    angles = np.outer(np.arange(NUM_POSITIONS), 100.0 ** (-np.arange(0, size, 2) / size))
    return SmallModel(
        shape,
        layers,
        embedding=matrix(shape["vocab_size"], hidden),
        head=matrix(shape["vocab_size"], hidden),
        final_norm=vector(hidden, 1),
        cosine=np.cos(angles).astype(np.float32),
        sine=np.sin(angles).astype(np.float32),
    )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one request in a step."""

    tokens: Sequence[int]
    start: int  # position of the first one
    table: Sequence[int]  # blocks from position 0 on


@dataclass(slots=True)
class Runner:
    """A packed model with a pool of its own. Blocks hold NaN, whatever the type, until they are written."""

    model: Model
    num_blocks: int = 24
    block_size: int = 16
    num_threads: int = 1
    pool: Bytes = field(init=False)

    def __post_init__(self) -> None:
        num_bytes = self.num_blocks * self.model.kv_block_bytes(self.block_size)
        self.pool = np.full(num_bytes, 0xFF, np.uint8)

    def run(self, *chunks: Chunk) -> None:
        """Compute a step."""
        self.model.run(
            tokens=np.array([token for chunk in chunks for token in chunk.tokens], np.int32),
            num_rows=np.array([len(chunk.tokens) for chunk in chunks], np.int64),
            starts=np.array([chunk.start for chunk in chunks], np.int64),
            tables=np.array([block for chunk in chunks for block in chunk.table], np.int32),
            table_ends=np.cumsum([len(chunk.table) for chunk in chunks], dtype=np.int64),
            pool=self.pool,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_threads=self.num_threads,
        )

    def logits(self, *chunks: Chunk) -> Floats:
        """Compute a step; returns the logits after all its rows, float32 [rows, vocab]."""
        self.run(*chunks)
        num_rows = sum(len(chunk.tokens) for chunk in chunks)
        out = np.empty((num_rows, self.model.logits_stride), np.float32)
        self.model.logits(np.arange(num_rows, dtype=np.int64), out, self.num_threads)
        return out[:, : SHAPE["vocab_size"]]
