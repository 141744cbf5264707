"""TorchBackend: the interface of `Backend` on PyTorch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from giveway.core.errors import DeviceFaultError, InvariantError
from giveway.core.ids import DeviceBlockId, HostBlockId
from giveway.runtime.backend import BatchSequence, MemoryPool, SampleInput, SequenceResult, TokenLogprobs
from giveway.runtime.batch_checks import check_batch
from giveway.runtime.block_shape import BlockShape
from giveway.runtime.pool_memory import check_sizes
from giveway.runtime.sampler import (
    all_forbidden_fault,
    choose_token,
    is_plain_greedy,
    not_finite_fault,
    token_logprobs,
)
from giveway.runtime.threads import check_num_threads
from giveway.runtime.torch.attention import Attention, BucketAttention, Chunk, attend_in_pieces, make_attention_shape
from giveway.runtime.torch.attention_fast import choose_fast_attention
from giveway.runtime.torch.exact_ops import silu_times
from giveway.runtime.torch.kv_storage import KVStorage, available_bytes
from giveway.runtime.torch.model import Model, build_row_batch, forward_hidden, logits_of, plain_silu_times
from giveway.runtime.torch.rope import make_rope_table
from giveway.runtime.torch.settings import choose_device, choose_dtype
from giveway.runtime.torch.weights import LARGEST_HEAD_PIECE, ModelWeights, load_weights
from giveway.runtime.weights.checkpoint import Checkpoint


class TorchBackend:
    """A model on CPU or CUDA through PyTorch. Implements giveway.runtime.backend.Backend."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        exact: bool | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Load the weights.

        dtype: "auto", "float32", "bfloat16" or "float16"; see settings.choose_dtype for "auto". exact: whether an
        answer is a function of its own tokens alone, bit for bit; None: on CPU yes, on CUDA no. num_threads: PyTorch's
        threads, for the whole process; None leaves them alone. Raises ConfigError, or what the checkpoint raises.
        """
        check_num_threads(num_threads)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._config = checkpoint.config
        self._device = choose_device(device)
        self._dtype = choose_dtype(dtype, self._device, checkpoint.config)
        self._exact = self._device.type == "cpu" if exact is None else exact
        with torch.inference_mode():
            self._weights: ModelWeights | None = load_weights(
                checkpoint, device=self._device, dtype=self._dtype, exact=self._exact
            )
            self._attention = self._choose_attention()
        self._storage: KVStorage | None = None
        self._model: Model | None = None

    def _choose_attention(self) -> Attention:
        shape = make_attention_shape(self._config, self._device, exact=self._exact)
        if self._exact:
            return BucketAttention(shape, self._dtype, attend_bucket=attend_in_pieces, name="PyTorch")
        return choose_fast_attention(shape, self._device, self._dtype)

    @property
    def description(self) -> str:
        """One line for people: device, dtype, kernels, exact or not."""
        promise = "exact" if self._exact else "not exact: answers may depend on the batch"
        name = str(self._dtype).removeprefix("torch.")
        return f"{self._device.type}, {name}, {self._attention.name} {promise}".replace(" not exact", ", not exact")

    @property
    def device(self) -> str:
        """Where the pools are: "cpu" or "cuda"."""
        return self._device.type

    @property
    def is_exact(self) -> bool:
        """Whether only products and attention shown to be exact are used."""
        return self._exact

    @property
    def vocab_size(self) -> int:
        """Number of token ids that can be embedded."""
        return self._config.vocab_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes, all layers, K and V."""
        return self._config.kv_bytes_per_token(self._dtype.itemsize)

    @property
    def free_memory_bytes(self) -> int:
        """Bytes of memory that allocate() could use on the device now; 0 where the system does not say.

        Pools that it would replace count as free.
        """
        free = available_bytes(self._device)
        storage = self._storage
        if free is None or storage is None:
            return free or 0
        if self._device.type != "cpu":
            return free + storage.num_device_bytes
        # Both pools lie in that memory; what is not touched yet is free already.
        return free + storage.num_device_bytes + storage.num_host_bytes - storage.num_pending_bytes

    def allocate(self, *, num_device_blocks: int, num_host_blocks: int, block_size: int) -> None:
        """Allocate both pools; called again, replace them. Pools in main memory are touched in the background.

        Raises ConfigError if memory is short; there are no pools then.
        """
        if self._weights is None:
            raise InvariantError("allocate() was called after close()")
        check_sizes(num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks, block_size=block_size)
        self._drop_pools()  # before memory is counted: the new ones may need theirs
        config = self._config
        shape = BlockShape(config.num_layers, block_size, config.num_kv_heads, config.head_size)
        self._storage = KVStorage(
            shape,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            dtype=self._dtype,
            device=self._device,
        )
        self._model = Model(
            config=config,
            weights=self._weights,
            # No request can be longer than the pool.
            rope=make_rope_table(config, min(config.max_positions, num_device_blocks * block_size), self._device),
            attention=self._attention,
            gate=silu_times if self._exact else plain_silu_times,
            dtype=self._dtype,
        )

    def forward(self, batch: Sequence[BatchSequence]) -> list[SequenceResult]:
        """Write the KV of the batch, attend, and sample where asked; see Backend.forward."""
        model, storage = self._ready()
        chunks = self._check(batch, model, storage)
        if not batch:
            return []
        tokens = [token for sequence in batch for token in sequence.token_ids]
        try:
            with torch.inference_mode():
                hidden = forward_hidden(model, build_row_batch(model, tokens, chunks, storage), storage)
                results = self._sample(model, hidden, batch, chunks)
                return self._with_prompt_logprobs(model, hidden, batch, chunks, results)
        except RuntimeError as error:
            raise DeviceFaultError(
                f"the forward pass over {len(tokens)} tokens of {len(batch)} requests failed on {self._device}: {error}"
            ) from error

    def logits(self, batch: Sequence[BatchSequence]) -> Tensor:
        """Run the forward pass and return the logits after every row, float32 [tokens, vocab]: for comparisons."""
        model, storage = self._ready()
        chunks = self._check(batch, model, storage)
        tokens = [token for sequence in batch for token in sequence.token_ids]
        with torch.inference_mode():
            hidden = forward_hidden(model, build_row_batch(model, tokens, chunks, storage), storage)
            return logits_of(model, hidden[: len(tokens)])

    def copy_out(self, pairs: Sequence[tuple[DeviceBlockId, HostBlockId]]) -> None:
        """Copy whole blocks device -> host, synchronously. Raises DeviceFaultError."""
        self._ready()[1].copy_out(pairs)

    def copy_in(self, pairs: Sequence[tuple[HostBlockId, DeviceBlockId]]) -> None:
        """Copy whole blocks host -> device, synchronously. Raises DeviceFaultError."""
        self._ready()[1].copy_in(pairs)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of either pool."""
        return self._ready()[1].block_bytes

    def copy_within(self, pairs: Sequence[tuple[DeviceBlockId, DeviceBlockId]]) -> None:
        """Copy whole blocks device -> device, (source, target) each, one pair after another, synchronously.

        Raises DeviceFaultError.
        """
        self._ready()[1].copy_within(pairs)

    def read_block(self, pool: MemoryPool, block: int) -> memoryview:
        """Return the bytes of one block, read-only; valid until the next call. Raises DeviceFaultError."""
        return self._ready()[1].read_block(pool, block)

    def write_block(self, pool: MemoryPool, block: int, content: memoryview) -> None:
        """Replace the bytes of one block. Raises DeviceFaultError, and then nothing was written."""
        self._ready()[1].write_block(pool, block, content)

    def close(self) -> None:
        """Release weights and pools; calling it again does nothing. The backend is not used afterwards."""
        self._weights = None
        self._drop_pools()

    def _drop_pools(self) -> None:
        """Give the memory of the pools back, to the system as well."""
        storage, self._storage, self._model = self._storage, None, None
        if storage is not None:
            storage.close()  # also for those who still hold it, such as the frames of a stored exception
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _ready(self) -> tuple[Model, KVStorage]:
        if self._weights is None:
            raise InvariantError("the backend was used after close()")
        if self._model is None or self._storage is None:
            raise InvariantError("the backend was used before allocate()")
        return self._model, self._storage

    def _check(self, batch: Sequence[BatchSequence], model: Model, storage: KVStorage) -> list[Chunk]:
        """Check every id before anything is written; returns the rows of each sequence."""
        check_batch(
            batch,
            vocab_size=self.vocab_size,
            num_positions=model.rope.num_positions,
            num_blocks=storage.num_device_blocks,
            block_size=storage.shape.block_size,
        )
        first_rows = [0, *accumulate(len(sequence.token_ids) for sequence in batch)]
        return [
            Chunk(first_row, len(sequence.token_ids), sequence.start, sequence.block_table)
            for first_row, sequence in zip(first_rows, batch, strict=False)
        ]

    def _sample(
        self, model: Model, hidden: Tensor, batch: Sequence[BatchSequence], chunks: Sequence[Chunk]
    ) -> list[SequenceResult]:
        results = [SequenceResult()] * len(batch)
        sampled = [index for index, sequence in enumerate(batch) if sequence.sample is not None]
        if not sampled:
            return results
        last = torch.tensor([chunks[index].first_row + chunks[index].num_rows - 1 for index in sampled])
        logits = logits_of(model, hidden.index_select(0, last.to(self._device)))
        # Few transfers, because each one waits for the device: two values a row, then all rows that are needed.
        is_finite = torch.isfinite(logits).all(-1)
        best, usable = torch.stack([logits.argmax(-1), is_finite.long()]).tolist()  # argmax: the first of equal ones
        samples = [(row, sample) for row, index in enumerate(sampled) if (sample := batch[index].sample) is not None]
        host_rows = _to_host(logits, [row for row, sample in samples if usable[row] and not _is_argmax_enough(sample)])
        for row, sample in samples:
            if not usable[row]:
                result = SequenceResult(fault=_fault_of(logits[row]))
            elif row in host_rows:
                result = _sampled(sample, host_rows[row])
            else:
                result = SequenceResult(token_id=best[row])
            results[sampled[row]] = result
        return results

    def _with_prompt_logprobs(
        self,
        model: Model,
        hidden: Tensor,
        batch: Sequence[BatchSequence],
        chunks: Sequence[Chunk],
        results: list[SequenceResult],
    ) -> list[SequenceResult]:
        for index, (sequence, chunk) in enumerate(zip(batch, chunks, strict=True)):
            if sequence.num_prompt_logprobs is None or not sequence.next_token_ids:
                continue
            entries: list[TokenLogprobs] = []
            fault = results[index].fault
            for first in range(0, len(sequence.next_token_ids), LARGEST_HEAD_PIECE):
                tokens = sequence.next_token_ids[first : first + LARGEST_HEAD_PIECE]
                start = chunk.first_row + first
                logits = logits_of(model, hidden[start : start + len(tokens)])
                if not bool(torch.isfinite(logits).all()):
                    fault = _fault_of(logits)
                    break
                rows = logits.cpu().numpy()
                top = sequence.num_prompt_logprobs
                entries += [token_logprobs(row, token, top) for row, token in zip(rows, tokens, strict=True)]
            old = results[index]
            results[index] = (
                SequenceResult(fault=fault)
                if fault
                else SequenceResult(token_id=old.token_id, logprobs=old.logprobs, prompt_logprobs=tuple(entries))
            )
        return results


def _is_argmax_enough(sample: SampleInput) -> bool:
    return is_plain_greedy(sample) and sample.params.logprobs is None


def _to_host(logits: Tensor, rows: Sequence[int]) -> dict[int, npt.NDArray[np.float32]]:
    """Bring these rows of logits [rows, vocab] to the host in one transfer."""
    if not rows:
        return {}
    if logits.device.type == "cpu":
        return {row: logits[row].numpy() for row in rows}
    picked = logits.index_select(0, torch.tensor(rows).to(logits.device)).cpu().numpy()
    return dict(zip(rows, picked, strict=True))


def _sampled(sample: SampleInput, row: npt.NDArray[np.float32]) -> SequenceResult:
    """Choose the token of one sequence. row: its logits [vocab], finite."""
    token = choose_token(row, sample)
    if token is None:
        return SequenceResult(fault=all_forbidden_fault(len(row), sample))
    if sample.params.logprobs is None:
        return SequenceResult(token_id=token)
    return SequenceResult(token_id=token, logprobs=token_logprobs(row, token, sample.params.logprobs))


def _fault_of(logits: Tensor) -> str:
    is_wrong = ~torch.isfinite(logits)
    return not_finite_fault(int(is_wrong.sum()), logits.numel())
