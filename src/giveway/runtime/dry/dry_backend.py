"""The whole engine without a model: KV slots that remember what they stand for, and tokens computed from them.

Every slot of every tier holds the token written there and the hash of the prefix that ends with it. A forward pass
reads the whole context back through the block table and checks the chain, so one wrong block, one lost copy or one
block handed out too early is an InvariantError; and the next token is a function of the hash *read back*, so nothing
can hide. Only the tensor math is replaced: plan, batch, copies and commit are those of a real model.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from giveway.core.constraint import is_allowed
from giveway.core.errors import DeviceFaultError, InvariantError
from giveway.core.ids import DeviceBlockId, HostBlockId, TokenId
from giveway.core.plan import TokenLogprobs
from giveway.runtime.backend import BatchSequence, MemoryPool, SampleInput, SequenceResult

PrefixHash = int

_START: PrefixHash = 17
_UNWRITTEN = -1
_SLOT_BYTES = 2 * 8  # a block outside the pools: its tokens, then its hashes, signed integers of 64 bits


def extend(prefix: PrefixHash, token_id: TokenId) -> PrefixHash:
    """Hash of a prefix that is one token longer. Tuples of integers hash alike in every process."""
    return hash((prefix, token_id))


def choose_token(prefix: PrefixHash, vocab_size: int, sample: SampleInput) -> TokenId:
    """Return the next token: a function of the context alone (greedy), or of context, seed and index (sampling).

    Raises InvariantError when every token is forbidden; see is_nothing_allowed.
    """
    key = prefix if sample.params.temperature == 0 else hash((prefix, sample.seed, sample.output_index))
    for step in range(vocab_size):
        token = (key + step) % vocab_size
        if _may_follow(token, sample):
            return token
    raise InvariantError(f"a token was to be chosen although all {vocab_size} are forbidden")


def is_nothing_allowed(vocab_size: int, sample: SampleInput) -> bool:
    """Whether every token of the vocabulary is forbidden."""
    if sample.allowed is not None:
        return not any(_may_follow(token, sample) for token in range(vocab_size))
    return len(sample.forbidden) >= vocab_size and set(range(vocab_size)) <= set(sample.forbidden)


def _may_follow(token_id: TokenId, sample: SampleInput) -> bool:
    return token_id not in sample.forbidden and (sample.allowed is None or is_allowed(sample.allowed, token_id))


class _Tier:
    """Slots of one pool."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.tokens = [_UNWRITTEN] * (num_blocks * block_size)
        self.prefixes: list[PrefixHash] = [_UNWRITTEN] * (num_blocks * block_size)

    def copy_block(self, block: int, into: _Tier, target: int) -> None:
        """Copy one whole block to another tier."""
        size = self.block_size
        source, destination = slice(block * size, (block + 1) * size), slice(target * size, (target + 1) * size)
        into.tokens[destination] = self.tokens[source]
        into.prefixes[destination] = self.prefixes[source]

    def pack_block(self, block: int) -> memoryview:
        """Return a copy of one whole block as bytes."""
        slots = self._slots_of(block)
        return memoryview(array("q", self.tokens[slots] + self.prefixes[slots])).cast("B")

    def unpack_block(self, block: int, content: memoryview) -> None:
        """Write one whole block from what pack_block gave."""
        slots, num_bytes = self._slots_of(block), self.block_size * _SLOT_BYTES
        if content.nbytes != num_bytes:
            raise InvariantError(f"a KV block of {content.nbytes} bytes was to be written; blocks have {num_bytes}")
        values = array("q", content.tobytes()).tolist()
        self.tokens[slots], self.prefixes[slots] = values[: self.block_size], values[self.block_size :]

    def _slots_of(self, block: int) -> slice:
        if not 0 <= block < self.num_blocks:
            raise DeviceFaultError(f"KV block {block} is outside the pool of {self.num_blocks}")
        return slice(block * self.block_size, (block + 1) * self.block_size)


