"""Every operation of the native kernels against its floor, measured in the same run.

A floor is the longer of two: the bytes that must come from memory at the rate at which this machine reads, and the
arithmetic at the rate of multiply-adds in registers (kernel_floors.py says what is counted). Both rates are measured
before each measurement of an operation, by the same threads; the best of them count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from giveway_kernels import (
    Matrix,
    Workload,
    copy_blocks,
    default_compute,
    instruction_sets,
    multiply_peak,
    read_peak,
)

from giveway.bench.kernel_floors import (
    SMOLLM2_135M,
    Cost,
    Peaks,
    attention_cost,
    copy_cost,
    norm_cost,
    product_cost,
    rotation_cost,
)
from giveway.bench.measure import Report, Sample, sample
from giveway.bench.random_decoder import BLOCK_SIZE, Batch, RandomDecoder, random_matrix
from giveway.core.errors import ConfigError
from giveway.runtime.model_config import ModelConfig
from giveway.runtime.native import COMPUTE_TYPES, choose_dtype
from giveway.runtime.threads import check_num_threads

_MIB = 1 << 20
_BLOCKS_COPIED = 32  # 512 tokens
_READ_BYTES = 16 * _MIB  # at a time, of what no cache holds
_MULTIPLY_S = 0.001
_PEAKS_AT_A_TIME = 4
_ROWS_MOVED = 8192  # of norms and rotations: more than the caches hold


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured."""

    shape: ModelConfig = SMOLLM2_135M
    row_counts: Sequence[int] = (1, 8, 64, 512)
    head_row_counts: Sequence[int] = (1, 8, 64)  # logits are made for rows that are sampled
    contexts: Sequence[int] = (512, 4096)
    batches: Sequence[Batch] = (Batch(1, 1, 64), Batch(64, 1, 64), Batch(1, 512, 512))
    moved_rows: int = _ROWS_MOVED
    measured_s: float = 0.01  # an operation is repeated until it has taken about this long
    large_bytes: int | None = None  # more than the last cache holds; None: found out

    @property
    def buffer_bytes(self) -> int:
        """Size of what is read from memory: eight times the last cache, from 64 to 512 MiB.

        Twice is not enough: a cache that keeps what falls out of the others still answers a part of the reads.
        """
        if self.large_bytes is not None:
            return self.large_bytes
        return min(max(8 * last_cache_bytes(), 64 * _MIB), 512 * _MIB)


FULL = Sizes()
QUICK = Sizes(row_counts=(1, 64), head_row_counts=(1,), contexts=(512,))


