"""Who gives way in a plan, and how much of what: victims, the part that each gives up, and where its KV goes.

Works on the draft of a plan and writes nothing. One victim may be asked twice in one plan, by one beneficiary after
another; it is one preemption all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

from giveway.core.config import PreemptionChoice, VictimOrder, blocks_for
from giveway.core.cost_model import choose_mode
from giveway.core.ids import BlockTable, CopyId, DeviceBlockId, DiskBlockId, HostBlockId, RequestId
from giveway.core.kv_cache import TIERS, BlockCopy, CopyDirection, ParkedTable, Tier, TierMove
from giveway.core.kv_draft import KVDraft
from giveway.core.plan import DeferralReason, Giving, Preemption, PreemptionCost, PreemptionMode
from giveway.core.policy import choose_victims, in_victim_order, may_displace, may_take_kept
from giveway.core.request import Request, RequestState
from giveway.core.state import SchedulerState

# What a gift holds until it is decided.
_NOTHING = Giving(0, 0, 0, 0, False, 0, 0)
_FREE = PreemptionCost(PreemptionMode.PAUSE, None, 0.0, None, None)


@dataclass(slots=True)
class _Gift:
    """What one request gives up in this plan, all beneficiaries together."""

    victim: Request
    beneficiary: RequestId | None  # the first one
    table: BlockTable  # as it was before the plan
    num_filled: int  # leading blocks of it that hold KV
    is_resident: bool
    is_for_its_class: bool = False
    num_kept: int = 0
    giving: Giving = _NOTHING
    wanted: PreemptionChoice = PreemptionChoice.AUTO
    cost: PreemptionCost = _FREE
    whole: PreemptionCost | None = None
    parked: list[int] = field(default_factory=list)  # with a swap: a block of the tier for each filled block given up
    copied: dict[DeviceBlockId, int] = field(default_factory=dict)  # of these, those that its own copy writes


class Displacement:
    """The room that a plan makes by taking it from others."""

    def __init__(self, state: SchedulerState, draft: KVDraft, *, next_copy_id: Iterator[CopyId]) -> None:
        self._state = state
        self._config = state.config
        self._kv = state.kv
        self._draft = draft
        self._next_copy_id = next_copy_id
        self._block_size = state.cache_config.block_size
        self._residents = state.residents.as_list()
        self.seats_left = state.config.max_num_seqs - len(state.residents)
        self.gone: set[RequestId] = set()  # residents who give way in this plan
        self.placed: set[RequestId] = set()  # newcomers who got their seat in this plan, or are held room for
        self.moves: dict[RequestId, TierMove] = {}  # by whose KV it is
        self.dropped: list[RequestId] = []
        self._kept: dict[RequestId, BlockTable] = {}  # changed by this plan
        self._gifts: dict[RequestId, _Gift] = {}
        # Where the copies of this plan put a block, for others who give it up too. Empty with overlap: there the copy
        # that one relied on might end after one's own.
        self._copied: dict[Tier, dict[DeviceBlockId, int]] = {tier: {} for tier in TIERS}

    # What others want to know

    def is_changing(self, request_id: RequestId) -> bool:
        """Whether this plan takes something from a request or moves its KV: it is not served in the same step."""
        return request_id in self._gifts or self._is_moved_on(request_id)

    def kept_by(self, request_id: RequestId) -> BlockTable:
        """Return the leading blocks that a request which has given way still has."""
        kept = self._kept.get(request_id)
        return self._kv.kept.get(request_id, ()) if kept is None else kept

    def has_candidates(self, request: Request) -> bool:
        """Whether there is anybody from whom the request may take something."""
        return any(True for _ in self._displaceable(request)) or any(True for _ in self._keepers(request))

    # Making room

    def make_room(
        self, request: Request, *, lacking_blocks: int, lacking_seats: int, keep: BlockTable
    ) -> DeferralReason | None:
        """Free what a request lacks, now or by a copy under way, or say why it must wait. Nobody goes in vain.

        keep: prefix blocks that it is going to share itself.
        """
        draft = self._draft
        still_lacking = lacking_blocks - draft.num_promised
        if still_lacking > 0 or lacking_seats > 0:
            victims = self._choose_victims(request, still_lacking, lacking_seats, keep)
            if not victims:
                return DeferralReason.NO_SEAT if still_lacking < 1 else DeferralReason.NO_DEVICE_BLOCKS
            before = draft.num_available - draft.num_unreferenced(keep)
            for victim, num_kept in self._portions(victims, still_lacking, keep):
                self._give(victim, num_kept, beneficiary=request, wanted=self._config.preemption_mode)
            lacking_blocks -= draft.num_available - draft.num_unreferenced(keep) - before
        if lacking_blocks > 0:  # the rest comes back with copies under way
            draft.hold(draft.num_available + lacking_blocks)
            if request.state is not RequestState.RUNNING:
                self.seats_left -= 1
                self.placed.add(request.request_id)
            return DeferralReason.COPY_IN_FLIGHT
        return None

    def force_out(self, victim: Request, wanted: PreemptionChoice, *, keeps_shared: bool) -> None:
        """Take everything from a resident that must leave; a swap need not copy what others hold too."""
        is_whole = wanted is PreemptionChoice.RECOMPUTE or not keeps_shared
        num_kept = 0 if is_whole else self._least_kept(victim, self._table_of(victim))
        self._give(victim, num_kept, beneficiary=None, wanted=wanted)

    # Who

    def _displaceable(self, request: Request) -> Iterator[Request]:
        """Yield the residents that a request may displace, worst rank first."""
        policy = self._config.policy
        for victim in reversed(self._residents):
            if victim.rank <= request.rank:
                return
            if (
                victim.state is RequestState.RUNNING
                and victim.request_id not in self.gone
                and may_displace(request, victim, policy)
            ):
                yield victim

    def _keepers(self, request: Request) -> Iterator[Request]:
        """Yield those who have given way and kept blocks that a request may take."""
        if not self._kv.kept and not self._kept:
            return
        for name in dict.fromkeys((*self._kv.kept, *self._kept)):
            keeper = self._state.requests[name]
            if (
                self.kept_by(name)
                and keeper is not request
                and name not in self.placed
                and not self._is_moving(keeper)
                and may_take_kept(request, keeper, self._config.policy)
            ):
                yield keeper

    def _is_moving(self, keeper: Request) -> bool:
        """Whether parked KV of one that gave way is on its way: until it has arrived nothing more is asked of it."""
        gift = self._gifts.get(keeper.request_id)
        is_begun = gift is not None and gift.cost.mode is PreemptionMode.SWAP and self._config.overlapped_copies
        return is_begun or keeper.state is RequestState.SWAPPING_OUT

    def _is_moved_on(self, request_id: RequestId) -> bool:
        """Whether this plan takes its place on the host from parked KV."""
        return request_id in self.dropped or request_id in self.moves

    def _choose_victims(
        self, request: Request, lacking_blocks: int, lacking_seats: int, keep: BlockTable
    ) -> list[Request]:
        candidates = [*self._keepers(request), *self._displaceable(request)]
        if lacking_blocks > sum(len(self._table_of(candidate)) for candidate in candidates):
            return []
        return choose_victims(
            in_victim_order(
                candidates,
                self._config.chosen_victim_order,
                settle_tokens=self._config.settle_tokens,
                is_keeper=self._is_keeper,
                price=lambda victim: self._price(victim, lacking_blocks),
            ),
            lacking_blocks=lacking_blocks,
            lacking_seats=lacking_seats,
            freed=self._draft.freed_blocks(frozenset(keep)),
            table_of=self._table_of,
            is_keeper=self._is_keeper,
        )

    def _price(self, victim: Request, lacking_blocks: int) -> float:
        """What the victim order compares: tokens to compute again, or seconds lost for each block still lacking."""
        table = self._table_of(victim)
        shared = self._num_shared_roughly(table)
        if self._config.chosen_victim_order is VictimOrder.LEAST_WORK:
            return max(victim.num_computed_tokens - shared * self._block_size, 0)
        useful = min(len(table) - shared, max(lacking_blocks, 0))
        if useful < 1:  # a seat only, which costs nothing, or blocks that others hold too
            return 0.0 if lacking_blocks < 1 else float("inf")
        num_kept = len(table) - useful if self._can_keep(victim) else shared
        cost = self._cost_of(self._facts(victim, table, num_kept, beneficiary=None), self._config.preemption_mode)
        return (cost.seconds or 0.0) / useful

    def _is_keeper(self, request: Request) -> bool:
        return request.state is not RequestState.RUNNING or request.request_id in self.gone

    def _table_of(self, request: Request) -> BlockTable:
        """Return the device blocks that a victim still has in this plan."""
        if self._is_keeper(request):
            return self.kept_by(request.request_id)
        return self._kv.tables[request.request_id]

    # How much

    def _can_keep(self, victim: Request) -> bool:
        """Whether a victim may keep blocks that nobody else holds.

        Not one whose class has cost it enough: its class could take them from it later. Not one that is un-admitted:
        what it holds are prefix hits, which stay findable.
        """
        return self._config.allow_tails and not victim.has_paid and not self._is_untouched(victim)

    def _least_kept(self, victim: Request, table: BlockTable) -> int:
        """Leading blocks that a victim keeps in any case, because others hold them too and they would free nothing."""
        return 0 if victim.has_paid or self._is_untouched(victim) else self._num_shared(table)

    def _is_untouched(self, victim: Request) -> bool:
        return not self._is_keeper(victim) and victim.num_own_computed_tokens == 0

    def _portions(self, victims: list[Request], lacking_blocks: int, keep: BlockTable) -> list[tuple[Request, int]]:
        """Say how many leading blocks each victim keeps: those that others hold too, and whatever is not lacking.

        If their own blocks do not suffice, all of them let go of the shared ones too, from the tail on, as far as
        needed: a shared block is freed when its last owner goes.
        """
        tables = [self._table_of(victim) for victim in victims]
        kept = [self._least_kept(victim, table) for victim, table in zip(victims, tables, strict=True)]
        surplus = self._num_freed(tables, kept, keep) - lacking_blocks
        if surplus < 0:
            deepest = self._deepest_cut(tables, kept, lacking_blocks, keep)
            kept = [min(num_kept, deepest) for num_kept in kept]
        elif self._config.allow_tails:
            for place in reversed(range(len(victims))):  # the most urgent one keeps most
                if self._can_keep(victims[place]):
                    more = min(surplus, len(tables[place]) - kept[place])
                    kept[place] += more
                    surplus -= more
        return list(zip(victims, kept, strict=True))

    def _num_freed(self, tables: list[BlockTable], kept: list[int], keep: BlockTable) -> int:
        freed = self._draft.freed_blocks(frozenset(keep))
        for table, num_kept in zip(tables, kept, strict=True):
            freed.add(table[num_kept:])
        return freed.count

    def _deepest_cut(self, tables: list[BlockTable], kept: list[int], lacking_blocks: int, keep: BlockTable) -> int:
        """Return the largest number of leading blocks that everybody may keep so that enough is freed."""
        low, high = 0, max(kept, default=0)  # at `low` enough is freed
        while self._config.allow_tails and low < high:
            middle = (low + high + 1) // 2
            if self._num_freed(tables, [min(num, middle) for num in kept], keep) >= lacking_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def _num_shared(self, table: BlockTable) -> int:
        """Count leading blocks up to the last that somebody else holds too."""
        if not self._draft.has_shared:
            return 0
        count = len(table)
        while count and self._draft.references(table[count - 1]) < 2:
            count -= 1
        return count

    def _num_shared_roughly(self, table: BlockTable) -> int:
        """Like `_num_shared`, by bisection: sharing starts at the head, with exceptions too rare to harm a sort."""
        if not self._draft.has_shared:
            return 0
        low, high = 0, len(table)
        while low < high:
            middle = (low + high) // 2
            if self._draft.references(table[middle]) > 1:
                low = middle + 1
            else:
                high = middle
        return low

    # How

    def _give(self, victim: Request, num_kept: int, *, beneficiary: Request | None, wanted: PreemptionChoice) -> None:
        """Let a victim give up all but its first `num_kept` blocks."""
        table, gift = self._table_of(victim), self._gifts.get(victim.request_id)
        if num_kept == len(table) and self._is_keeper(victim):
            return  # nothing more is asked of it after all
        giving = self._facts(victim, table, num_kept, beneficiary)
        if gift is not None and gift.cost.mode is PreemptionMode.RECOMPUTE:
            wanted = PreemptionChoice.RECOMPUTE  # what lay behind is dropped already
        cost, content = self._cost_of(giving, wanted), table[num_kept:]
        if gift is None:
            gift = self._begin_gift(victim, table, beneficiary)
        elif gift.cost.mode is PreemptionMode.SWAP and cost.mode is PreemptionMode.RECOMPUTE:
            self._cancel_swap(gift)  # its tier has no room for more: perhaps another one has, for all of it
            giving, content = self._facts(victim, gift.table, num_kept, beneficiary), gift.table[num_kept:]
            cost = self._cost_of(giving, wanted)
        gift.num_kept, gift.wanted, gift.cost = num_kept, wanted, cost
        gift.giving = replace(giving, num_blocks=len(gift.table) - num_kept)
        num_shared = self._num_shared(table)
        gift.whole = None
        if num_kept > num_shared:
            gift.whole = self._cost_of(self._facts(victim, table, num_shared, beneficiary), wanted)
        if beneficiary is not None and beneficiary.rank[0] == victim.rank[0]:
            gift.is_for_its_class = True
        self._release(gift, table, content[: max(gift.num_filled - num_kept, 0)])
        if not self._is_keeper(victim):
            self.gone.add(victim.request_id)
            self.seats_left += 1
        self._kept[victim.request_id] = table[:num_kept]

    def _begin_gift(self, victim: Request, table: BlockTable, beneficiary: Request | None) -> _Gift:
        gift = _Gift(
            victim,
            None if beneficiary is None else beneficiary.request_id,
            table,
            self._num_filled(victim, table),
            not self._is_keeper(victim),
        )
        self._gifts[victim.request_id] = gift
        return gift

    def _cancel_swap(self, gift: _Gift) -> None:
        """A tail is not parked where it was to be, and those of others that shared blocks of it are dropped with it."""
        tier, places = gift.cost.tier or Tier.HOST, set(gift.copied.values())
        copied = self._copied[tier]
        self._copied[tier] = {block: place for block, place in copied.items() if place not in places}
        self._draft.free_parked(tier, places)
        gift.parked, gift.copied, gift.cost = [], {}, _FREE
        for other in self._gifts.values():
            if (
                other.cost.mode is PreemptionMode.SWAP
                and other.cost.tier is tier
                and not places.isdisjoint(other.parked)
            ):
                self._cancel_swap(other)
                other.wanted = PreemptionChoice.RECOMPUTE
                other.cost = self._cost_of(other.giving, other.wanted)

    def _release(self, gift: _Gift, table: BlockTable, content: BlockTable) -> None:
        """Take the blocks behind what is kept out of a victim's hands; with a swap, say where `content` goes."""
        tail = table[gift.num_kept :]
        if gift.cost.mode is not PreemptionMode.SWAP:
            self._draft.release(tail)
            return
        tier = gift.cost.tier or Tier.HOST
        if tier is Tier.DISK and self._num_own_movable(gift.victim):
            self._move_on(gift.victim.request_id)
        copied = self._copied[tier]
        fresh = [block for block in content if block not in copied] if copied else list(content)
        if len(fresh) > self._draft.num_parked_available(tier):
            self._make_room_on_host(gift.victim, len(fresh))
        places = dict(zip(fresh, self._draft.take_parked(tier, len(fresh)), strict=True))
        gift.copied.update(places)
        gift.parked[:0] = [places[block] if block in places else copied[block] for block in content]
        if self._config.overlapped_copies:
            self._draft.promise(cast("BlockTable", tuple(fresh)))
            self._draft.release(table[gift.num_kept + len(content) :])
        else:
            copied.update(places)
            self._draft.release(tail)

    def _num_filled(self, victim: Request, table: BlockTable) -> int:
        """Leading blocks of a table that hold KV. Behind those of one who gave up a tail by swap, more is parked."""
        return min(blocks_for(victim.num_computed_tokens, self._block_size), len(table))

    def _facts(self, victim: Request, table: BlockTable, num_kept: int, beneficiary: Request | None) -> Giving:
        """Collect what the choice for one victim depends on."""
        content = table[num_kept : self._num_filled(victim, table)]
        computed, gift = victim.num_computed_tokens, self._gifts.get(victim.request_id)
        has_lost = gift is not None and gift.cost.mode is PreemptionMode.RECOMPUTE
        if has_lost or victim.request_id in self.dropped:
            computed = min(computed, len(table) * self._block_size)
        free, disk_room = self._draft.num_parked_available(Tier.HOST), self._disk_room()
        bound_to = self._own_tier(victim, gift)
        if bound_to is None and any(
            not copied.keys().isdisjoint(content) for copied in self._copied.values() if copied
        ):
            on_host = self._num_to_copy(Tier.HOST, content)  # where its blocks are copied already, if the rest fits
            bound_to = Tier.HOST if on_host <= free else Tier.DISK
        num_copied = self._num_to_copy(bound_to, content)
        movable = self._num_movable(victim) if num_copied > free and bound_to is not Tier.DISK else 0
        num_moved = max(num_copied - free, 0) if movable else 0
        own = self._num_own_movable(victim) if bound_to is Tier.HOST and num_copied > free + movable else 0
        if own and own + self._num_to_copy(Tier.DISK, content) <= disk_room:
            bound_to, num_moved, disk_room = Tier.DISK, own, disk_room - own
            num_copied = self._num_to_copy(Tier.DISK, content)
        return Giving(
            num_blocks=len(table) - num_kept,
            num_computed_tokens=computed,
            num_kept_tokens=min(num_kept * self._block_size, computed),
            num_copied_blocks=num_copied,
            is_untouched=self._is_untouched(victim),
            host_room=free + movable,
            disk_room=disk_room,
            num_moved_blocks=num_moved,
            bound_to=bound_to,
            is_awaited=self._config.overlapped_copies and beneficiary is not None,
        )

    def _num_to_copy(self, tier: Tier | None, content: BlockTable) -> int:
        """Blocks that a swap to a tier would copy; without a tier: to any, none is there already."""
        copied = self._copied[tier] if tier is not None else None
        return sum(1 for block in content if block not in copied) if copied else len(content)

    def _own_tier(self, victim: Request, gift: _Gift | None) -> Tier | None:
        """Return the tier on which a part of a victim's KV is parked, or will be by this plan; None: nothing is."""
        if gift is not None and gift.cost.mode is PreemptionMode.SWAP:
            return gift.cost.tier
        if victim.request_id in self.moves:
            return Tier.DISK
        parked = self._kv.parked.get(victim.request_id)
        return parked.tier if parked is not None and victim.request_id not in self.dropped else None

    def _cost_of(self, giving: Giving, wanted: PreemptionChoice) -> PreemptionCost:
        return choose_mode(giving, self._state.costs, wanted, block_size=self._block_size)

    # Room on the host

    def _lower_parked(self, victim: Request) -> Iterator[Request]:
        """Yield those ranked below a victim whose KV lies on the host and may move on, worst rank first.

        To the disk, or, of a strictly less urgent class, to nowhere. Blocks that several share stay where they are.
        """
        names = [name for name in self._kv.parked if name not in self.placed and name not in self._gifts]
        for request in sorted((self._state.requests[name] for name in names), key=lambda r: r.rank, reverse=True):
            if request.rank <= victim.rank:
                return
            if self._own_on_host(request.request_id):
                yield request

    def _own_on_host(self, request_id: RequestId) -> tuple[HostBlockId, ...]:
        """Return the host blocks of a request that can move on: none that others share, and not twice in a plan."""
        parked = self._kv.parked.get(request_id)
        if parked is None or parked.tier is not Tier.HOST or self._is_moved_on(request_id):
            return ()
        blocks = cast("tuple[HostBlockId, ...]", parked.blocks)
        return () if any(self._kv.host.references(block) > 1 for block in blocks) else blocks

    def _num_movable(self, victim: Request) -> int:
        """Host blocks that would be free for a victim if those ranked below it moved on."""
        disk, count = self._disk_room(), 0
        for request in self._lower_parked(victim):
            size = len(self._kv.parked[request.request_id].blocks)
            if size <= disk:
                disk -= size
                count += size
            elif request.rank[0] > victim.rank[0]:
                count += size
        return count

    def _disk_room(self) -> int:
        is_trusted = self._state.num_disk_failures < self._config.max_disk_failures
        return self._draft.num_parked_available(Tier.DISK) if is_trusted else 0

    def _make_room_on_host(self, victim: Request, num_blocks: int) -> None:
        """Let parked KV of those ranked below a victim move on until it has room."""
        for request in self._lower_parked(victim):
            if self._draft.num_parked_available(Tier.HOST) >= num_blocks:
                return
            blocks = self._kv.parked[request.request_id].blocks
            if len(blocks) <= self._disk_room():
                self._move_on(request.request_id)
            elif request.rank[0] > victim.rank[0]:
                self.dropped.append(request.request_id)
                self._draft.free_parked(Tier.HOST, blocks)

    def _num_own_movable(self, victim: Request) -> int:
        """Host blocks of a victim's earlier tail that could move to the disk, so that the next tail follows them."""
        gift = self._gifts.get(victim.request_id)
        if gift is not None and gift.copied:  # a part of this plan is on its way to the host already
            return 0
        return len(self._own_on_host(victim.request_id))

    def _move_on(self, request_id: RequestId) -> None:
        """Let the parked KV of a request move from the host to the disk."""
        blocks = self._own_on_host(request_id)
        target = cast("tuple[DiskBlockId, ...]", self._draft.take_parked(Tier.DISK, len(blocks)))
        self.moves[request_id] = TierMove(next(self._next_copy_id), request_id, blocks, target)
        self._draft.free_parked(Tier.HOST, blocks)

    # The result

    def preemptions(self) -> tuple[Preemption, ...]:
        """Return who gives way, in the order in which they were asked."""
        return tuple(
            Preemption(
                victim=gift.victim.request_id,
                beneficiary=gift.beneficiary,
                giving=gift.giving,
                wanted=gift.wanted,
                cost=gift.cost,
                num_kept=gift.num_kept,
                parked=cast("ParkedTable", tuple(gift.parked)),
                whole=gift.whole,
                is_resident=gift.is_resident,
                is_for_its_class=gift.is_for_its_class,
                has_paid=_has_paid(gift),
            )
            for gift in self._gifts.values()
        )

    def copies_out(self) -> Iterable[BlockCopy]:
        """Yield the copies of those who are swapped."""
        for gift in self._gifts.values():
            if gift.cost.mode is PreemptionMode.SWAP:
                yield BlockCopy(
                    next(self._next_copy_id),
                    gift.victim.request_id,
                    CopyDirection.OUT,
                    tuple(gift.copied),
                    cast("ParkedTable", tuple(gift.copied.values())),
                    gift.cost.tier or Tier.HOST,
                )


def _has_paid(gift: _Gift) -> bool:
    """Whether, with what it drops now, a victim has lost its own length to its class."""
    victim, giving = gift.victim, gift.giving
    lost = 0
    if gift.is_for_its_class and gift.cost.mode is PreemptionMode.RECOMPUTE:
        lost = giving.num_computed_tokens - giving.num_kept_tokens
    return victim.has_paid or (lost > 0 and victim.num_lost_in_class + lost >= victim.num_known_tokens)
