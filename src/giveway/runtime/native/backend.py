"""NativeBackend: the interface of `Backend` on the native kernels, without a tensor library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
from giveway_kernels import Model

from giveway.core.errors import ConfigError, DeviceFaultError, InvariantError
from giveway.core.ids import DeviceBlockId, HostBlockId
from giveway.runtime import memory
from giveway.runtime.backend import BatchSequence, MemoryPool, SequenceResult, TokenLogprobs
from giveway.runtime.batch_checks import check_batch
from giveway.runtime.native import COMPUTE_TYPES
from giveway.runtime.native.kv_storage import NativeKVStorage
from giveway.runtime.native.sampler import BatchSampler
from giveway.runtime.native.weights import load_model
from giveway.runtime.rope import make_rope_angles
from giveway.runtime.weights.checkpoint import Checkpoint

# Logits are computed for the rows that are sampled; more at once than this come only from prompt log-probabilities.
_LARGEST_HEAD_PIECE = 64


class NativeBackend:
    """A model on the CPU through giveway-kernels. Implements giveway.runtime.backend.Backend."""

    def __init__(self, checkpoint: Checkpoint, *, dtype: str, num_threads: int) -> None:
        """Pack the weights. dtype: "float32" or "bfloat16". Raises what the checkpoint raises."""
        self._config = checkpoint.config
        self._dtype = dtype
        self._num_threads = num_threads
        self._model: Model | None = load_model(checkpoint, compute=COMPUTE_TYPES[dtype], num_threads=num_threads)
        self._sampler = BatchSampler(num_threads)
        self._storage: NativeKVStorage | None = None
        self._logits: npt.NDArray[np.float32] = np.empty((0, self._model.logits_stride), np.float32)
        self._instruction_set = self._model.instruction_set

    @property
    def description(self) -> str:
        """One line for people: device, dtype, kernels, exact or not."""
        return f"cpu, {self._dtype}, native {self._instruction_set} exact"

    @property
    def device(self) -> str:
        """Where the pools are."""
        return "cpu"

    @property
    def is_exact(self) -> bool:
        """Always: no kernel lets a row depend on its neighbours."""
        return True

    @property
    def vocab_size(self) -> int:
        """Number of token ids that can be embedded."""
        return self._config.vocab_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes, all layers, K and V."""
        return self._config.kv_bytes_per_token(2 if self._dtype == "bfloat16" else 4)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of either pool."""
        return self._ready()[1].block_bytes

    @property
    def free_memory_bytes(self) -> int:
        """Bytes of memory that allocate() could use now; 0 where the system does not say.

        Pools that it would replace count as free.
        """
        free, storage = memory.available_bytes(), self._storage
        return (free or 0) if free is None or storage is None else free + storage.num_touched_bytes

    def allocate(self, *, num_device_blocks: int, num_host_blocks: int, block_size: int) -> None:
        """Allocate both pools; called again, replace them. They are touched in the background.

        Raises ConfigError if memory is short or the block size does not suit the kernels; there are no pools then.
        """
        if self._model is None:
            raise InvariantError("allocate() was called after close()")
        if block_size < 1 or block_size % 16:
            raise ConfigError(
                f"block_size is {block_size}; the native kernels need a multiple of 16 tokens. "
                "Set --block-size 16, or --backend torch."
            )
        self._drop_pools()  # before memory is counted: the new ones may need theirs
        self._storage = NativeKVStorage(
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            block_size=block_size,
            block_bytes=self._model.kv_block_bytes(block_size),
            num_threads=self._num_threads,
        )
        angles = make_rope_angles(self._config, self._num_positions(self._storage))
        self._model.set_angles(angles.cosine, angles.sine)

    def forward(self, batch: Sequence[BatchSequence]) -> list[SequenceResult]:
        """Write the KV of the batch, attend, and sample where asked; see Backend.forward."""
        model, storage = self._ready()
        first_rows = self._run(model, storage, batch)
        results = self._sample(model, batch, first_rows)
        return self._with_prompt_logprobs(model, batch, first_rows, results)

    def logits(self, batch: Sequence[BatchSequence]) -> npt.NDArray[np.float32]:
        """Run the forward pass and return the logits after every row, float32 [tokens, vocab]: for comparisons."""
        model, storage = self._ready()
        self._run(model, storage, batch)
        num_rows = sum(len(sequence.token_ids) for sequence in batch)
        return self._logits_of(model, range(num_rows)).copy()

    def copy_out(self, pairs: Sequence[tuple[DeviceBlockId, HostBlockId]]) -> None:
        """Copy whole blocks device -> host, synchronously. Raises DeviceFaultError."""
        self._ready()[1].copy_out(pairs)

    def copy_in(self, pairs: Sequence[tuple[HostBlockId, DeviceBlockId]]) -> None:
        """Copy whole blocks host -> device, synchronously. Raises DeviceFaultError."""
        self._ready()[1].copy_in(pairs)

    def copy_within(self, pairs: Sequence[tuple[DeviceBlockId, DeviceBlockId]]) -> None:
        """Copy whole blocks device -> device, one pair after another. Raises DeviceFaultError."""
        self._ready()[1].copy_within(pairs)

    def read_block(self, pool: MemoryPool, block: int) -> memoryview:
        """Return the bytes of one block, read-only; valid until the next call. Raises DeviceFaultError."""
        return self._ready()[1].read_block(pool, block)

    def write_block(self, pool: MemoryPool, block: int, content: memoryview) -> None:
        """Replace the bytes of one block. Raises DeviceFaultError, and then nothing was written."""
        self._ready()[1].write_block(pool, block, content)

    def close(self) -> None:
        """Release weights and pools; calling it again does nothing. The backend is not used afterwards."""
        self._model = None
        self._drop_pools()

    def _drop_pools(self) -> None:
        storage, self._storage = self._storage, None
        if storage is not None:
            storage.close()

    def _ready(self) -> tuple[Model, NativeKVStorage]:
        if self._model is None:
            raise InvariantError("the backend was used after close()")
        if self._storage is None:
            raise InvariantError("the backend was used before allocate()")
        return self._model, self._storage

    def _num_positions(self, storage: NativeKVStorage) -> int:
        """Positions that a request may have: none is longer than the pool."""
        return min(self._config.max_positions, storage.num_device_blocks * storage.block_size)

    def _run(self, model: Model, storage: NativeKVStorage, batch: Sequence[BatchSequence]) -> list[int]:
        """Compute a batch; returns the first row of each sequence."""
        counts = [len(sequence.token_ids) for sequence in batch]
        if not counts:
            return []
        tokens = chain.from_iterable(sequence.token_ids for sequence in batch)
        tables = chain.from_iterable(sequence.block_table for sequence in batch)
        try:
            model.run(
                tokens=np.fromiter(tokens, np.int32, sum(counts)),
                num_rows=np.array(counts, np.int64),
                starts=np.array([sequence.start for sequence in batch], np.int64),
                tables=np.fromiter(tables, np.int32),
                table_ends=np.cumsum([len(sequence.block_table) for sequence in batch], dtype=np.int64),
                pool=storage.device_bytes,
                num_blocks=storage.num_device_blocks,
                block_size=storage.block_size,
                num_threads=self._num_threads,
            )
        except (IndexError, OverflowError) as error:
            # The kernels have looked at every id before they wrote anything; this says whose it is.
            check_batch(
                batch,
                vocab_size=self.vocab_size,
                num_positions=self._num_positions(storage),
                num_blocks=storage.num_device_blocks,
                block_size=storage.block_size,
            )
            raise DeviceFaultError(f"the forward pass over {len(batch)} requests failed: {error}") from error
        except MemoryError as error:
            raise DeviceFaultError(f"no memory for a step of {sum(counts)} tokens") from error
        return [0, *accumulate(counts[:-1])]

    def _logits_of(self, model: Model, rows: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits after rows of the last step, float32 [rows, vocab]; valid until the next call."""
        if len(rows) > len(self._logits):
            self._logits = np.empty((len(rows), model.logits_stride), np.float32)
        model.logits(np.fromiter(rows, np.int64, len(rows)), self._logits, self._num_threads)
        return self._logits[: len(rows), : self.vocab_size]

    def _sample(self, model: Model, batch: Sequence[BatchSequence], first_rows: Sequence[int]) -> list[SequenceResult]:
        results = [SequenceResult()] * len(batch)
        sampled = [index for index, sequence in enumerate(batch) if sequence.sample is not None]
        if not sampled:
            return results
        logits = self._logits_of(model, [first_rows[index] + len(batch[index].token_ids) - 1 for index in sampled])
        samples = [sequence.sample for sequence in batch if sequence.sample is not None]
        for index, result in zip(sampled, self._sampler.sample(logits, samples), strict=True):
            results[index] = result
        return results

    def _with_prompt_logprobs(
        self,
        model: Model,
        batch: Sequence[BatchSequence],
        first_rows: Sequence[int],
        results: list[SequenceResult],
    ) -> list[SequenceResult]:
        for index, (sequence, first_row) in enumerate(zip(batch, first_rows, strict=True)):
            if sequence.num_prompt_logprobs is None or not sequence.next_token_ids:
                continue
            scored = self._score(model, sequence, first_row, sequence.num_prompt_logprobs)
            if results[index].fault is None:
                merged = replace(results[index], prompt_logprobs=scored.prompt_logprobs)
                results[index] = merged if scored.fault is None else scored
        return results

    def _score(self, model: Model, sequence: BatchSequence, first_row: int, num_top: int) -> SequenceResult:
        """Log-probabilities of the tokens after the rows of a chunk, or a fault."""
        entries: list[TokenLogprobs] = []
        for first in range(0, len(sequence.next_token_ids), _LARGEST_HEAD_PIECE):
            tokens = sequence.next_token_ids[first : first + _LARGEST_HEAD_PIECE]
            start = first_row + first
            scored = self._sampler.prompt_logprobs(
                self._logits_of(model, range(start, start + len(tokens))), tokens, num_top
            )
            if scored.fault is not None:
                return scored
            entries += scored.prompt_logprobs
        return SequenceResult(prompt_logprobs=tuple(entries))