class DryBackend:
    """A `Backend` without weights."""

    def __init__(self, vocab_size: int = 1000) -> None:
        self.vocab_size = vocab_size
        self._device = _Tier(0, 1)
        self._host = _Tier(0, 1)

    @property
    def description(self) -> str:
        """One line for people."""
        return "dry run: no weights, every KV slot checked"

    @property
    def device(self) -> str:
        """Where the pools are."""
        return "dry"

    @property
    def is_exact(self) -> bool:
        """Tokens are a function of their context alone."""
        return True

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token: of SmolLM2-135M in 16 bits, so that swapped bytes mean something."""
        return 30 * 2 * 3 * 64 * 2

    @property
    def block_bytes(self) -> int:
        """Bytes of one block as read_block gives it: its tokens and hashes, far less than the KV they stand for."""
        return self._device.block_size * _SLOT_BYTES

    @property
    def free_memory_bytes(self) -> int:
        """Enough for a pool of 8,192 tokens at the usual share of a CPU's memory."""
        return 10 * 8192 * self.kv_bytes_per_token

    def allocate(self, *, num_device_blocks: int, num_host_blocks: int, block_size: int) -> None:
        """Make both tiers, unwritten."""
        self._device = _Tier(num_device_blocks, block_size)
        self._host = _Tier(num_host_blocks, block_size)

    def forward(self, batch: Sequence[BatchSequence]) -> list[SequenceResult]:
        """Write all slots of the batch, then read every context back, check it, and choose tokens."""
        for sequence in batch:
            self._write(sequence)
        return [self._read(sequence) for sequence in batch]

    def _write(self, sequence: BatchSequence) -> None:
        tier, table, size = self._device, sequence.block_table, self._device.block_size
        for position, token_id in enumerate(sequence.token_ids, start=sequence.start):
            slot = table[position // size] * size + position % size
            tier.tokens[slot] = token_id
            before = _START
            if position:
                before = tier.prefixes[table[(position - 1) // size] * size + (position - 1) % size]
            tier.prefixes[slot] = extend(before, token_id)

    def _read(self, sequence: BatchSequence) -> SequenceResult:
        end = sequence.start + len(sequence.token_ids)
        chain = self._read_chain(sequence, end)
        sample = sequence.sample
        prompt_logprobs = tuple(
            _logprobs(token, sequence.num_prompt_logprobs or 0, self.vocab_size, chain[sequence.start + offset])
            for offset, token in enumerate(sequence.next_token_ids)
        )
        if sample is None:
            return SequenceResult(prompt_logprobs=prompt_logprobs)
        self._check_context(sequence, sample, chain[-1])
        if is_nothing_allowed(self.vocab_size, sample):
            fault = f"all {self.vocab_size} tokens are forbidden at output position {sample.output_index}"
            return SequenceResult(fault=fault)
        token_id = choose_token(chain[-1], self.vocab_size, sample)
        logprobs = None
        if sample.params.logprobs is not None:
            logprobs = _logprobs(token_id, sample.params.logprobs, self.vocab_size, chain[-1])
        return SequenceResult(token_id, logprobs, prompt_logprobs)

    def _read_chain(self, sequence: BatchSequence, end: int) -> list[PrefixHash]:
        """Read slots 0 .. end-1 through the block table; each must continue the one before."""
        tier, size = self._device, self._device.block_size
        prefix, chain = _START, []
        for position in range(end):
            slot = sequence.block_table[position // size] * size + position % size
            prefix = extend(prefix, tier.tokens[slot])
            if tier.prefixes[slot] != prefix:
                raise InvariantError(
                    f"{sequence.request_id} reads position {position} in block {slot // size}, which holds the KV of "
                    "another context"
                )
            chain.append(prefix)
        return chain

    def _check_context(self, sequence: BatchSequence, sample: SampleInput, found: PrefixHash) -> None:
        """Compare what was read back with what the request says its context is."""
        expected = _START
        for token_id in (*sample.prompt_token_ids, *sample.output_token_ids):
            expected = extend(expected, token_id)
        if found != expected:
            raise InvariantError(f"{sequence.request_id} attends to a consistent context, but not to its own")

    def copy_out(self, pairs: Sequence[tuple[DeviceBlockId, HostBlockId]]) -> None:
        """Copy blocks device -> host."""
        for device_block, host_block in pairs:
            self._device.copy_block(device_block, self._host, host_block)

    def copy_in(self, pairs: Sequence[tuple[HostBlockId, DeviceBlockId]]) -> None:
        """Copy blocks host -> device."""
        for host_block, device_block in pairs:
            self._host.copy_block(host_block, self._device, device_block)

    def read_block(self, pool: MemoryPool, block: int) -> memoryview:
        """Return tokens and hashes of one block. Raises DeviceFaultError if there is no such block."""
        return self._pool(pool).pack_block(block)

    def write_block(self, pool: MemoryPool, block: int, content: memoryview) -> None:
        """Write one block with what read_block gave for some block. Raises DeviceFaultError if there is none."""
        self._pool(pool).unpack_block(block, content)

    def _pool(self, pool: MemoryPool) -> _Tier:
        return self._device if pool is MemoryPool.DEVICE else self._host

    def copy_within(self, pairs: Sequence[tuple[DeviceBlockId, DeviceBlockId]]) -> None:
        """Copy blocks on the device."""
        for source, target in pairs:
            self._device.copy_block(source, self._device, target)

    def close(self) -> None:
        """Nothing to release."""


def _logprobs(token_id: TokenId, count: int, vocab_size: int, prefix: PrefixHash) -> TokenLogprobs:
    """Numbers that stand in for log-probabilities: a function of the context, so that a shift shows."""
    top = tuple(((prefix + rank) % vocab_size, -1.0 - rank) for rank in range(count))
    return TokenLogprobs(token_id, -float((prefix ^ token_id) % 1009) / 100, 1, top)
