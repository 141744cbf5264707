"""Whether pools of KV blocks fit into memory, and the errors that say how to make them fit."""

from __future__ import annotations

from giveway.core.errors import ConfigError
from giveway.runtime.zeroed_memory import ZeroedMemory

_REMEDIES = {
    "device": "Lower --kv-cache-memory-bytes or --num-kv-blocks.",
    "host": "Lower --swap-space; 0 turns swapping off.",
}


def check_sizes(*, num_device_blocks: int, num_host_blocks: int, block_size: int) -> None:
    """Raise ConfigError for pools that nothing can be done with. block_size: tokens."""
    if min(num_device_blocks, block_size) < 1 or num_host_blocks < 0:
        raise ConfigError(
            f"KV pools of {num_device_blocks} device and {num_host_blocks} host blocks of {block_size} tokens: at "
            "least 1 device block, 0 host blocks and 1 token are needed"
        )


def check_room(pool: str, num_blocks: int, block_bytes: int, *, free_bytes: int | None, where: str) -> None:
    """Raise ConfigError unless the pool fits.

    pool: "device" or "host". free_bytes: what an allocation could take there; None: the system does not say. where: the
    device by its name.
    """
    needed = num_blocks * block_bytes
    if free_bytes is None or needed <= free_bytes:
        return
    raise ConfigError(
        f"the {pool} pool of {num_blocks} KV blocks needs {needed / 2**20:,.0f} MiB ({block_bytes:,} bytes each), but "
        f"{free_bytes / 2**20:,.0f} MiB are available on {where}: at most {free_bytes // block_bytes} blocks fit. "
        f"{_REMEDIES[pool]}"
    )


def map_zeros(pool: str, num_bytes: int) -> ZeroedMemory:
    """Reserve a pool in main memory, untouched. Raises ConfigError when the system refuses."""
    try:
        return ZeroedMemory(num_bytes)
    except (OSError, OverflowError, ValueError) as error:  # the last two: more than any address reaches
        raise no_such_piece(pool, error) from error


def no_such_piece(pool: str, error: Exception) -> ConfigError:
    """Return the error for an allocator that has no piece of that size."""
    return ConfigError(f"the {pool} pool of KV blocks cannot be allocated: {error}. {_REMEDIES[pool]}")