@dataclass(frozen=True, slots=True)
class Setting:
    """How it is computed."""

    isa: str  # an instruction set of giveway_kernels
    compute: str  # "f32" or "bf16"
    num_threads: int

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of KV."""
        return 2 if self.compute == "bf16" else 4

    @property
    def activation_bytes(self) -> int:
        """Bytes of an element of activations: sets without products of bfloat16 widen it."""
        return 2 if self.compute == "bf16" and default_compute(self.isa) == "bf16" else 4


def choose_setting(*, isa: str | None = None, dtype: str = "auto", num_threads: int) -> Setting:
    """Fill in what was left open. isa: None for what runs here by itself. dtype: as among the engine's options.

    Raises ConfigError when the instruction set is unknown or cannot run here, or the kernels do not compute in dtype.
    """
    check_num_threads(num_threads)
    why_not = dict(instruction_sets())
    usable = [name for name, reason in why_not.items() if not reason]
    isa = isa.lower() if isa else usable[-1]
    if isa not in usable:
        reason = why_not.get(isa, "there is no such instruction set")
        raise ConfigError(f"isa is {isa!r}: {reason}. This machine runs {', '.join(usable)}.")
    compute = default_compute(isa) if dtype == "auto" else COMPUTE_TYPES[choose_dtype(dtype)]
    return Setting(isa, compute, num_threads)


@dataclass(frozen=True, slots=True)
class Operation:
    """Something to measure."""

    name: str
    stored_as: str  # encoding of weights or KV
    num_rows: int
    costs: Sequence[Cost]  # of one turn; done one after the other
    run: Callable[[int], float]  # so many turns; returns seconds
    num_tokens: int = 0  # that a turn of a whole step puts forward


class PeakMeter:
    """Measures the peaks, again and again, each time for about a millisecond: others may want the core by then."""

    def __init__(self, setting: Setting, num_bytes: int) -> None:
        self._setting = setting
        size = min(num_bytes, _READ_BYTES)
        buffer = np.ones(num_bytes, np.uint8)
        self._parts = cycle([buffer[start : start + size] for start in range(0, num_bytes - size + 1, size)])
        self.read: list[float] = []  # bytes per second
        self.multiplied: list[float] = []  # operations per second

    def measure(self) -> None:
        """Take both peaks a few times."""
        isa, num_threads = self._setting.isa, self._setting.num_threads
        for _ in range(_PEAKS_AT_A_TIME):
            self.read.append(read_peak(next(self._parts), isa=isa, num_threads=num_threads))
            self.multiplied.append(
                multiply_peak(self._setting.compute, isa=isa, num_threads=num_threads, seconds=_MULTIPLY_S)
            )

    @property
    def best(self) -> Peaks:
        """The highest of all that were measured: whatever held up the others is no property of the machine."""
        return Peaks(max(self.read), max(self.multiplied))


def last_cache_bytes(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the largest cache of a core; 32 MiB where the system does not say."""
    sizes = []
    for file in caches.glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * 1024)
    return max(sizes, default=32 * _MIB)


def bench_kernels(setting: Setting, *, sizes: Sizes = FULL, num_rounds: int = 7) -> Report:
    """Measure everything in turn, num_rounds times; shares of the floor are medians of the rounds."""
    meter = PeakMeter(setting, sizes.buffer_bytes)
    decoder = RandomDecoder(
        sizes.shape, sizes.batches, compute=setting.compute, isa=setting.isa, num_threads=setting.num_threads
    )
    operations = [
        *_products(setting, sizes),
        *_attention(setting, sizes),
        *_moves(setting, sizes),
        _block_copy(setting, sizes, decoder.block_bytes),
        *_steps(sizes, decoder),
    ]
    turns = [_choose_turns(operation, sizes.measured_s) for operation in operations]
    taken_s: list[list[float]] = [[] for _ in operations]  # by a turn
    for number in range(num_rounds):
        order = range(len(operations))
        for index in order if number % 2 == 0 else reversed(order):
            meter.measure()
            taken_s[index].append(operations[index].run(turns[index]) / turns[index])
    return Report(
        "Kernels and their floors",
        _settings(setting, sizes, num_rounds, meter),
        [_row(operation, sample(times), meter.best) for operation, times in zip(operations, taken_s, strict=True)],
    )


def _choose_turns(operation: Operation, measured_s: float) -> int:
    turn_s = min(operation.run(1) for _ in range(3))  # the first touches memory and starts threads
    return max(1, min(10_000, round(measured_s / turn_s)))


def _products(setting: Setting, sizes: Sizes) -> Iterator[Operation]:
    shape = sizes.shape
    hidden, inner = shape.hidden_size, shape.intermediate_size
    products = [
        ("qkv", shape.qkv_columns, hidden, "store"),
        ("output", hidden, shape.query_columns, "add"),
        ("gate, up", 2 * inner, hidden, "gate"),
        ("down", hidden, inner, "add"),
    ]
    # What is multiplied as bfloat16 is stored as that.
    widest = ("BF16",) if setting.compute == "bf16" else ("BF16", "F32")
    for encoding in ("Q4_1", *widest):
        matrices = {
            num_inputs: _large_matrix(encoding, num_inputs, setting, sizes)
            for num_inputs in {hidden, shape.query_columns, inner}
        }
        for name, num_outputs, num_inputs, epilogue in products:
            for num_rows in sizes.row_counts:
                yield _product(setting, matrices[num_inputs], name, num_outputs, num_rows, epilogue)
    for encoding in ("Q8_0", *widest):
        matrix = _large_matrix(encoding, hidden, setting, sizes, num_outputs=shape.vocab_size)
        for num_rows in sizes.head_row_counts:
            yield _product(setting, matrix, "head", shape.vocab_size, num_rows, "store")


