"""The KV cache as numbers: device pool, host pool, block tables, prefix index and copies under way.

Who holds a device block: every table that lists it and every copy under way that reads or writes it, one reference
each. A copy holds its blocks itself, so a request may end while its copy still runs: the blocks come back with the
copy, never before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from giveway.core.block_pool import BlockPool
from giveway.core.config import CacheConfig
from giveway.core.errors import InvariantError
from giveway.core.ids import BlockTable, CopyId, DeviceBlockId, HostBlockId, RequestId, TokenId
from giveway.core.prefix_index import ROOT, BlockHash, PrefixIndex, chain

HostTable = tuple[HostBlockId, ...]


class CopyDirection(Enum):
    """Which way a block copy goes."""

    OUT = "out"  # device to host
    IN = "in"  # host to device


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Whole blocks of one request to be copied, pairwise."""

    copy_id: CopyId
    request_id: RequestId
    direction: CopyDirection
    device_blocks: BlockTable
    host_blocks: HostTable


class KVCache:
    """Applies KV operations. Written by accept (abort), commit and discard of the scheduler only."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.device: BlockPool[DeviceBlockId] = BlockPool(config.num_device_blocks)
        self.host: BlockPool[HostBlockId] = BlockPool(config.num_host_blocks)
        self.index: PrefixIndex | None = PrefixIndex() if config.enable_prefix_caching else None
        self.tables: dict[RequestId, BlockTable] = {}
        self.host_tables: dict[RequestId, HostTable] = {}
        self.copies: dict[CopyId, BlockCopy] = {}  # under way
        self.lost: set[CopyId] = set()  # of these, not heard of for too long: blocks stay pinned, nobody counts on them
        self._hashes: dict[RequestId, list[BlockHash]] = {}  # of the full blocks of the known tokens
        self._num_published: dict[RequestId, int] = {}  # leading blocks of the table that publish has seen

    # Prefixes

    def learn(
        self, request_id: RequestId, num_known_tokens: int, tokens: Callable[[int, int], Sequence[TokenId]]
    ) -> None:
        """Extend the hash chain of a request to the full blocks of its known tokens; tokens(start, stop) gives them."""
        if self.index is None:
            return
        size = self.config.block_size
        hashes = self._hashes.setdefault(request_id, [])
        for block in range(len(hashes), num_known_tokens // size):
            parent = hashes[-1] if hashes else ROOT
            hashes.append(chain(parent, tokens(block * size, (block + 1) * size)))

    def find_prefix(self, request_id: RequestId, num_known_tokens: int) -> BlockTable:
        """Return the blocks of the longest findable prefix, at least one token short of everything known.

        One token must be left to run: the logits that choose the next token come from it.
        """
        if self.index is None:
            return ()
        found: list[DeviceBlockId] = []
        for block_hash in self._hashes.get(request_id, ())[: (num_known_tokens - 1) // self.config.block_size]:
            block = self.index.find(block_hash)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def publish(self, request_id: RequestId, num_computed_tokens: int) -> None:
        """Make the full blocks of a request findable. Called after the forward pass that filled them."""
        if self.index is None:
            return
        table = self.tables[request_id]
        hashes = self._hashes.get(request_id, ())
        start = self._num_published.get(request_id, 0)
        stop = min(num_computed_tokens // self.config.block_size, len(hashes))
        for position in range(start, stop):
            if self.index.hash_of(table[position]) is None and self.index.put(hashes[position], table[position]):
                self.device.mark_cached(table[position])
        self._num_published[request_id] = max(start, stop)

    def forget_content(self, blocks: Iterable[DeviceBlockId]) -> None:
        """Drop the prefix entries of blocks whose content is unknown."""
        for block in blocks:
            if self.index is not None:
                self.index.drop(block)
            self.device.unmark_cached(block)

    # Residency

    def admit(self, request_id: RequestId, *, hits: BlockTable, new: BlockTable) -> None:
        """Give a request its table: shared prefix blocks, then blocks of its own."""
        if request_id in self.tables:
            raise InvariantError(f"{request_id} already has a block table")
        self.device.share(hits)
        self._take(new)
        self.tables[request_id] = hits + new
        self._num_published[request_id] = len(hits)

    def grow(self, request_id: RequestId, table: BlockTable) -> None:
        """Replace a table by a longer one that starts with it."""
        old = self.tables[request_id]
        if table[: len(old)] != old:
            raise InvariantError(f"{request_id}: the grown block table does not start with the old one")
        self._take(table[len(old) :])
        self.tables[request_id] = table

    def release(self, request_id: RequestId) -> None:
        """Drop a request's references on every tier; what copies hold stays until they end. Gone already: a no-op."""
        table = self.tables.pop(request_id, None)
        if table is not None:
            self.device.release(table)
        host_table = self.host_tables.pop(request_id, None)
        if host_table is not None:
            self.host.release(host_table)
        self._num_published.pop(request_id, None)

    def forget(self, request_id: RequestId) -> None:
        """Release everything, and the hash chain too: the request is finished."""
        self.release(request_id)
        self._hashes.pop(request_id, None)

    def _take(self, blocks: BlockTable) -> None:
        evicted = self.device.take(blocks)
        if self.index is not None:
            for block in evicted:
                self.index.drop(block)

    # Copies

    def begin_copy(self, copy: BlockCopy, *, table: BlockTable = ()) -> None:
        """Start a copy. Out: the table's blocks pass to the copy. In: `table` is the request's new device table."""
        if copy.copy_id in self.copies:
            raise InvariantError(f"copy {copy.copy_id} was begun twice")
        self.copies[copy.copy_id] = copy
        if copy.direction is CopyDirection.OUT:
            old = self.tables.pop(copy.request_id)
            if old[: len(copy.device_blocks)] != copy.device_blocks:
                raise InvariantError(f"{copy.request_id}: the copy out does not read the request's own blocks")
            self.device.release(old[len(copy.device_blocks) :])
            self.host.take(copy.host_blocks)
            self._num_published.pop(copy.request_id, None)
        else:
            if self.host_tables.pop(copy.request_id) != copy.host_blocks:
                raise InvariantError(f"{copy.request_id}: the copy in does not read the request's own host blocks")
            self.admit(copy.request_id, hits=(), new=table)
            self.device.share(copy.device_blocks)

    def end_copy(self, copy_id: CopyId, *, keep: bool) -> BlockCopy | None:
        """End a copy and return it; None when it is not under way (it was heard of before).

        keep: the copy succeeded and its request still wants the result; else what it wrote is let go.
        """
        copy = self.copies.pop(copy_id, None)
        if copy is None:
            return None
        self.lost.discard(copy_id)
        self.device.release(copy.device_blocks)
        if copy.direction is CopyDirection.OUT and keep:
            self.host_tables[copy.request_id] = copy.host_blocks
        else:
            self.host.release(copy.host_blocks)
        return copy

    def live_copies(self) -> list[BlockCopy]:
        """Return the copies under way whose end can still be counted on."""
        return [copy for copy_id, copy in self.copies.items() if copy_id not in self.lost]

    @property
    def has_live_copies(self) -> bool:
        """Whether a copy will still end, and give blocks back."""
        return len(self.copies) > len(self.lost)

    # Checks

    def check(self) -> None:
        """Raise InvariantError unless every reference is accounted for on every tier."""
        held: Counter[int] = Counter()
        for table in self.tables.values():
            if len(set(table)) != len(table):
                raise InvariantError(f"a block is twice in one table: {table}")
            held.update(table)
        held_host: Counter[int] = Counter()
        for host_table in self.host_tables.values():
            held_host.update(host_table)
        for copy in self.copies.values():
            held.update(copy.device_blocks)
            held_host.update(copy.host_blocks)
        _compare("device", self.device, held)
        _compare("host", self.host, held_host)
        self.device.check()
        self.host.check()
        if self.index is not None:
            self.index.check()


def _compare(tier: str, pool: BlockPool[DeviceBlockId] | BlockPool[HostBlockId], held: Counter[int]) -> None:
    for block in range(pool.size):
        counted = pool.references(block)  # type: ignore[arg-type]  # both id types are integers
        if counted != held[block]:
            raise InvariantError(f"{tier} block {block} counts {counted} references but {held[block]} hold it")
