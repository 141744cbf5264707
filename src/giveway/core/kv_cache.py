"""The KV cache as numbers: three pools, block tables, prefix index and copies under way.

Who holds a device block: every table that lists it and every copy under way that reads or writes it, one reference
each. A copy holds its blocks itself, so a request may end while its copy still runs: the blocks come back with the
copy, never before.

Where the KV of a request is: in the table of a resident; in the leading blocks that a request keeps which gave way and
was asked for its tail only; parked on the host or on disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from giveway.core.block_pool import BlockPool
from giveway.core.config import CacheConfig
from giveway.core.errors import InvariantError
from giveway.core.ids import BlockTable, CopyId, DeviceBlockId, DiskBlockId, HostBlockId, RequestId, TokenId
from giveway.core.prefix_index import BlockHash, PrefixIndex, chain, root

ParkedTable = tuple[HostBlockId, ...] | tuple[DiskBlockId, ...]
"""Blocks of one tier off the device that hold KV of one request, in logical order."""


class Tier(Enum):
    """Where KV is parked off the device."""

    HOST = "host"
    DISK = "disk"

    __hash__ = object.__hash__  # members are singletons; the hash that Enum has is slow


TIERS = tuple(Tier)  # the nearest first; a plan asks often enough for the class itself to be slow to walk through


class CopyDirection(Enum):
    """Which way a block copy goes."""

    OUT = "out"  # off the device
    IN = "in"  # back to it


@dataclass(frozen=True, slots=True)
class Parked:
    """KV of a swapped request: all that it has computed, but for leading blocks that it keeps on the device."""

    tier: Tier
    blocks: ParkedTable


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Whole blocks of one request to be copied between the device and one other tier, pairwise."""

    copy_id: CopyId
    request_id: RequestId
    direction: CopyDirection
    device_blocks: BlockTable
    parked_blocks: ParkedTable
    tier: Tier = Tier.HOST


@dataclass(frozen=True, slots=True)
class TierMove:
    """Parked KV moves on from the host to the disk, so that somebody better-ranked finds room on the host."""

    copy_id: CopyId
    request_id: RequestId
    host_blocks: tuple[HostBlockId, ...]
    disk_blocks: tuple[DiskBlockId, ...]