def _large_matrix(encoding: str, num_inputs: int, setting: Setting, sizes: Sizes, *, num_outputs: int = 1) -> Matrix:
    """Weights that no cache holds, of at least so many outputs; products take the next ones of them each time."""
    row_bytes = num_inputs * {"Q4_1": 20, "Q8_0": 34, "BF16": 64, "F32": 128}[encoding] // 32
    wanted = max(sizes.buffer_bytes // row_bytes, num_outputs, 2 * sizes.shape.intermediate_size)
    return random_matrix(
        encoding,
        -(-wanted // 32) * 32,
        num_inputs,
        compute=setting.compute,
        isa=setting.isa,
        num_threads=setting.num_threads,
    )


def _product(setting: Setting, matrix: Matrix, name: str, num_outputs: int, num_rows: int, epilogue: str) -> Operation:
    work = Workload.product(
        matrix,
        num_rows=num_rows,
        num_outputs=num_outputs,
        compute=setting.compute,
        epilogue=epilogue,
        isa=setting.isa,
    )
    cost = product_cost(
        num_rows=num_rows,
        num_outputs=num_outputs,
        num_inputs=matrix.num_inputs,
        weight_bytes=matrix.num_bytes * num_outputs / matrix.num_outputs,
    )
    title = f"{name} {num_outputs}x{matrix.num_inputs}"
    return Operation(title, matrix.encoding, num_rows, [cost], partial(work.run, num_threads=setting.num_threads))


def _attention(setting: Setting, sizes: Sizes) -> Iterator[Operation]:
    for context in sizes.contexts:
        one = attention_cost(sizes.shape, num_rows=1, context=context, element_bytes=setting.element_bytes)
        many = max(1, round(sizes.buffer_bytes / one.num_bytes))  # so that no cache holds their KV
        for name, num_requests, num_rows in (("decode", many, 1), ("prefill", 1, context)):
            work = Workload.attention(
                num_sequences=num_requests,
                num_rows=num_rows,
                context=context,
                num_heads=sizes.shape.num_heads,
                num_kv_heads=sizes.shape.num_kv_heads,
                head_size=sizes.shape.head_size,
                block_size=BLOCK_SIZE,
                compute=setting.compute,
                isa=setting.isa,
            )
            cost = attention_cost(sizes.shape, num_rows=num_rows, context=context, element_bytes=setting.element_bytes)
            costs = [Cost(cost.num_bytes * num_requests, cost.num_operations * num_requests)]
            run = partial(work.run, num_threads=setting.num_threads)
            yield Operation(f"attention, {name}, {context}", setting.compute, num_requests * num_rows, costs, run)


def _moves(setting: Setting, sizes: Sizes) -> Iterator[Operation]:
    """Yield norm and rotation, which do little else than move activations; here from memory."""
    shape, num_rows = sizes.shape, sizes.moved_rows
    norm = Workload.norm(num_rows=num_rows, size=shape.hidden_size, compute=setting.compute, isa=setting.isa)
    cost = norm_cost(num_rows=num_rows, size=shape.hidden_size, element_bytes=setting.activation_bytes)
    yield Operation("norm", "f32", num_rows, [cost], partial(norm.run, num_threads=setting.num_threads))
    rotation = Workload.rotation(
        num_rows=num_rows,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        block_size=BLOCK_SIZE,
        compute=setting.compute,
        isa=setting.isa,
    )
    cost = rotation_cost(shape, num_rows=num_rows, element_bytes=setting.activation_bytes)
    run = partial(rotation.run, num_threads=setting.num_threads)
    yield Operation("rotate, store KV", setting.compute, num_rows, [cost], run)


def _block_copy(setting: Setting, sizes: Sizes, block_bytes: int) -> Operation:
    """Copy whole blocks, scattered in both pools, others each time."""
    num_blocks = max(2 * _BLOCKS_COPIED, sizes.buffer_bytes // block_bytes)
    source, target = (np.zeros((num_blocks, block_bytes), np.uint8) for _ in range(2))
    source[:] = target[:] = 1  # written, so that both are memory before anything is measured
    rng = np.random.default_rng(5)
    pairs = np.stack([rng.permutation(num_blocks), rng.permutation(num_blocks)], axis=1)
    parts = cycle(
        np.ascontiguousarray(pairs[start : start + _BLOCKS_COPIED])
        for start in range(0, num_blocks - _BLOCKS_COPIED + 1, _BLOCKS_COPIED)
    )

    def run(num_turns: int) -> float:
        started = time.perf_counter()
        for _ in range(num_turns):
            copy_blocks(source, target, next(parts), num_threads=setting.num_threads)
        return time.perf_counter() - started

    name = f"copy of {_BLOCKS_COPIED} blocks"
    return Operation(name, setting.compute, _BLOCKS_COPIED * BLOCK_SIZE, [copy_cost(_BLOCKS_COPIED * block_bytes)], run)


def _steps(sizes: Sizes, decoder: RandomDecoder) -> Iterator[Operation]:
    for batch in sizes.batches:
        kind = f"prefill of {batch.num_rows}" if batch.num_rows > 1 else f"decode, batch {batch.num_requests}"
        num_rows = batch.num_requests * batch.num_rows
        yield Operation(
            f"whole step, {kind}", "q4_1, q8_0", num_rows, decoder.costs(batch), decoder.stepper(batch), num_rows
        )


def _row(operation: Operation, taken_s: Sample, peaks: Peaks) -> dict[str, Any]:
    floor_s = sum(cost.floor_s(peaks) for cost in operation.costs)
    reading_s = sum(cost.floor_s(peaks) for cost in operation.costs if cost.is_reading(peaks))
    row: dict[str, Any] = {
        "operation": operation.name,
        "stored_as": operation.stored_as,
        "rows": operation.num_rows,
        "us": 1e6 * taken_s.median,
        "spread_pct": taken_s.spread_pct,
        "gb_s": sum(cost.num_bytes for cost in operation.costs) / taken_s.median / 1e9,
        "gflop_s": sum(cost.num_operations for cost in operation.costs) / taken_s.median / 1e9,
        "floor_us": 1e6 * floor_s,
        "floor_is": "reading" if 2 * reading_s >= floor_s else "arithmetic",
        "share_pct": 100 * floor_s / taken_s.median,
    }
    if operation.num_tokens:
        row["tok_s"] = operation.num_tokens / taken_s.median
    return row


def _settings(setting: Setting, sizes: Sizes, num_rounds: int, meter: PeakMeter) -> dict[str, Any]:
    return {
        "kernels": version("giveway-kernels"),
        "isa": setting.isa,
        "compute": setting.compute,
        "threads": setting.num_threads,
        "rounds": num_rounds,
        "read_from_mib": round(sizes.buffer_bytes / _MIB),
        "read_peak_gb_s": round(max(meter.read) / 1e9, 1),
        "read_median_gb_s": round(median(meter.read) / 1e9, 1),
        "multiply_peak_gflop_s": round(max(meter.multiplied) / 1e9, 1),
        "multiply_median_gflop_s": round(median(meter.multiplied) / 1e9, 1),
    }
