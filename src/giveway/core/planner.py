"""How a step is chosen: one walk down the ranking on a draft, reading state and writing nothing.

Residents and newcomers are visited together, best rank first. Each is given tokens and blocks; when blocks or a seat
are lacking, victims come from further down the ranking. So a victim has never been served in the same plan, and there
is nothing to undo.
"""

from __future__ import annotations

from collections.abc import Iterator

from giveway.core.budget import prefill_tokens
from giveway.core.config import PreemptionChoice, SchedulingPolicy, blocks_for
from giveway.core.cost_model import choose_mode
from giveway.core.errors import KVCacheFullError
from giveway.core.ids import BlockTable, CopyId, RequestId
from giveway.core.kv_draft import KVDraft
from giveway.core.plan import (
    Admission,
    BlockCopy,
    CopyDirection,
    Decodes,
    Deferral,
    DeferralReason,
    GivenUp,
    Growth,
    Preemption,
    PreemptionMode,
    ScheduledChunk,
    StepPlan,
    SwapIn,
)
from giveway.core.policy import choose_victims, in_victim_order, may_displace
from giveway.core.request import Request, RequestState, slots_to_admit
from giveway.core.state import SchedulerState


def plan_step(state: SchedulerState) -> StepPlan:
    """Return the next step. Raises KVCacheFullError under the policy `none` when a resident cannot grow."""
    walk = _Walk(state)
    walk.force_out()
    if state.suspects:
        walk.visit_suspects()
    else:
        walk.visit_all()
    return walk.plan()


