"""What the operations of a decoder need at least: bytes from memory and arithmetic, and so seconds.

Bytes are those that no cache can hold from one use to the next in a step: weights as they are stored, and KV.
Activations stay in the caches and are not counted, except where an operation does little else than move them.
Arithmetic is that of products; exponentials, divisions and the decoding of weights are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from giveway.runtime.model_config import ModelConfig

SMOLLM2_135M = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    max_positions=8192,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    tied_embeddings=True,
)


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most that this machine did: bytes read per second, and operations per second (a multiply-add is two)."""

    read_bytes_s: float
    operations_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What an operation cannot do without."""

    num_bytes: float
    num_operations: float

    def floor_s(self, peaks: Peaks) -> float:
        """Seconds that it takes at least: reading and arithmetic may overlap, so the longer of the two."""
        return max(self.num_bytes / peaks.read_bytes_s, self.num_operations / peaks.operations_s)

    def is_reading(self, peaks: Peaks) -> bool:
        """Whether reading is the longer of the two."""
        return self.num_bytes / peaks.read_bytes_s >= self.num_operations / peaks.operations_s


def product_cost(*, num_rows: int, num_outputs: int, num_inputs: int, weight_bytes: float) -> Cost:
    """Rows times a matrix that is stored in weight_bytes."""
    return Cost(weight_bytes, 2 * num_rows * num_outputs * num_inputs)


def attention_cost(shape: ModelConfig, *, num_rows: int, context: int, element_bytes: int) -> Cost:
    """Attention of one request in one layer: the last num_rows of `context` positions, each of all before it."""
    num_pairs = num_rows * context - num_rows * (num_rows - 1) // 2  # of a query and a position that it sees
    kv_bytes = context * 2 * shape.num_kv_heads * shape.head_size * element_bytes
    return Cost(kv_bytes, 4 * num_pairs * shape.query_columns)


def norm_cost(*, num_rows: int, size: int, element_bytes: int) -> Cost:
    """RMSNorm: rows of float32 come in, activations go out."""
    return Cost(num_rows * size * (4 + element_bytes), 4 * num_rows * size)


def rotation_cost(shape: ModelConfig, *, num_rows: int, element_bytes: int) -> Cost:
    """Rotation of queries and keys: float32 and angles come in, queries, keys and values go out."""
    num_turned = (shape.num_heads + shape.num_kv_heads) * shape.head_size
    read_bytes = 4 * (shape.qkv_columns + shape.head_size)
    return Cost(num_rows * (read_bytes + shape.qkv_columns * element_bytes), 3 * num_rows * num_turned)


def copy_cost(num_bytes: int) -> Cost:
    """A copy: everything is read once and written once."""
    return Cost(2 * num_bytes, 0)
