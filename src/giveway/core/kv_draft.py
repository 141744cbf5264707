"""A what-if view over the KV cache: a plan takes, shares and releases blocks here without writing anything."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import cast

from giveway.core.errors import InvariantError
from giveway.core.ids import BlockTable, DeviceBlockId, RequestId
from giveway.core.kv_cache import TIERS, KVCache, ParkedTable, Tier


class KVDraft:
    """Counts and concrete ids of the blocks that a plan may still use; dies with the plan."""

    __slots__ = (
        "_change",
        "_has_shared",
        "_idle",
        "_kv",
        "_num_free_taken",
        "_overwritten",
        "_parked_free",
        "_parked_taken",
        "_released",
        "_revived",
        "_under_copy",
        "num_available",
        "num_promised",
    )

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self.num_available = kv.device.num_available  # device blocks this plan may still take
        self.num_promised = 0  # device blocks that come back when a copy ends: under way, or begun by this plan
        self._num_free_taken = 0
        self._parked_taken = dict.fromkeys(TIERS, 0)  # of the free blocks of each tier
        self._parked_free: dict[Tier, list[int]] = {tier: [] for tier in TIERS}  # given back within this plan
        self._idle: Iterator[int] | None = None
        self._released: dict[DeviceBlockId, None] = {}  # by victims of this plan, last owner gone
        self._revived: set[int] = set()  # idle blocks that a prefix hit of this plan shares
        self._overwritten: set[int] = set()  # findable blocks that this plan hands out: found no more
        self._change: dict[int, int] = {}  # references added or dropped by this plan, or by copies when they end
        self._has_shared = False  # by this plan
        self._under_copy: set[DeviceBlockId] = set()  # cannot be taken before the copy has ended
        for copy in kv.live_copies():
            self.promise(copy.device_blocks)

    @property
    def has_shared(self) -> bool:
        """Whether any block may have more than one owner; if not, nobody needs to look at blocks one by one."""
        return self._has_shared or self._kv.device.num_shared > 0

    def references(self, block: DeviceBlockId) -> int:
        """Return how many will hold the block when this plan is carried out and all copies have ended."""
        return self._kv.device.references(block) + self._change.get(block, 0)

    def num_unreferenced(self, blocks: Sequence[DeviceBlockId]) -> int:
        """Count the blocks nobody holds: sharing them takes as much room as taking new ones."""
        if not blocks:
            return 0
        return sum(1 for block in blocks if not self.references(block))

    def take(self, count: int) -> BlockTable:
        """Set `count` blocks aside: free ones first, then idle ones, then those of this plan's victims."""
        if count > self.num_available:
            raise InvariantError(f"the plan takes {count} blocks of {self.num_available} available")
        self.num_available -= count
        blocks = list(self._kv.device.peek_free(self._num_free_taken, count))
        self._num_free_taken += len(blocks)
        while len(blocks) < count:
            blocks.append(self._next_idle_or_released())
        return cast("BlockTable", tuple(blocks))

    def _next_idle_or_released(self) -> int:
        if self._idle is None:
            self._idle = self._kv.device.idle_blocks()
        for block in self._idle:
            if block not in self._revived:
                self._overwritten.add(block)
                return block
        block = next(iter(self._released))
        del self._released[block]
        self._overwritten.add(block)
        return block

    def find_prefix(self, request_id: RequestId, num_known_tokens: int) -> BlockTable:
        """Return the findable prefix of a request, up to the first block that this plan has handed out already."""
        found = self._kv.find_prefix(request_id, num_known_tokens)
        for place, block in enumerate(found):
            if block in self._overwritten:
                return found[:place]
        return found

    def share(self, blocks: BlockTable) -> None:
        """Add a reference to prefix blocks."""
        self._has_shared = self._has_shared or bool(blocks)
        for block in blocks:
            if not self.references(block):
                if block in self._under_copy:  # it was to come back later, and now does not
                    self.num_promised -= 1
                else:
                    self.num_available -= 1
                    if block in self._released:
                        del self._released[block]
                    else:
                        self._revived.add(block)
            self._change[block] = self._change.get(block, 0) + 1

    def release(self, table: BlockTable) -> None:
        """Drop a victim's references; blocks without another owner can be taken from now on."""
        for block in table:
            self._change[block] = self._change.get(block, 0) - 1
            if self.references(block):
                continue
            if block in self._under_copy:
                self.num_promised += 1
            else:
                self.num_available += 1
                self._released[block] = None

    def promise(self, table: BlockTable) -> None:
        """Count blocks as coming back later: their copy overlaps with this and later steps.

        A block that several victims share comes back with the last of their copies, and is counted once.
        """
        self._under_copy.update(table)
        self.release(table)

    def hold(self, count: int) -> None:
        """Keep blocks from everybody further down the ranking: a request waits for a copy to complete its room."""
        taken = min(count, self.num_available)
        self.num_available -= taken
        self.num_promised = max(0, self.num_promised - (count - taken))

    def freed_blocks(self, keep: Collection[DeviceBlockId]) -> DraftFreedBlocks:
        """Return an empty count of what a set of owners would free; `keep` is what the beneficiary wants to share."""
        return DraftFreedBlocks(self, keep)

    def num_parked_available(self, tier: Tier) -> int:
        """Return how many blocks of a tier off the device this plan may still take."""
        return self._kv.pool_of(tier).num_available - self._parked_taken[tier] + len(self._parked_free[tier])

    def take_parked(self, tier: Tier, count: int) -> ParkedTable:
        """Set blocks of a tier off the device aside."""
        if count > self.num_parked_available(tier):
            raise InvariantError(f"the plan parks {count} blocks on the {tier.value}, which lacks room")
        blocks = list(self._kv.pool_of(tier).peek_free(self._parked_taken[tier], count))
        self._parked_taken[tier] += len(blocks)
        num_again, again = count - len(blocks), self._parked_free[tier]
        self._parked_free[tier] = again[num_again:]
        return cast("ParkedTable", (*blocks, *again[:num_again]))

    def free_parked(self, tier: Tier, blocks: Iterable[int]) -> None:
        """Count blocks as free again: their content moves on, is dropped, or will not be parked after all."""
        self._parked_free[tier].extend(blocks)


class DraftFreedBlocks:
    """Counts what a changing set of owners would free together, beyond what a draft has released already."""

    __slots__ = ("_draft", "_dropped", "_keep", "count")

    def __init__(self, draft: KVDraft, keep: Collection[DeviceBlockId]) -> None:
        self._draft = draft
        self._keep = keep  # blocks that the beneficiary shares itself: they make no room for it
        self._dropped: dict[DeviceBlockId, int] = {}  # references that the owners added hold
        self.count = 0  # blocks

    def add(self, table: BlockTable) -> None:
        """Count an owner as gone; a shared block is freed when its last owner goes."""
        for block in table:
            dropped = self._dropped.get(block, 0) + 1
            self._dropped[block] = dropped
            if dropped == self._draft.references(block) and block not in self._keep:
                self.count += 1

    def take_out(self, table: BlockTable) -> None:
        """Count an added owner as staying after all."""
        for block in table:
            dropped = self._dropped[block]
            self._dropped[block] = dropped - 1
            if dropped == self._draft.references(block) and block not in self._keep:
                self.count -= 1
