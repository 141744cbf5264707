"""A decoder with random weights, and whole steps of it: what a step takes does not depend on what the weights are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from giveway_kernels import Matrix, Model

from giveway.bench.kernel_floors import Cost, attention_cost, product_cost
from giveway.runtime.model_config import ModelConfig
from giveway.runtime.native.weights import model_shape

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

BLOCK_SIZE = 16
_STRIPE_ROWS = 256  # rows that are drawn; a matrix repeats them


def random_matrix(
    encoding: str,
    num_outputs: int,
    num_inputs: int,
    *,
    compute: str,
    isa: str = "",
    num_threads: int,
    is_interleaved: bool = False,
) -> Matrix:
    """Pack random weights stored as F32, BF16, Q8_0 or Q4_1, for one instruction set (empty: the chosen one).

    is_interleaved: as two halves, panels in turn.
    """
    stripe = _random_rows(encoding, num_inputs)
    num_parts = 2 if is_interleaved else 1
    rows = np.resize(stripe, (num_outputs // num_parts, stripe.shape[1]))
    return Matrix.pack(
        [(encoding, rows)] * num_parts,
        num_inputs=num_inputs,
        compute=compute,
        is_interleaved=is_interleaved,
        num_threads=num_threads,
        isa=isa,
    )


def _random_rows(encoding: str, num_inputs: int) -> _Bytes:
    """Stored rows of weights of the size that trained ones have, uint8 [rows, bytes of a row]."""
    rng = np.random.default_rng(11)
    if encoding in ("F32", "BF16"):
        values = rng.normal(0, num_inputs**-0.5, (_STRIPE_ROWS, num_inputs)).astype(np.float32)
        stored = values if encoding == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)
        return stored.view(np.uint8).reshape(_STRIPE_ROWS, -1)
    num_quants, largest = {"Q8_0": (32, 127.0), "Q4_1": (16, 7.5)}[encoding]
    blocks = (_STRIPE_ROWS, num_inputs // 32)
    scale = np.full((*blocks, 1), num_inputs**-0.5 / largest, np.float16)
    halves = [scale] if encoding == "Q8_0" else [scale, -scale * np.float16(largest)]
    quants = rng.integers(0, 256, (*blocks, num_quants), dtype=np.uint8)
    stored_blocks = np.concatenate([*(half.view(np.uint8) for half in halves), quants], axis=2)
    return stored_blocks.reshape(_STRIPE_ROWS, -1)


@dataclass(frozen=True, slots=True)
class Batch:
    """A step of some requests that are alike: the last num_rows of `context` tokens of each, one row of logits each."""

    num_requests: int
    num_rows: int
    context: int

    @property
    def num_blocks(self) -> int:
        """Blocks of all requests."""
        return self.num_requests * -(-self.context // BLOCK_SIZE)


class RandomDecoder:
    """Layers in Q4_1, embedding and head in Q8_0, as in the embedded model's file; a pool with room for any batch."""

    def __init__(
        self, shape: ModelConfig, batches: Sequence[Batch], *, compute: str, isa: str, num_threads: int
    ) -> None:
        self._shape, self._compute, self._isa, self._num_threads = shape, compute, isa, num_threads
        self._embedding = self._matrix("Q8_0", shape.vocab_size, shape.hidden_size)
        self._layers = [self._layer() for _ in range(shape.num_layers)]
        self._model = Model.make(
            model_shape(shape, compute),
            self._layers,
            embedding=self._embedding,
            head=self._embedding,
            final_norm=np.ones(shape.hidden_size, np.float32),
            isa=isa,
        )
        num_positions = max(batch.context for batch in batches)
        angles = np.ones((num_positions, shape.head_size // 2), np.float32)
        self._model.set_angles(angles * np.float32(0.8), angles * np.float32(0.6))
        self._num_blocks = max(batch.num_blocks for batch in batches)
        self._pool = np.empty(self._num_blocks * self.block_bytes, np.uint8)
        self._pool[:] = 0  # written, so that it is memory: what was never written is read from one cached page of zeros

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block of all layers."""
        return self._model.kv_block_bytes(BLOCK_SIZE)

    def _matrix(self, encoding: str, num_outputs: int, num_inputs: int, *, is_interleaved: bool = False) -> Matrix:
        return random_matrix(
            encoding,
            num_outputs,
            num_inputs,
            compute=self._compute,
            isa=self._isa,
            num_threads=self._num_threads,
            is_interleaved=is_interleaved,
        )

    def _layer(self) -> dict[str, Any]:
        shape = self._shape
        hidden, kv_columns = shape.hidden_size, shape.num_kv_heads * shape.head_size
        return {
            "input_norm": np.ones(hidden, np.float32),
            "post_norm": np.ones(hidden, np.float32),
            "query": self._matrix("Q4_1", shape.query_columns, hidden),
            "key": self._matrix("Q4_1", kv_columns, hidden),
            "value": self._matrix("Q4_1", kv_columns, hidden),
            "output": self._matrix("Q4_1", hidden, shape.query_columns),
            "gate_up": self._matrix("Q4_1", 2 * shape.intermediate_size, hidden, is_interleaved=True),
            "down": self._matrix("Q4_1", hidden, shape.intermediate_size),
        }

    def costs(self, batch: Batch) -> list[Cost]:
        """What the products and the attention of a step need."""
        num_rows = batch.num_requests * batch.num_rows
        matrices = [weight for layer in self._layers for weight in layer.values() if isinstance(weight, Matrix)]
        element_bytes = 2 if self._compute == "bf16" else 4
        one = attention_cost(self._shape, num_rows=batch.num_rows, context=batch.context, element_bytes=element_bytes)
        attention = Cost(one.num_bytes * batch.num_requests, one.num_operations * batch.num_requests)
        return [
            *(_product_cost(matrix, num_rows) for matrix in matrices),
            *([attention] * self._shape.num_layers),
            _product_cost(self._embedding, batch.num_requests),
        ]

    def stepper(self, batch: Batch) -> Callable[[int], float]:
        """Return a function that runs so many steps over the batch, all alike, and returns the seconds they took."""
        arrays, rows = self._arrays(batch), np.arange(batch.num_requests, dtype=np.int64)
        last_rows = (rows + 1) * batch.num_rows - 1
        logits = np.empty((batch.num_requests, self._model.logits_stride), np.float32)

        def run(num_turns: int) -> float:
            started = time.perf_counter()
            for _ in range(num_turns):
                self._model.run(**arrays)
                self._model.logits(last_rows, logits, self._num_threads)
            return time.perf_counter() - started

        return run

    def _arrays(self, batch: Batch) -> Mapping[str, Any]:
        count = batch.num_requests
        tokens: npt.NDArray[np.int64] = np.random.default_rng(3).integers(
            0, self._shape.vocab_size, count * batch.num_rows
        )
        return {
            "tokens": tokens.astype(np.int32),
            "num_rows": np.full(count, batch.num_rows, np.int64),
            "starts": np.full(count, batch.context - batch.num_rows, np.int64),
            "tables": np.arange(batch.num_blocks, dtype=np.int32),
            "table_ends": np.arange(1, count + 1, dtype=np.int64) * (batch.num_blocks // count),
            "pool": self._pool,
            "num_blocks": self._num_blocks,
            "block_size": BLOCK_SIZE,
            "num_threads": self._num_threads,
        }


def _product_cost(matrix: Matrix, num_rows: int) -> Cost:
    return product_cost(
        num_rows=num_rows,
        num_outputs=matrix.num_outputs,
        num_inputs=matrix.num_inputs,
        weight_bytes=matrix.num_bytes,
    )
