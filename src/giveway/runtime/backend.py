"""The one interface between the engine and tensors. Each backend is a subpackage that implements `Backend`.

Everything that crosses it is plain Python: lists of integers in, token ids and floats out. No tensor leaves a backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from giveway.core.constraint import TokenMask
from giveway.core.ids import BlockTable, DeviceBlockId, HostBlockId, RequestId, TokenId
from giveway.core.plan import TokenLogprobs
from giveway.core.sampling import SamplingParams

__all__ = ["Backend", "BatchSequence", "MemoryPool", "SampleInput", "SequenceResult", "TokenLogprobs"]


class MemoryPool(Enum):
    """A pool of KV blocks that a backend holds in memory."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class SampleInput:
    """How to choose the next token after the last row of one sequence of the batch."""

    params: SamplingParams  # temperature and top_p are resolved: never None here
    seed: int  # resolved; the random number is a function of (seed, output_index) alone
    output_index: int  # index of the token to be chosen among the output tokens
    prompt_token_ids: Sequence[TokenId]
    output_token_ids: Sequence[TokenId]  # everything generated so far, also before a preemption
    forbidden: Sequence[TokenId] = ()  # tokens with zero probability here: min_tokens, the end of a bad word
    allowed: TokenMask | None = None  # all others have zero probability too: the grammar. None: there is none


@dataclass(frozen=True, slots=True)
class BatchSequence:
    """The tokens of one request in this forward pass: one for a decode, a slice of the prompt for a prefill chunk."""

    request_id: RequestId
    token_ids: Sequence[TokenId]  # [num_tokens]
    start: int  # position of the first token; positions run on from here
    block_table: BlockTable  # covers start + num_tokens tokens
    sample: SampleInput | None = None  # None: the chunk does not end the known tokens, nothing is sampled
    # k: log-probabilities of the tokens *after* each position of this chunk. next_token_ids[i] stands at start + i + 1;
    # it is shorter than the chunk by one when the chunk holds the last prompt token.
    num_prompt_logprobs: int | None = None
    next_token_ids: Sequence[TokenId] = ()
    fault: str | None = None  # why nothing can be sampled although something should be; harms this request only


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What the forward pass gave for one sequence, in the order of the batch."""

    token_id: TokenId | None = None  # None: nothing was to be sampled, or `fault` says why not
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = field(default=())
    fault: str | None = None  # for example "logits are not finite": harms this request only


class Backend(Protocol):
    """A model on a device, with its two pools of KV blocks."""

    @property
    def description(self) -> str:
        """One line for people: device, dtype, kernels, exact or not."""

    @property
    def device(self) -> str:
        """Where the device pool is: "cpu", "cuda" or "dry"."""

    @property
    def is_exact(self) -> bool:
        """Whether an answer depends on its own tokens alone, bit for bit, never on batch mates or chunking."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids that can be embedded."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes, all layers, K and V."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of either pool as read_block gives it; known once `allocate` was called."""

    @property
    def free_memory_bytes(self) -> int:
        """Bytes of memory that are free for KV pools on the device now; 0 where the system does not say.

        Pools that `allocate` would replace count as free.
        """

    def allocate(self, *, num_device_blocks: int, num_host_blocks: int, block_size: int) -> None:
        """Allocate and touch both pools. Called before anything else; called again, it replaces them.

        Raises ConfigError if memory is short.
        """

    def forward(self, batch: Sequence[BatchSequence]) -> list[SequenceResult]:
        """Write the KV of every token of the batch, attend, and sample where asked.

        Every layer writes all K and V of the batch before any attention of that layer reads. A non-finite logit is a
        `fault` of its sequence. Anything else that goes wrong raises DeviceFaultError; KV slots of this batch are
        then of unknown content.
        """

    def copy_out(self, pairs: Sequence[tuple[DeviceBlockId, HostBlockId]]) -> None:
        """Copy whole blocks device -> host, synchronously. Raises DeviceFaultError."""

    def copy_in(self, pairs: Sequence[tuple[HostBlockId, DeviceBlockId]]) -> None:
        """Copy whole blocks host -> device, synchronously. Raises DeviceFaultError."""

    def read_block(self, pool: MemoryPool, block: int) -> memoryview:
        """Return the content of one block, for tiers outside the backend: format "B", contiguous, block_bytes long.

        A view of the pool where that is possible, so valid only until the next call of any method. Raises
        DeviceFaultError if the pool has no such block or the device fails.
        """

    def write_block(self, pool: MemoryPool, block: int, content: memoryview) -> None:
        """Make `content` (format "B", contiguous, block_bytes long) the content of one block.

        It may be read-only, and is not kept: it has been copied when this returns. Raises DeviceFaultError if the pool
        has no such block or the device fails.
        """

    def copy_within(self, pairs: Sequence[tuple[DeviceBlockId, DeviceBlockId]]) -> None:
        """Copy whole blocks (source, target) on the device, before anything that follows. Raises DeviceFaultError."""

    def close(self) -> None:
        """Release weights and pools. The backend is not used afterwards."""