class KVCache:
    """Applies KV operations. Written by accept (abort), commit and discard of the scheduler only."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.device: BlockPool[DeviceBlockId] = BlockPool(config.num_device_blocks, lead_s=config.cache_lead_s)
        self.host: BlockPool[HostBlockId] = BlockPool(config.num_host_blocks)
        self.disk: BlockPool[DiskBlockId] = BlockPool(config.num_disk_blocks)
        self.index: PrefixIndex | None = PrefixIndex() if config.enable_prefix_caching else None
        self.tables: dict[RequestId, BlockTable] = {}  # of residents
        self.kept: dict[RequestId, BlockTable] = {}  # leading blocks of those who gave up a tail, or their seat only
        self.parked: dict[RequestId, Parked] = {}
        self.copies: dict[CopyId, BlockCopy] = {}  # under way
        self.lost: set[CopyId] = set()  # of these, not heard of for too long: blocks stay pinned, nobody counts on them
        self.now_s = 0.0  # when blocks that become idle now were used last
        self._arriving: dict[CopyId, Parked] = {}  # what a copy out completes: held by it until it ends
        self._hashes: dict[RequestId, list[BlockHash]] = {}  # of the full blocks of the known tokens
        self._num_published: dict[RequestId, int] = {}  # leading blocks of the table that publish has seen

    def pool_of(self, tier: Tier) -> BlockPool[Any]:
        """Return the pool of a tier off the device."""
        return self.host if tier is Tier.HOST else self.disk

    # Prefixes

    def learn(
        self,
        request_id: RequestId,
        num_known_tokens: int,
        tokens: Callable[[int, int], Sequence[TokenId]],
        salt: bytes = b"",
    ) -> None:
        """Extend the hash chain of a request to the full blocks of its known tokens; tokens(start, stop) gives them."""
        if self.index is None:
            return
        size = self.config.block_size
        hashes = self._hashes.setdefault(request_id, [])
        for block in range(len(hashes), num_known_tokens // size):
            parent = hashes[-1] if hashes else root(salt)
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

    def admit(
        self, request_id: RequestId, *, hits: BlockTable, new: BlockTable, priority: int = 0, num_published: int = 0
    ) -> None:
        """Give a request its table: what it kept, prefix hits, then blocks of its own. Parked KV is let go.

        hits: held for it already, see `hold_hits`. priority: its class, for the eviction order. num_published: leading
        blocks that are full already.
        """
        if request_id in self.tables:
            raise InvariantError(f"{request_id} already has a block table")
        kept = self.kept.pop(request_id, ())
        self.drop_parked(request_id)
        self._take(new, priority)
        self.tables[request_id] = kept + hits + new
        self._num_published[request_id] = num_published

    def hold_hits(self, hits: BlockTable, priority: int = 0) -> None:
        """Hold prefix blocks for a request that is about to be admitted, before anybody lets go of them."""
        self.device.share(hits, priority=priority)

    def grow(self, request_id: RequestId, table: BlockTable, priority: int = 0) -> None:
        """Replace a table by a longer one that starts with it."""
        old = self.tables[request_id]
        if table[: len(old)] != old:
            raise InvariantError(f"{request_id}: the grown block table does not start with the old one")
        self._take(table[len(old) :], priority)
        self.tables[request_id] = table

    def give_up(self, request_id: RequestId, num_kept: int) -> None:
        """Take blocks off the tail of a resident, or of one that kept some, but for the first `num_kept`."""
        table = self._leave(request_id, num_kept)
        self.device.release(table[num_kept:], now_s=self.now_s)

    def _leave(self, request_id: RequestId, num_kept: int) -> BlockTable:
        """End a residency, or shrink what was kept; returns the table as it was, its tail to be released."""
        table = self.tables.pop(request_id, None)
        if table is None:
            table = self.kept.pop(request_id)
        if num_kept:
            self.kept[request_id] = table[:num_kept]
        self._num_published.pop(request_id, None)
        return table

    def drop_parked(self, request_id: RequestId) -> None:
        """Let parked KV go. None: a no-op."""
        parked = self.parked.pop(request_id, None)
        if parked is not None:
            self.pool_of(parked.tier).release(parked.blocks)

    def move_to_disk(self, move: TierMove) -> None:
        """The parked KV of a request has been copied from the host to the disk."""
        if self.parked[move.request_id].blocks != move.host_blocks:
            raise InvariantError(f"{move.request_id}: the move does not read the request's own host blocks")
        self.drop_parked(move.request_id)
        self.disk.take(move.disk_blocks)
        self.parked[move.request_id] = Parked(Tier.DISK, move.disk_blocks)

    def release(self, request_id: RequestId) -> None:
        """Drop a request's references on every tier; what copies hold stays until they end. Gone already: a no-op."""
        for tables in (self.tables, self.kept):
            table = tables.pop(request_id, None)
            if table is not None:
                self.device.release(table, now_s=self.now_s)
        self.drop_parked(request_id)
        self._num_published.pop(request_id, None)

    def forget(self, request_id: RequestId) -> None:
        """Release everything, and the hash chain too: the request is finished."""
        self.release(request_id)
        self._hashes.pop(request_id, None)

    def _take(self, blocks: BlockTable, priority: int) -> None:
        evicted = self.device.take(blocks, priority=priority)
        if self.index is not None:
            for block in evicted:
                self.index.drop(block)

    # Copies

    def begin_copy_out(self, copy: BlockCopy, *, num_kept: int, parked: ParkedTable) -> None:
        """Start a copy off the device; what it reads passes from the request to the copy.

        num_kept: leading blocks that stay with the request. parked: where the content of the blocks behind them will
        be; of these the copy writes its own, and others are shared, because a copy of the same plan writes them.
        """
        self._begin(copy)
        tail = self._leave(copy.request_id, num_kept)[num_kept:]
        num_read = len(copy.device_blocks)
        if tail[:num_read] == copy.device_blocks:
            rest: Sequence[DeviceBlockId] = tail[num_read:]
        else:  # some are copied for another
            read = set(copy.device_blocks)
            if not read <= set(tail):
                raise InvariantError(f"{copy.request_id}: the copy out does not read the request's own blocks")
            rest = [block for block in tail if block not in read]
        self.device.release(rest, now_s=self.now_s)
        pool = self.pool_of(copy.tier)
        held = [block for block in parked if pool.references(block)]  # by another victim of the plan, begun earlier
        pool.take([block for block in parked if not pool.references(block)])
        pool.share(held)
        before = self.parked.pop(copy.request_id, None)  # a tail that was given up earlier
        if before is not None:
            if before.tier is not copy.tier:
                raise InvariantError(f"{copy.request_id}: its KV would be parked on two tiers")
            parked = cast("ParkedTable", (*parked, *before.blocks))
        self._arriving[copy.copy_id] = Parked(copy.tier, parked)

    def begin_copy_in(self, copy: BlockCopy, *, hits: BlockTable, new: BlockTable, priority: int = 0) -> None:
        """Start a copy back; the request gets its table, and whatever is parked and need not be copied is let go."""
        self._begin(copy)
        self.pool_of(copy.tier).share(copy.parked_blocks)
        self.admit(copy.request_id, hits=hits, new=new, priority=priority)
        self.device.share(copy.device_blocks, priority=priority)

    def _begin(self, copy: BlockCopy) -> None:
        if copy.copy_id in self.copies:
            raise InvariantError(f"copy {copy.copy_id} was begun twice")
        self.copies[copy.copy_id] = copy

    def end_copy(self, copy_id: CopyId, *, keep: bool) -> BlockCopy | None:
        """End a copy and return it; None when it is not under way (it was heard of before).

        keep: the copy succeeded and its request still wants the result; else what it wrote is let go.
        """
        copy = self.copies.pop(copy_id, None)
        if copy is None:
            return None
        self.lost.discard(copy_id)
        self.device.release(copy.device_blocks, now_s=self.now_s)
        if copy.direction is CopyDirection.IN:
            self.pool_of(copy.tier).release(copy.parked_blocks)
        else:
            parked = self._arriving.pop(copy_id)
            if keep:
                self.parked[copy.request_id] = parked
            else:
                self.pool_of(parked.tier).release(parked.blocks)
        return copy

    def lose_copy(self, copy_id: CopyId) -> None:
        """Nobody counts on a copy any more. What it may still read or write stays pinned, and nothing else."""
        self.lost.add(copy_id)
        arriving = self._arriving.get(copy_id)
        if arriving is not None:
            written = self.copies[copy_id].parked_blocks
            self._arriving[copy_id] = Parked(arriving.tier, written)
            still = set(written)
            self.pool_of(arriving.tier).release([block for block in arriving.blocks if block not in still])

    def sharing_parked(self, copy: BlockCopy) -> list[RequestId]:
        """Return the requests, other than its own, whose parked KV includes blocks that a copy out writes."""
        written = set(copy.parked_blocks)
        owners = [(name, parked) for name, parked in self.parked.items() if name != copy.request_id]
        owners += [(self.copies[other].request_id, parked) for other, parked in self._arriving.items()]
        return [
            name
            for name, parked in owners
            if name != copy.request_id and parked.tier is copy.tier and not written.isdisjoint(parked.blocks)
        ]

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
        for table in (*self.tables.values(), *self.kept.values()):
            if len(set(table)) != len(table):
                raise InvariantError(f"a block is twice in one table: {table}")
            held.update(table)
        parked_in: dict[Tier, Counter[int]] = {tier: Counter() for tier in TIERS}
        for parked in (*self.parked.values(), *self._arriving.values()):
            parked_in[parked.tier].update(parked.blocks)
        for copy in self.copies.values():
            held.update(copy.device_blocks)
            if copy.direction is CopyDirection.IN:
                parked_in[copy.tier].update(copy.parked_blocks)
        _compare("device", self.device, held)
        self.device.check()
        for tier, counted in parked_in.items():
            _compare(tier.value, self.pool_of(tier), counted)
            self.pool_of(tier).check()
        if self.index is not None:
            self.index.check()


def _compare(tier: str, pool: BlockPool[Any], held: Counter[int]) -> None:
    for block in held.keys() | set(pool.owned_blocks()):
        counted = pool.references(block)
        if counted != held[block]:
            raise InvariantError(f"{tier} block {block} counts {counted} references but {held[block]} hold it")
