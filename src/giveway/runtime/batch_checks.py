"""What every backend checks of a batch before it writes anything: ids from a broken plan must not reach memory."""

from __future__ import annotations

from collections.abc import Sequence

from giveway.core.errors import DeviceFaultError
from giveway.runtime.backend import BatchSequence


def check_batch(
    batch: Sequence[BatchSequence], *, vocab_size: int, num_positions: int, num_blocks: int, block_size: int
) -> None:
    """Raise DeviceFaultError for a token, a position or a block outside its range, naming request, value and range.

    num_positions: positions that model and pool have; num_blocks: blocks of the device pool.
    """
    for sequence in batch:
        count, end = len(sequence.token_ids), sequence.start + len(sequence.token_ids)
        who = f"request {sequence.request_id!r}"
        if count < 1 or sequence.start < 0:
            raise DeviceFaultError(f"{who}: {count} tokens from position {sequence.start} cannot be computed")
        if end > num_positions:
            raise DeviceFaultError(
                f"{who}: position {end - 1} is beyond the last, {num_positions - 1} "
                f"(of the model's positions, and of those that {num_blocks} blocks hold)"
            )
        num_used = -(-end // block_size)
        if num_used > len(sequence.block_table):
            raise DeviceFaultError(
                f"{who}: {end} tokens need {num_used} KV blocks, its table has {len(sequence.block_table)}"
            )
        low, high = min(sequence.token_ids), max(sequence.token_ids)
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise DeviceFaultError(f"{who}: token id {wrong} is outside the vocabulary of {vocab_size}")
        used = sequence.block_table[:num_used]
        if min(used) < 0 or max(used) >= num_blocks:
            wrong = min(used) if min(used) < 0 else max(used)
            raise DeviceFaultError(f"{who}: KV block {wrong} is outside the pool of {num_blocks}")