class _Walk:
    """One plan in the making."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.config = state.config
        self.kv = state.kv
        self.block_size = state.cache_config.block_size
        self.residents = state.residents.as_list()
        self.draft = KVDraft(state.kv)
        self.tokens_left = state.config.max_num_batched_tokens
        self.seats_left = state.config.max_num_seqs - len(state.residents)
        self.place = 0  # index in residents of the first one not yet visited
        self.newcomers_open = True  # False: no newcomer further down can be seated
        self.num_looks = 0  # newcomers looked at since the first that could not be placed
        # The fewest blocks that a newcomer lacked in vain: those further down may displace nobody whom it could not.
        self.refused_blocks: int | None = None
        self.has_deferred_newcomer = False
        self.has_prefill = False
        self.gone: set[RequestId] = set()  # victims of this plan
        self.seated: list[tuple[Request, int]] = []  # newcomers seated by this plan, and the blocks of each
        self.preemptions: list[Preemption] = []
        self.copies_out: list[BlockCopy] = []
        self.swap_ins: list[SwapIn] = []
        self.admissions: list[Admission] = []
        self.growths: list[Growth] = []
        self.chunks: list[ScheduledChunk] = []
        self.decode_ids: list[RequestId] = []
        self.decode_positions: list[int] = []
        self.decode_tables: list[BlockTable] = []
        self.deferrals: list[Deferral] = []

    # The walk

    def force_out(self) -> None:
        """Preempt those who were told to give way; whoever is not running any more is left alone."""
        for request_id, choice in self.state.forced.items():
            request = self.state.requests.get(request_id)
            if request is not None and request.state is RequestState.RUNNING:
                self._preempt(request, beneficiary=None, wanted=choice)
                self._defer(request, DeferralReason.FORCED_OUT)

    def visit_all(self) -> None:
        """Visit residents and newcomers in rank order."""
        newcomers = iter(self.state.newcomers)
        head = next(newcomers, None)
        for place, resident in enumerate(self.residents):
            self.place = place
            if head is not None and self.newcomers_open and head.rank < resident.rank:
                head = self._visit_newcomers(head, newcomers, before=resident)
            self.place = place + 1
            if not self.gone or resident.request_id not in self.gone:
                self._visit_resident(resident)
        self.place = len(self.residents)
        if head is not None and self.newcomers_open:
            self._visit_newcomers(head, newcomers, before=None)

    def _visit_newcomers(
        self, head: Request | None, newcomers: Iterator[Request], before: Request | None
    ) -> Request | None:
        """Visit newcomers ranked above `before`; return the first that is not."""
        while head is not None and self.newcomers_open and (before is None or head.rank < before.rank):
            self._visit_newcomer(head)
            head = next(newcomers, None)
        return head

    def visit_suspects(self) -> None:
        """Visit the suspects being tried, and nobody else."""
        group = self.state.suspects[0].targets
        for request in sorted(self.state.requests.values(), key=lambda request: request.rank):
            if request.request_id in self.gone:
                continue
            if request.request_id not in group:
                if request.state is RequestState.RUNNING:
                    self._defer(request, DeferralReason.FAULT_ISOLATION)
                continue
            self.place = sum(1 for resident in self.residents if resident.rank <= request.rank)
            if request.state in (RequestState.RUNNING, RequestState.SWAPPING_IN):
                self._visit_resident(request)
            elif request.state is not RequestState.SWAPPING_OUT:
                self._visit_newcomer(request)

    # Residents

    def _visit_resident(self, request: Request) -> None:
        computed = request.num_computed_tokens
        if request.state is not RequestState.RUNNING:
            self._defer(request, DeferralReason.COPY_IN_FLIGHT)
        elif request.num_known_tokens - computed > 1:
            self._give_prefill(request, computed, self.kv.tables[request.request_id])
        elif self.tokens_left < 1:
            self._defer(request, DeferralReason.NO_TOKENS)
        else:
            table = self.kv.tables[request.request_id]
            if computed >= len(table) * self.block_size:
                grown = self._grow(request, table)
                if grown is None:
                    return
                table = grown
            self._give_decode(request.request_id, computed, table)

    def _grow(self, request: Request, table: BlockTable) -> BlockTable | None:
        """Add one block to a resident's table, displacing others if need be; None: it was deferred."""
        if self.draft.num_available < 1:
            if self.config.policy is SchedulingPolicy.NONE:
                raise self._pool_is_full()
            reason = self._make_room(request, lacking_blocks=1, lacking_seats=0, keep=())
            if reason is not None:
                self._defer(request, reason)
                return None
            if self.has_deferred_newcomer:  # what is freed beyond this block is theirs: they are asked first next time
                self.newcomers_open = False
        table = table + self.draft.take(1)
        self.growths.append(Growth(request.request_id, table))
        return table

    def _pool_is_full(self) -> KVCacheFullError:
        used = (self.kv.device.size - self.draft.num_available) * self.block_size
        total = self.state.cache_config.num_device_slots
        return KVCacheFullError(
            f"KV cache full: used {used} of {total} slots by {len(self.residents)} requests, and the policy 'none' "
            "lets nobody give way. Use --scheduling-policy fcfs or priority, or a larger --kv-cache-memory-bytes."
        )

    # Newcomers

    def _visit_newcomer(self, request: Request) -> None:
        reason = self._place_newcomer(request)
        if reason is not None:
            self._defer(request, reason)
            if reason is DeferralReason.COPY_IN_FLIGHT:
                return  # its room is held for it, so nobody behind it can do harm
            self.has_deferred_newcomer = True
        if self.has_deferred_newcomer:
            self.num_looks += 1
            self.newcomers_open = self.num_looks <= self.config.max_guest_looks
        if reason is DeferralReason.NO_SEAT or self.config.policy is SchedulingPolicy.NONE:
            self.newcomers_open = self.newcomers_open and reason is None  # whoever is behind may displace nobody else

    def _place_newcomer(self, request: Request) -> DeferralReason | None:
        """Seat a newcomer with blocks for its whole known context and the next token, or say why not."""
        hits = self._find_hits(request)
        num_new = blocks_for(slots_to_admit(request.spec, request.num_known_tokens), self.block_size) - len(hits)
        lacking_blocks = num_new + self.draft.num_unreferenced(hits) - self.draft.num_available
        lacking_seats = 1 - self.seats_left
        if lacking_blocks > 0 or lacking_seats > 0:
            reason = self._why_hopeless(request, lacking_blocks, lacking_seats)
            if reason is not None:
                return reason
        lacking_blocks += self._headroom(request)
        if lacking_blocks > 0 or lacking_seats > 0:
            reason = self._make_room(request, lacking_blocks=lacking_blocks, lacking_seats=lacking_seats, keep=hits)
            if reason is not None:
                return reason
        self.seats_left -= 1
        if request.state is RequestState.SWAPPED:
            self._swap_in(request, num_new)
        else:
            self.draft.share(hits)
            new = self.draft.take(num_new)
            self.admissions.append(Admission(request.request_id, hits, new, self.has_deferred_newcomer))
            self._give_prefill(request, len(hits) * self.block_size, hits + new)
        self.seated.append((request, len(hits) + num_new))
        return None

    def _why_hopeless(self, request: Request, lacking_blocks: int, lacking_seats: int) -> DeferralReason | None:
        """Say why a newcomer that lacks something must wait, if that can be told without counting blocks."""
        if self.refused_blocks is not None and lacking_blocks >= self.refused_blocks:
            return DeferralReason.NO_DEVICE_BLOCKS
        if next(self._candidates(request), None) is not None:
            # Nobody is displaced for a request that would compute nothing in this step.
            has_use = self.tokens_left > 0 or request.state is RequestState.SWAPPED
            return None if has_use else DeferralReason.NO_TOKENS
        if lacking_seats > 0:
            return DeferralReason.NO_SEAT
        return None if self.draft.num_promised else DeferralReason.NO_DEVICE_BLOCKS

    def _find_hits(self, request: Request) -> BlockTable:
        """Look a newcomer's context up in the prefix index; one whose prompt is scored must compute it."""
        if request.state is RequestState.SWAPPED or request.spec.sampling.prompt_logprobs is not None:
            return ()
        return self.draft.find_prefix(request.request_id, request.num_known_tokens)

    def _headroom(self, request: Request) -> int:
        """Blocks into which residents ranked above will grow while this newcomer's prefill runs (blocks).

        Without it the newcomer would be evicted by the next growth, before its prefill has come to anything. One that
        was evicted before stays out for some steps longer: a swap-in takes a single step, so it would come back for
        every block that somebody leaves and be evicted again by the next growth.
        """
        wanted = request.num_known_tokens - request.num_computed_tokens
        tokens_a_step = max(self.config.max_num_batched_tokens - len(self.residents), self.block_size)
        num_steps = blocks_for(wanted, tokens_a_step) + (self.block_size if request.num_preemptions else 0)
        above = [(resident, len(self.kv.tables[resident.request_id])) for resident in self.residents[: self.place]]
        blocks = -len(self.growths)  # already taken from the draft, but not yet in the tables
        for resident, owned in above + self.seated:
            if resident.request_id not in self.gone:
                slots = min(resident.num_known_tokens + num_steps, resident.spec.max_slots)
                blocks += max(blocks_for(slots, self.block_size) - owned, 0)
        return max(blocks, 0)

    def _swap_in(self, request: Request, num_blocks: int) -> None:
        host_blocks = self.kv.host_tables[request.request_id]
        table = self.draft.take(num_blocks)
        copy = BlockCopy(
            self._new_copy_id(), request.request_id, CopyDirection.IN, table[: len(host_blocks)], host_blocks
        )
        self.swap_ins.append(SwapIn(copy, table, self.has_deferred_newcomer))

    # Making room

    def _make_room(
        self, request: Request, *, lacking_blocks: int, lacking_seats: int, keep: BlockTable
    ) -> DeferralReason | None:
        """Free what a request lacks, now or by a copy under way, or say why it must wait. Nobody goes in vain."""
        still_lacking = lacking_blocks - self.draft.num_promised
        if still_lacking > 0 or lacking_seats > 0:
            victims = choose_victims(
                self._candidates(request),
                lacking_blocks=still_lacking,
                lacking_seats=lacking_seats,
                freed=self.draft.freed_blocks(frozenset(keep)),
                table_of=lambda victim: self.kv.tables[victim.request_id],
            )
            if not victims:
                if still_lacking < 1:
                    return DeferralReason.NO_SEAT
                if request.state is not RequestState.RUNNING and not keep:
                    self.refused_blocks = min(lacking_blocks, self.refused_blocks or lacking_blocks)
                return DeferralReason.NO_DEVICE_BLOCKS
            before = self.draft.num_available - self.draft.num_unreferenced(keep)
            for victim in victims:
                self._preempt(victim, beneficiary=request.request_id, wanted=self.config.preemption_mode)
            lacking_blocks -= self.draft.num_available - self.draft.num_unreferenced(keep) - before
        if lacking_blocks > 0:  # the rest comes back with copies under way
            self.draft.hold(self.draft.num_available + lacking_blocks)
            if request.state is not RequestState.RUNNING:
                self.seats_left -= 1
            return DeferralReason.COPY_IN_FLIGHT
        return None

    def _candidates(self, request: Request) -> Iterator[Request]:
        """Yield the residents that this request may displace, who gives way first coming first."""
        policy = self.config.policy
        for victim in in_victim_order(self.residents):
            if victim.rank <= request.rank:
                return
            if (
                victim.state is RequestState.RUNNING
                and victim.request_id not in self.gone
                and may_displace(request, victim, policy)
            ):
                yield victim

    def _preempt(self, victim: Request, *, beneficiary: RequestId | None, wanted: PreemptionChoice) -> None:
        table = self.kv.tables[victim.request_id]
        num_filled = blocks_for(victim.num_computed_tokens, self.block_size)
        cost = choose_mode(
            victim,
            self.state.costs,
            wanted=wanted,
            num_blocks=num_filled,
            block_size=self.block_size,
            num_host_available=self.draft.num_host_available,
            num_shared_tokens=self._num_shared_tokens(table),
        )
        if cost.mode is PreemptionMode.SWAP:
            self._swap_out(victim.request_id, table, num_filled)
        else:
            self.draft.release(table)
        self.preemptions.append(
            Preemption(victim.request_id, beneficiary, cost.mode, len(table), cost.recompute_s, cost.swap_s)
        )
        self.gone.add(victim.request_id)
        self.seats_left += 1

    def _num_shared_tokens(self, table: BlockTable) -> int:
        """Leading tokens of a victim that others hold too: the prefix index gives them back after a recompute."""
        if self.kv.index is None:
            return 0
        shared = 0
        for block in table:
            if self.draft.references(block) < 2 or self.kv.index.hash_of(block) is None:
                break
            shared += 1
        return shared * self.block_size

    def _swap_out(self, request_id: RequestId, table: BlockTable, num_filled: int) -> None:
        host_blocks = self.draft.take_host(num_filled) or ()
        self.copies_out.append(
            BlockCopy(self._new_copy_id(), request_id, CopyDirection.OUT, table[:num_filled], host_blocks)
        )
        if self.config.overlapped_copies:
            self.draft.promise(table[:num_filled])
            table = table[num_filled:]
        self.draft.release(table)

    def _new_copy_id(self) -> CopyId:
        return CopyId(self.state.next_copy_id + len(self.copies_out) + len(self.swap_ins))

    # Tokens

    def _give_decode(self, request_id: RequestId, position: int, table: BlockTable) -> None:
        self.tokens_left -= 1
        self.decode_ids.append(request_id)
        self.decode_positions.append(position)
        self.decode_tables.append(table)

    def _give_prefill(self, request: Request, start: int, table: BlockTable) -> None:
        wanted = request.num_known_tokens - start
        num_tokens = prefill_tokens(
            wanted=wanted,
            left=self.tokens_left,
            set_aside=self._num_decodes_behind(request.rank[0]),
            block_size=self.block_size,
            is_best_prefill=not self.has_prefill,
        )
        self.has_prefill = True
        if num_tokens < 1:
            self._defer(request, DeferralReason.NO_TOKENS)
        elif wanted == 1:
            self._give_decode(request.request_id, start, table)
        else:
            self.tokens_left -= num_tokens
            self.chunks.append(ScheduledChunk(request.request_id, start, num_tokens, num_tokens == wanted, table))

    def _num_decodes_behind(self, priority: int) -> int:
        """Count decodes of one class that are still to be visited."""
        count = 0
        for resident in self.residents[self.place :]:
            if resident.rank[0] != priority:
                break
            if resident.is_decoding and resident.request_id not in self.gone:
                count += 1
        return count

    # The result

    def _defer(self, request: Request, reason: DeferralReason) -> None:
        self.deferrals.append(Deferral(request.request_id, reason))

    def plan(self) -> StepPlan:
        """Return what was chosen; a best-ranked request that nothing can ever help is given up."""
        plan = StepPlan(
            step_id=self.state.next_step_id,
            state_version=self.state.version,
            preemptions=tuple(self.preemptions),
            copies_out=tuple(self.copies_out),
            swap_ins=tuple(self.swap_ins),
            admissions=tuple(self.admissions),
            growths=tuple(self.growths),
            chunks=tuple(self.chunks),
            decodes=Decodes(tuple(self.decode_ids), tuple(self.decode_positions), tuple(self.decode_tables)),
            deferrals=tuple(self.deferrals),
        )
        if plan.is_empty and self.state.requests and not self.state.suspects and not self.kv.has_live_copies:
            return StepPlan(
                plan.step_id, plan.state_version, deferrals=plan.deferrals, given_up=(self._give_up_best(),)
            )
        return plan

    def _give_up_best(self) -> GivenUp:
        """Give up the best-ranked resident, else newcomer: all that could be freed for it was not enough.

        Residents first: a newcomer may be waiting for one of its own class, which it may not displace.
        """
        best = next(iter([*self.residents, *self.state.newcomers]))
        needed = blocks_for(slots_to_admit(best.spec, best.num_known_tokens), self.block_size)
        pool = self.kv.device
        return GivenUp(
            best.request_id,
            f"request {best.request_id!r} needs {needed} KV blocks to go on, nobody is left to give way, and "
            f"{pool.num_available} of {pool.size} are available ({len(self.kv.lost)} lost copies pin the rest)",
        )
