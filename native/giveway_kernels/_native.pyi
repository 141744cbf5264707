"""The compiled module.

Arrays are C-contiguous numpy arrays of just the type that is written here: any other raises TypeError, since what is
written to a converted copy would be lost, and so would numbers that do not fit. Only the rows of logits given to a
Sampler may lie apart. num_threads is from 1 to 1024; that and other numbers out of their range raise ValueError.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float32]
_Ids = npt.NDArray[np.int64]
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

def instruction_sets() -> list[tuple[str, str]]: ...
def chosen_instruction_set() -> str: ...

class Matrix:
    @staticmethod
    def pack(
        parts: list[tuple[str, _Bytes]],
        *,
        num_inputs: int,
        compute: str,
        is_interleaved: bool = False,
        num_threads: int = 1,
        isa: str = "",
    ) -> Matrix: ...
    @property
    def num_outputs(self) -> int: ...
    @property
    def num_inputs(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def encoding(self) -> str: ...

class Model:
    """Calls of several threads wait for each other.

    Logits are those of the last step, whoever ran it: who wants those of his own step keeps others from running one in
    between.
    """

    @staticmethod
    def make(
        shape: dict[str, Any],
        layers: list[dict[str, Matrix | _Floats]],
        *,
        embedding: Matrix,
        head: Matrix,
        final_norm: _Floats,
        isa: str = "",
    ) -> Model: ...
    def set_angles(self, cosine: _Floats, sine: _Floats) -> None:
        """Give the angles of all positions that can be computed from now on, [positions, head size / 2]."""

    def run(
        self,
        *,
        tokens: npt.NDArray[np.int32],
        num_rows: _Ids,
        starts: _Ids,
        tables: npt.NDArray[np.int32],
        table_ends: _Ids,
        pool: _Bytes,
        num_blocks: int,
        block_size: int,
        num_threads: int,
    ) -> None: ...
    def logits(self, rows: _Ids, out: _Floats, num_threads: int) -> None: ...
    def kv_block_bytes(self, block_size: int) -> int: ...
    @property
    def logits_stride(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def instruction_set(self) -> str: ...

def multiply(
    x: _Floats,
    matrix: Matrix,
    *,
    compute: str = "f32",
    isa: str = "",
    num_threads: int = 1,
    epilogue: str = "store",
    gate: str = "silu",
    bias: _Floats | None = None,
    onto: _Floats | None = None,
) -> _Floats: ...
def rms_norm(rows: _Floats, weight: _Floats, *, eps: float, compute: str = "f32", isa: str = "") -> _Floats: ...
def embed(table: Matrix, tokens: _Ids, *, isa: str = "") -> _Floats: ...
def attend(
    qkv: _Floats,
    table: npt.NDArray[np.int32],
    pool: _Bytes,
    *,
    start: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    cosine: _Floats,
    sine: _Floats,
    scale: float,
    query_norm: _Floats | None = None,
    key_norm: _Floats | None = None,
    norm_eps: float = 0.0,
    window: int = 0,
    soft_cap: float = 0.0,
    num_layers: int = 1,
    layer: int = 0,
    compute: str = "f32",
    isa: str = "",
) -> _Floats: ...
def multiply_peak(compute: str, *, isa: str = "", num_threads: int = 1, seconds: float = 0.005) -> float: ...
def read_peak(buffer: _Bytes, *, isa: str = "", num_threads: int = 1) -> float: ...

class Workload:
    @staticmethod
    def product(
        matrix: Matrix,
        *,
        num_rows: int,
        num_outputs: int,
        compute: str,
        epilogue: str = "store",
        isa: str = "",
    ) -> Workload: ...
    @staticmethod
    def attention(
        *,
        num_sequences: int,
        num_rows: int,
        context: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        compute: str,
        isa: str = "",
    ) -> Workload: ...
    @staticmethod
    def rotation(
        *,
        num_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        compute: str,
        isa: str = "",
    ) -> Workload: ...
    @staticmethod
    def norm(*, num_rows: int, size: int, compute: str, isa: str = "") -> Workload: ...
    def run(self, num_turns: int, *, num_threads: int = 1) -> float: ...

_Entry = tuple[float, int, tuple[tuple[int, float], ...]]

class Sampler:
    def __init__(self, num_threads: int) -> None: ...
    def choose_largest(self, logits: _Floats) -> tuple[list[int], list[int]]: ...
    def choose_tokens(self, logits: _Floats, **wishes: Any) -> tuple[list[int], list[int], list[_Entry | None]]: ...
    def score_tokens(self, logits: _Floats, tokens: list[int], num_top: int) -> tuple[list[int], list[_Entry]]: ...

def copy_blocks(source: _Bytes, target: _Bytes, pairs: _Ids, *, num_threads: int) -> None: ...
def copy_blocks_in_order(pool: _Bytes, pairs: _Ids) -> None: ...
