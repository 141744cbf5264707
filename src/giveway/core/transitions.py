"""What happens to requests: the places where one changes hands between containers, pools and states.

Called by `Scheduler` alone, out of accept, commit and discard. Each transition keeps request, container and KV cache in
step, and returns the events that tell of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from giveway.core.events import Admitted, CopyEnded, Finished, ParkedMoved, Preempted, StepEvent
from giveway.core.ids import CopyId, DeviceBlockId, RequestId
from giveway.core.kv_cache import BlockCopy, CopyDirection, Tier, TierMove
from giveway.core.plan import Admission, Preemption, PreemptionMode, StepOutcome, StepPlan, SwapIn
from giveway.core.request import FinishReason, Request, RequestState
from giveway.core.state import SchedulerState


class Transitions:
    """Writes the state of one scheduler."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._block_size = state.cache_config.block_size

    # Giving way

    def give_all(self, plan: StepPlan, outcome: StepOutcome, events: list[StepEvent]) -> None:
        """Carry out what a plan takes away: parked KV moves on first, so that others find its place free."""
        now_s = outcome.now_s
        events += [self.move(move, now_s, succeeded=move.copy_id in outcome.finished_copies) for move in plan.moves]
        for request_id in plan.dropped:
            self.drop_parked(request_id)
            events.append(ParkedMoved(request_id, now_s, 0, None))
        copies = {copy.request_id: copy for copy in plan.copies_out}
        events += [self.give_way(preemption, copies.get(preemption.victim), now_s) for preemption in plan.preemptions]

    def give_way(self, preemption: Preemption, copy: BlockCopy | None, now_s: float) -> StepEvent:
        """Take from a request what a plan says. copy: with a swap, what carries its KV off the device."""
        state, request = self._state, self._state.requests[preemption.victim]
        container = state.residents if request.state is RequestState.RUNNING else state.newcomers
        container.remove(request)
        if preemption.mode is PreemptionMode.SWAP and copy is not None:
            self._begin(copy, now_s)
            state.kv.begin_copy_out(copy, num_kept=preemption.num_kept, parked=preemption.parked)
            request.begin_swap_out()
            state.swapping_out[preemption.victim] = request
        else:
            self._drop_tail(request, preemption)
            state.newcomers.add(request)
        return Preempted(
            preemption.victim,
            now_s,
            preemption.beneficiary,
            preemption.mode,
            preemption.num_blocks,
            preemption.num_kept,
            preemption.cost.tier,
            is_again=not preemption.is_resident,
        )

    def _drop_tail(self, request: Request, preemption: Preemption) -> None:
        kv = self._state.kv
        kv.give_up(request.request_id, preemption.num_kept)
        if preemption.mode is PreemptionMode.UN_ADMIT:
            request.un_admit()
            return
        if preemption.mode is PreemptionMode.RECOMPUTE:
            kv.drop_parked(request.request_id)
        request.preempt(
            num_kept_tokens=preemption.num_kept * self._block_size,
            is_for_its_class=preemption.is_for_its_class,
            has_paid=preemption.has_paid,
        )

    def drop_resident(self, request: Request, now_s: float) -> Preempted:
        """Take everything from a resident whose KV is of unknown content."""
        state = self._state
        num_blocks = len(state.kv.tables[request.request_id])
        state.kv.release(request.request_id)
        state.residents.remove(request)
        request.preempt()
        state.newcomers.add(request)
        return Preempted(request.request_id, now_s, None, PreemptionMode.RECOMPUTE, num_blocks)

    def drop_kept(self, dirty: set[DeviceBlockId], now_s: float) -> list[StepEvent]:
        """Let those who kept a block of unknown content lose it and everything behind it."""
        state = self._state
        events: list[StepEvent] = []
        for request_id, kept in list(state.kv.kept.items()):
            place = next((place for place, block in enumerate(kept) if block in dirty), None)
            if place is not None:
                events.append(self._lose_kept_from(state.requests[request_id], place, now_s))
        return events

    def drop_all_kept(self, request: Request, now_s: float) -> StepEvent:
        """Let one that has given way lose all that it kept, and what of it is parked: it computes everything again."""
        return self._lose_kept_from(request, 0, now_s)

    def _lose_kept_from(self, request: Request, place: int, now_s: float) -> StepEvent:
        kv, request_id = self._state.kv, request.request_id
        num_lost = len(kv.kept[request_id]) - place
        kv.give_up(request_id, place)
        kv.drop_parked(request_id)
        request.preempt(num_kept_tokens=place * self._block_size)
        return Preempted(request_id, now_s, None, PreemptionMode.RECOMPUTE, num_lost, num_kept=place, is_again=True)

    # Parked KV

    def move(self, move: TierMove, now_s: float, *, succeeded: bool) -> StepEvent:
        """Parked KV has moved on to the disk, or is lost on the way: its place on the host is somebody else's now."""
        self._tell_disk(succeeded=succeeded)
        if succeeded:
            self._state.kv.move_to_disk(move)
        else:
            self.drop_parked(move.request_id)
        return ParkedMoved(move.request_id, now_s, len(move.host_blocks), Tier.DISK if succeeded else None)

    def drop_parked(self, request_id: RequestId) -> None:
        """Let the parked KV of a swapped request go; what it kept stays."""
        kv, request = self._state.kv, self._state.requests[request_id]
        kv.drop_parked(request_id)
        request.lose_copy(num_kept_tokens=self._kept_tokens(request_id))

    def _kept_tokens(self, request_id: RequestId) -> int:
        return len(self._state.kv.kept.get(request_id, ())) * self._block_size

    def _tell_disk(self, *, succeeded: bool) -> None:
        self._state.num_disk_failures = 0 if succeeded else self._state.num_disk_failures + 1

    # Taking a seat

    def admit(self, admission: Admission, now_s: float) -> StepEvent:
        """Seat a newcomer that has blocks to compute in."""
        state, request = self._state, self._state.requests[admission.request_id]
        num_found = max(admission.num_computed_tokens - request.num_computed_tokens, 0)
        is_resume = request.num_admissions > 0
        state.kv.admit(
            admission.request_id,
            hits=admission.hits,
            new=admission.new,
            priority=request.rank[0],
            num_published=admission.num_computed_tokens // self._block_size,
        )
        self._seat(request)
        request.admit(num_hit_tokens=num_found, is_guest=admission.is_guest)
        return Admitted(admission.request_id, now_s, num_found, admission.is_guest, is_resume)

    def begin_swap_in(self, swap_in: SwapIn, now_s: float) -> StepEvent:
        """Seat a swapped request; its KV is on the way."""
        state, request = self._state, self._state.requests[swap_in.copy.request_id]
        self._begin(swap_in.copy, now_s)
        state.kv.begin_copy_in(swap_in.copy, hits=swap_in.hits, new=swap_in.new, priority=request.rank[0])
        self._seat(request)
        request.begin_swap_in(is_guest=swap_in.is_guest)
        return Admitted(request.request_id, now_s, 0, swap_in.is_guest, True)

    def _seat(self, request: Request) -> None:
        self._state.newcomers.remove(request)
        self._state.residents.add(request)

    # Copies

    def _begin(self, copy: BlockCopy, now_s: float) -> None:
        state = self._state
        state.copy_started_s[copy.copy_id] = now_s
        state.awaited_copies[copy.request_id] = copy.copy_id

    def end_copies(self, planned: Iterable[BlockCopy], outcome: StepOutcome, events: list[StepEvent]) -> None:
        """End every copy that the outcome tells of; without overlap, a planned one that it does not tell of is lost.

        Called once after the copies out have begun, so that their blocks are free for admissions, and once after the
        copies in have begun; ids that are not under way are left for the other call, or belong to nobody any more.
        """
        for copy_id in outcome.finished_copies:
            self.end_copy(copy_id, outcome.now_s, events, failed=False)
        for copy_id in outcome.failed_copies:
            self.end_copy(copy_id, outcome.now_s, events, failed=True)
        if not self._state.config.overlapped_copies:
            for copy in planned:
                self.end_copy(copy.copy_id, outcome.now_s, events, failed=True)

    def end_copy(self, copy_id: CopyId, now_s: float, events: list[StepEvent], *, failed: bool) -> None:
        """End one copy, if it is under way."""
        state = self._state
        copy = state.kv.copies.get(copy_id)
        if copy is None:
            return
        state.copy_started_s.pop(copy_id, None)
        if copy.tier is Tier.DISK and copy.direction is CopyDirection.OUT:
            self._tell_disk(succeeded=not failed)
        request = self._stop_awaiting(copy)
        if failed:
            if request is not None:
                events.append(self._lose_kv(request, copy, now_s))
            sharers = state.kv.sharing_parked(copy) if copy.direction is CopyDirection.OUT else []
            state.kv.end_copy(copy_id, keep=False)
            for sharer in sharers:
                self._lose_shared(sharer, now_s, events)
            return
        state.kv.end_copy(copy_id, keep=request is not None)
        if request is None:
            return
        if copy.direction is CopyDirection.OUT:
            del state.swapping_out[request.request_id]
            request.finish_swap_out()
            state.newcomers.add(request)
        else:
            request.finish_swap_in()
            self.publish(request)
        events.append(
            CopyEnded(request.request_id, now_s, copy.direction, len(copy.device_blocks), copy.tier, failed=False)
        )

    def _lose_shared(self, request_id: RequestId, now_s: float, events: list[StepEvent]) -> None:
        """Blocks that a failed copy was to write were to be shared with another request: it has lost its KV too."""
        copy_id = self._state.awaited_copies.get(request_id)
        if copy_id is not None:
            self.end_copy(copy_id, now_s, events, failed=True)
        elif request_id in self._state.requests and request_id in self._state.kv.parked:
            self.drop_parked(request_id)

    def _stop_awaiting(self, copy: BlockCopy) -> Request | None:
        """Return the request that waits for this copy, and now no longer does; None: it gave up waiting, or has ended.

        By copy and not by name alone: another request may bear the name of one that was aborted during its copy.
        """
        state = self._state
        if state.awaited_copies.get(copy.request_id) != copy.copy_id:
            return None
        del state.awaited_copies[copy.request_id]
        return state.requests[copy.request_id]

    def lose_overdue_copies(self, now_s: float) -> list[StepEvent]:
        """Declare overdue copies lost. Their blocks stay pinned: a late copy may still write them."""
        state = self._state
        events: list[StepEvent] = []
        for copy_id, started_s in list(state.copy_started_s.items()):
            if now_s - started_s > state.config.copy_timeout_s:
                del state.copy_started_s[copy_id]
                state.kv.lose_copy(copy_id)
                copy = state.kv.copies[copy_id]
                request = self._stop_awaiting(copy)
                if request is not None:
                    events.append(self._lose_kv(request, copy, now_s))
        return events

    def _lose_kv(self, request: Request, copy: BlockCopy, now_s: float) -> CopyEnded:
        """The copy failed or is lost: the request behind it recomputes, but for what it had kept."""
        state = self._state
        if request.state is RequestState.SWAPPING_OUT:
            del state.swapping_out[request.request_id]
        else:
            state.residents.remove(request)
            state.kv.release(request.request_id)
        request.lose_copy(num_kept_tokens=self._kept_tokens(request.request_id))
        state.newcomers.add(request)
        return CopyEnded(request.request_id, now_s, copy.direction, len(copy.device_blocks), copy.tier, failed=True)

    # Progress and the end

    def publish(self, request: Request) -> None:
        """Make the full blocks of a resident findable."""
        kv = self._state.kv
        if kv.index is not None:
            kv.learn(request.request_id, request.num_known_tokens, request.known_token_ids, request.spec.cache_salt)
            kv.publish(request.request_id, request.num_computed_tokens)

    def finish(self, request: Request, reason: FinishReason, detail: str | None, now_s: float) -> Finished:
        """End a request in whatever state; copies under way keep their blocks until they end."""
        state, request_id = self._state, request.request_id
        if request.state is RequestState.SWAPPING_OUT:
            del state.swapping_out[request_id]
        elif request.state in (RequestState.RUNNING, RequestState.SWAPPING_IN):
            state.residents.remove(request)
        else:
            state.newcomers.remove(request)
        state.kv.forget(request_id)
        state.awaited_copies.pop(request_id, None)
        del state.requests[request_id]
        state.held.discard(request_id)
        self._leave_branches(request)
        request.finish(reason)
        return Finished(
            request_id,
            now_s,
            reason,
            detail,
            len(request.output_token_ids),
            request.num_preemptions,
            request.num_recomputed_tokens,
        )

    def _leave_branches(self, request: Request) -> None:
        first = request.spec.branch_of
        if first is not None:
            branches = self._state.branches[first]
            branches.remove(request)
            if not branches:
                del self._state.branches[first]
