"""How a step is chosen: one walk down the ranking on a draft, reading state and writing nothing.

Residents and newcomers are visited together, best rank first. Each is given tokens and blocks; when blocks or a seat
are lacking, victims come from further down the ranking. So a victim has never been served in the same plan, and there
is nothing to undo.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from giveway.core.budget import StepTime, prefill_tokens
from giveway.core.config import SchedulingPolicy, blocks_for
from giveway.core.displacement import Displacement
from giveway.core.errors import KVCacheFullError
from giveway.core.ids import BlockTable, CopyId, RequestId
from giveway.core.kv_draft import KVDraft
from giveway.core.plan import (
    Admission,
    BlockCopy,
    BlockFork,
    CopyDirection,
    Decodes,
    Deferral,
    DeferralReason,
    GivenUp,
    Growth,
    ScheduledChunk,
    StepPlan,
    SwapIn,
)
from giveway.core.request import Request, RequestState, blocks_to_finish, slots_to_admit
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
        self.copy_ids: Iterator[CopyId] = map(CopyId, count(state.next_copy_id))
        self.room = Displacement(state, self.draft, next_copy_id=self.copy_ids)
        self.gone = self.room.gone  # victims of this plan
        self.tokens_left = state.config.max_num_batched_tokens
        self.place = 0  # index in residents of the first one not yet visited
        self.newcomers_open = True  # False: no newcomer further down can be seated
        self.num_looks = 0  # newcomers looked at since the first that could not be placed
        # The fewest blocks that a newcomer lacked in vain: those further down may displace nobody whom it could not.
        self.refused_blocks: int | None = None
        self.has_deferred_newcomer = False
        self.left_over = 0  # blocks that a growth freed beyond its need: they are for newcomers further up
        self.is_room_spoken_for = False  # what is free is not for guests: a better-ranked one fits but for the headroom
        self.has_prefill = False
        self.seated: list[tuple[Request, int]] = []  # newcomers seated by this plan, and the blocks of each
        self.swap_ins: list[SwapIn] = []
        self.admissions: list[Admission] = []
        self.growths: list[Growth] = []
        self.chunks: list[ScheduledChunk] = []
        self.decode_ids: list[RequestId] = []
        self.decode_positions: list[int] = []
        self.time = StepTime(state, self.decode_positions)
        self.decode_tables: list[BlockTable] = []
        self.deferrals: list[Deferral] = []

    # The walk

    def force_out(self) -> None:
        """Preempt those who were told to give way or are held; whoever is not running is left alone."""
        state, held = self.state, self.state.held
        # Sorted, because a plan follows from the state alone.
        wanted = dict.fromkeys(sorted(held), self.config.preemption_mode) | state.forced
        for request_id, choice in wanted.items():
            request = state.requests.get(request_id)
            if request is not None and request.state is RequestState.RUNNING:
                # Leading blocks that a held one kept would stand in everybody's way for as long as it is held.
                self.room.force_out(request, choice, keeps_shared=request_id not in held)
                is_told = request_id in state.forced
                self._defer(request, DeferralReason.FORCED_OUT if is_told else DeferralReason.HELD)

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
        elif self.tokens_left < 1 or (self.has_prefill and not self.time.has_time_to_decode(request)):
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
            reason = self.room.make_room(request, lacking_blocks=1, lacking_seats=0, keep=())
            if reason is not None:
                self._defer(request, reason, lacking_blocks=1)
                return None
            if self.has_deferred_newcomer:  # what is freed beyond this block is theirs: they are asked first next time
                self.left_over = self.draft.num_available - 1
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
        if request.request_id in self.state.held:
            self._defer(request, DeferralReason.HELD)
            return
        if self.room.is_changing(request.request_id):
            self._defer(request, DeferralReason.GIVES_WAY)
            return
        if self._is_prompt_in_progress(request):
            self._defer(request, DeferralReason.PROMPT_IN_PROGRESS)
            return
        if request.has_paid and not self._has_room_to_stay(request):
            self._defer(request, DeferralReason.NO_ROOM_TO_STAY)
            return
        reason, lacking_blocks = self._place_newcomer(request)
        if reason is not None:
            self._defer(request, reason, lacking_blocks)
            if reason is DeferralReason.COPY_IN_FLIGHT:
                return  # its room is held for it, so nobody behind it can do harm
            self.has_deferred_newcomer = True
        if self.has_deferred_newcomer:
            self.num_looks += 1
            self.newcomers_open = self.num_looks <= self.config.max_guest_looks
        if reason is DeferralReason.NO_SEAT or self.config.policy is SchedulingPolicy.NONE:
            self.newcomers_open = self.newcomers_open and reason is None  # whoever is behind may displace nobody else

    def _place_newcomer(self, request: Request) -> tuple[DeferralReason | None, int]:
        """Seat a newcomer with blocks for its whole known context and the next token, or say why not.

        Returns the reason, None if it is seated, and the blocks that it lacks.
        """
        kept = self.room.kept_by(request.request_id)
        hits = self._find_hits(request, kept)
        num_new = max(
            blocks_for(slots_to_admit(request.spec, request.num_known_tokens), self.block_size) - len(kept) - len(hits),
            0,
        )
        room = 0 if self.is_room_spoken_for else max(self.draft.num_available - self.left_over, 0)
        lacking_blocks = num_new + self.draft.num_unreferenced(hits) - room
        fits = lacking_blocks <= 0
        lacking_seats = 1 - self.room.seats_left
        if lacking_blocks > 0 or lacking_seats > 0:
            reason = self._why_hopeless(request, lacking_blocks, lacking_seats)
            if reason is not None:
                return reason, max(lacking_blocks, 0)
        lacking_blocks += self._headroom(request)
        if lacking_blocks > 0 or lacking_seats > 0:
            reason = self.room.make_room(request, lacking_blocks=lacking_blocks, lacking_seats=lacking_seats, keep=hits)
            if reason is not None:
                self.is_room_spoken_for = self.is_room_spoken_for or fits
                if reason is DeferralReason.NO_DEVICE_BLOCKS and not hits and not kept:
                    self.refused_blocks = min(lacking_blocks, self.refused_blocks or lacking_blocks)
                return reason, max(lacking_blocks, 0)
        self.room.seats_left -= 1
        self.room.placed.add(request.request_id)
        self._seat(request, kept, hits, num_new)
        self.seated.append((request, len(kept) + len(hits) + num_new))
        return None, 0

    def _seat(self, request: Request, kept: BlockTable, hits: BlockTable, num_new: int) -> None:
        """Take the blocks of a newcomer; parked KV that is not to be found on the device any more is copied back."""
        self.draft.share(hits)
        new = self.draft.take(num_new)
        is_guest = self.has_deferred_newcomer and not request.has_paid  # its class has no more claim on that one
        parked = self.kv.parked.get(request.request_id)
        if parked is not None and len(hits) < len(parked.blocks):
            blocks = parked.blocks[len(hits) :]
            copy = BlockCopy(
                next(self.copy_ids), request.request_id, CopyDirection.IN, new[: len(blocks)], blocks, parked.tier
            )
            self.swap_ins.append(SwapIn(copy, hits, new, is_guest))
            return
        computed = request.num_computed_tokens
        if hits:
            computed = max(computed, (len(kept) + len(hits)) * self.block_size)
        fork = self._find_fork(request, computed, len(kept) + len(hits), new)
        if fork is not None:
            computed = min(len(request.spec.prompt_token_ids), request.num_known_tokens - 1)
        self.admissions.append(Admission(request.request_id, hits, new, is_guest, computed, fork))
        self._give_prefill(request, computed, kept + hits + new)

    def _has_room_to_stay(self, request: Request) -> bool:
        """Whether all of its class who have paid could grow to their end side by side, this newcomer with them.

        None of them may displace another, so otherwise all could come to stand still, each lacking a block.
        """
        peers = [request, *self.residents, *(seated for seated, _ in self.seated)]
        needed = sum(
            blocks_to_finish(peer.spec, self.block_size)
            for peer in peers
            if peer.has_paid and peer.rank[0] == request.rank[0] and peer.request_id not in self.gone
        )
        return needed <= self.kv.device.size

    def _why_hopeless(self, request: Request, lacking_blocks: int, lacking_seats: int) -> DeferralReason | None:
        """Say why a newcomer that lacks something must wait, if that can be told without counting blocks."""
        if self.refused_blocks is not None and lacking_blocks >= self.refused_blocks:
            return DeferralReason.NO_DEVICE_BLOCKS
        if self.room.has_candidates(request):
            # Nobody is displaced for a request that would compute nothing in this step.
            has_use = request.state is RequestState.SWAPPED or self._has_tokens_for(request)
            return None if has_use else DeferralReason.NO_TOKENS
        if lacking_seats > 0:
            return DeferralReason.NO_SEAT
        return None if self.draft.num_promised else DeferralReason.NO_DEVICE_BLOCKS

    def _has_tokens_for(self, request: Request) -> bool:
        if not self.has_prefill:
            return self.tokens_left > 0
        in_time = self.time.prefill_tokens_left(request, request.num_computed_tokens)
        return self.tokens_left > 0 and (in_time is None or in_time > 0)

    # Shared prefixes

    def _find_hits(self, request: Request, kept: BlockTable) -> BlockTable:
        """Return the blocks behind what a newcomer kept that hold its further context already.

        One whose prompt is scored must compute it itself.
        """
        if len(kept) * self.block_size > request.num_computed_tokens:
            return ()  # the last block that it kept is only partly filled
        if request.state is not RequestState.SWAPPED and request.spec.sampling.prompt_logprobs is not None:
            return ()
        found = self.draft.find_prefix(request.request_id, request.num_known_tokens)
        for branch in self._other_branches(request):
            num_prompt = self._num_prompt_blocks(request, branch.num_computed_tokens)
            if num_prompt > len(found):
                found = self.kv.tables[branch.request_id][:num_prompt]
        if request.spec.sampling.prompt_logprobs is not None:  # what it has not scored yet it must compute
            found = found[: request.num_computed_tokens // self.block_size]
        return found[len(kept) :]

    def _other_branches(self, request: Request) -> Iterator[Request]:
        """Yield the running branches of the same prompt."""
        if request.spec.branch_of is not None:
            for branch in self.state.branches[request.spec.branch_of]:
                is_running = branch.state is RequestState.RUNNING and branch.request_id not in self.gone
                if is_running and branch is not request:
                    yield branch

    def _num_prompt_blocks(self, request: Request, num_computed: int) -> int:
        """Full blocks of the prompt among the first tokens, at least one token short of everything known."""
        known = min(len(request.spec.prompt_token_ids), request.num_known_tokens - 1)
        return min(known, num_computed) // self.block_size

    def _is_prompt_in_progress(self, request: Request) -> bool:
        """Whether another branch is computing the prompt of a newcomer that has nothing of it yet."""
        if request.spec.branch_of is None or request.spec.sampling.prompt_logprobs is not None:
            return False
        if request.num_computed_tokens or self.room.kept_by(request.request_id):
            return False
        needed = self._num_prompt_blocks(request, request.num_known_tokens)
        if len(self._find_hits(request, ())) >= needed:
            return False
        seated = any(other.spec.branch_of == request.spec.branch_of for other, _ in self.seated)
        return seated or any(True for _ in self._other_branches(request))

    def _find_fork(self, request: Request, num_computed: int, num_had: int, new: BlockTable) -> BlockFork | None:
        """Find the partly filled block at the end of the prompt in another branch, if copying it saves computing.

        num_had: blocks of the request's table ahead of the new ones.
        """
        known = min(len(request.spec.prompt_token_ids), request.num_known_tokens - 1)
        place = known // self.block_size
        if known <= num_computed or num_computed != place * self.block_size or num_had != place:
            return None
        if request.spec.sampling.prompt_logprobs is not None:
            return None
        for branch in self._other_branches(request):
            if branch.num_computed_tokens >= known:
                return BlockFork(self.kv.tables[branch.request_id][place], new[0])
        return None

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
            in_time=self.time.prefill_tokens_left(request, start),
        )
        self.has_prefill = True
        if num_tokens < 1:
            self._defer(request, DeferralReason.NO_TOKENS)
        elif wanted == 1:
            self._give_decode(request.request_id, start, table)
        else:
            self.time.spend(request, start, num_tokens)
            self.tokens_left -= num_tokens
            self.chunks.append(ScheduledChunk(request.request_id, start, num_tokens, num_tokens == wanted, table))

    def _num_decodes_behind(self, priority: int) -> int:
        """Count decodes of one class that are still to be visited."""
        count = 0
        for resident in self.residents[self.place :]:
            if resident.rank[0] != priority:
                break
            is_served = resident.state is RequestState.RUNNING and resident.request_id not in self.gone
            if resident.is_decoding and is_served:
                count += 1
        return count

    # The result

    def _defer(self, request: Request, reason: DeferralReason, lacking_blocks: int = 0) -> None:
        lacking_blocks = lacking_blocks if reason is DeferralReason.NO_DEVICE_BLOCKS else 0
        self.deferrals.append(Deferral(request.request_id, reason, lacking_blocks))

    def plan(self) -> StepPlan:
        """Return what was chosen; a best-ranked request that nothing can ever help is given up."""
        plan = StepPlan(
            step_id=self.state.next_step_id,
            state_version=self.state.version,
            preemptions=self.room.preemptions(),
            moves=tuple(self.room.moves.values()),
            dropped=tuple(self.room.dropped),
            copies_out=tuple(self.room.copies_out()),
            swap_ins=tuple(self.swap_ins),
            admissions=tuple(self.admissions),
            growths=tuple(self.growths),
            chunks=tuple(self.chunks),
            decodes=Decodes(tuple(self.decode_ids), tuple(self.decode_positions), tuple(self.decode_tables)),
            deferrals=tuple(self.deferrals),
        )
        if plan.is_empty and self.state.has_unheld and not self.state.suspects and not self.kv.has_live_copies:
            return StepPlan(
                plan.step_id, plan.state_version, deferrals=plan.deferrals, given_up=(self._give_up_best(),)
            )
        return plan

    def _give_up_best(self) -> GivenUp:
        """Give up the best-ranked resident, else newcomer: all that could be freed for it was not enough.

        Residents first: a newcomer may be waiting for one of its own class, which it may not displace.
        """
        held = self.state.held
        best = next(each for each in (*self.residents, *self.state.newcomers) if each.request_id not in held)
        needed = blocks_for(slots_to_admit(best.spec, best.num_known_tokens), self.block_size)
        pool = self.kv.device
        return GivenUp(
            best.request_id,
            f"request {best.request_id!r} needs {needed} KV blocks to go on, nobody is left to give way, and "
            f"{pool.num_available} of {pool.size} are available ({len(self.kv.lost)} lost copies pin the rest)",
        )
