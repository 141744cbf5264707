"""Six checks after every step. They read the state and count for themselves: none asks the planner for its opinion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from giveway.core.events import Finished, PromptLogprobs, StepEvent, TokenEmitted
from giveway.core.ids import DeviceBlockId, RequestId, TokenId
from giveway.core.plan import Deferral, DeferralReason, StepPlan, Tier
from giveway.core.request import FinishReason, Request, RequestSpec, RequestState
from giveway.core.scheduler import Scheduler
from giveway.runtime.backend import SampleInput
from giveway.runtime.batch_builder import forbidden_tokens
from giveway.runtime.dry.dry_backend import _START, choose_token, extend

MAX_IDLE_STEPS = 40  # longest scripted delay, the time-out of a lost copy, and the halving of a failed step


def calm_tokens(spec: RequestSpec, vocab_size: int = 1000) -> Iterator[TokenId]:
    """The tokens of a request that is never disturbed, computed from its own context alone."""
    prefix, output = _START, list[TokenId]()
    for token in spec.prompt_token_ids:
        prefix = extend(prefix, token)
    while len(output) < spec.max_new_tokens:
        sample = SampleInput(
            spec.sampling, spec.seed, len(output), spec.prompt_token_ids, output, forbidden_tokens(spec, output)
        )
        token = choose_token(prefix, vocab_size, sample)
        prefix = extend(prefix, token)
        output.append(token)
        yield token
        if token in spec.stop_token_ids and len(output) >= spec.sampling.min_tokens:
            return


class SixChecks:
    """Conservation, progress, replay equality, once only, priority, isolation."""

    def __init__(self, scheduler: Scheduler, specs: Mapping[RequestId, RequestSpec], vocab_size: int) -> None:
        self._scheduler = scheduler
        self._specs = specs
        self._vocab_size = vocab_size
        self._calm: dict[RequestId, Iterator[TokenId]] = {}
        self._num_tokens: dict[RequestId, int] = {}
        self._num_scored: dict[RequestId, int] = {}
        self._ended: set[RequestId] = set()
        self._idle_steps = 0

    def expect(self, spec: RequestSpec) -> None:
        """A request was sent."""
        self._calm[spec.request_id] = calm_tokens(spec, self._vocab_size)
        self._num_tokens[spec.request_id] = self._num_scored[spec.request_id] = 0
        self._ended.discard(spec.request_id)

    # Replay equality, once only, isolation

    def check_event(self, event: StepEvent, may_fail: Collection[str]) -> None:
        """Every token is the one of the undisturbed run, in order, once; errors hit only those who are at fault."""
        name = event.request_id
        assert name not in self._ended, f"{name} has ended, yet {event}"
        if isinstance(event, TokenEmitted):
            assert event.output_index == self._num_tokens[name], f"out of order or doubled: {event}"
            assert event.token_id == next(self._calm[name], None), f"not the token of the undisturbed run: {event}"
            wants_logprobs = self._specs[name].sampling.logprobs is not None
            assert (event.logprobs is not None) == wants_logprobs, f"log-probabilities and tokens part company: {event}"
            assert event.logprobs is None or event.logprobs.token_id == event.token_id
            self._num_tokens[name] += 1
        elif isinstance(event, PromptLogprobs):
            assert event.first_position == self._num_scored[name] + 1, f"scored twice or not at all: {event}"
            expected = self._specs[name].prompt_token_ids[event.first_position :][: len(event.values)]
            assert tuple(value.token_id for value in event.values) == expected
            self._num_scored[name] += len(event.values)
        elif isinstance(event, Finished):
            self._check_finished(event, may_fail)

    def _check_finished(self, event: Finished, may_fail: Collection[str]) -> None:
        name = event.request_id
        self._ended.add(name)
        assert event.num_output_tokens == self._num_tokens[name]
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert next(self._calm[name], None) is None, f"{name} ended early: {event}"
            spec = self._specs[name]
            if spec.sampling.prompt_logprobs is not None:
                assert self._num_scored[name] == len(spec.prompt_token_ids) - 1
        if event.reason is FinishReason.ERROR:
            assert name in may_fail or self._scheduler.state.kv.lost, f"an error of somebody else's: {event}"

    # Progress, conservation

    def check_step(self, plan: StepPlan, events: Iterable[StepEvent]) -> None:
        """Something advances, and every block is where it should be."""
        state = self._scheduler.state
        self._idle_steps = 0 if plan.num_tokens or list(events) or not state.has_unheld else self._idle_steps + 1
        assert self._idle_steps <= MAX_IDLE_STEPS, f"nothing has happened for {self._idle_steps} steps"
        kv = state.kv
        owned = {block for table in (*kv.tables.values(), *kv.kept.values()) for block in table}
        owned |= {block for copy in kv.copies.values() for block in copy.device_blocks}
        assert kv.device.num_free + sum(1 for _ in kv.device.idle_blocks()) + len(owned) == kv.device.size
        for tier in Tier:
            pool = kv.pool_of(tier)
            parked = {block for parked in kv.parked.values() if parked.tier is tier for block in parked.blocks}
            parked |= {block for copy in kv.copies.values() if copy.tier is tier for block in copy.parked_blocks}
            parked |= {block for held in kv._arriving.values() if held.tier is tier for block in held.blocks}
            assert pool.num_free + len(parked) == pool.size, f"blocks of the {tier.value} are lost"
        self._check_sharing()

    def _check_sharing(self) -> None:
        """A device block in two tables stands for the same tokens in both; without a prefix index it is in one only."""
        kv, size = self._scheduler.state.kv, self._scheduler.state.cache_config.block_size
        tables = {**kv.tables, **kv.kept}
        count = Counter(block for table in tables.values() for block in table)
        holders: dict[DeviceBlockId, tuple[int, list[TokenId]]] = {}
        for name, table in tables.items():
            request = self._scheduler.requests[name]
            for place, block in enumerate(table):
                if count[block] > 1:
                    is_branch = request.spec.branch_of is not None
                    assert kv.index is not None or is_branch, f"block {block} is in two tables"
                    content = (place, request.known_token_ids(0, (place + 1) * size))
                    assert holders.setdefault(block, content) == content, f"block {block} stands for two contexts"

    def check_drained(self) -> None:
        """After the last request only lost copies may hold anything."""
        kv = self._scheduler.state.kv
        assert not self._scheduler.requests
        assert not kv.tables
        assert not kv.kept
        assert not kv.parked
        assert not kv._hashes, "the hash chain of a finished request is kept"
        assert not self._scheduler.state.branches
        pinned = [kv.copies[copy_id] for copy_id in kv.lost]
        assert kv.device.num_owned == len({block for copy in pinned for block in copy.device_blocks})
        for tier in Tier:
            blocks = {block for copy in pinned if copy.tier is tier for block in copy.parked_blocks}
            assert kv.pool_of(tier).num_owned == len(blocks)

    # Priority

    def check_plan(self, plan: StepPlan) -> None:
        """Nobody waits while strictly less urgent work runs on what it lacks; and victims never compute."""
        computing = set(plan.request_ids())
        moving_in = {swap_in.copy.request_id for swap_in in plan.swap_ins}
        gone = {preemption.victim for preemption in plan.preemptions}
        assert len(gone) == len(plan.preemptions), "a victim gives way twice"
        assert not gone & (computing | moving_in | {admission.request_id for admission in plan.admissions})
        assert not self._scheduler.state.held & (computing | moving_in), "a request that is held was served"
        assert len(computing) == len(plan.request_ids()), "a request is twice in one batch"
        assert plan.num_tokens <= self._scheduler.state.config.max_num_batched_tokens
        if self._scheduler.state.suspects or plan.given_up:
            return
        reasons = {deferral.request_id: deferral.reason for deferral in plan.deferrals}
        after = _Afterwards(self._scheduler, plan)
        for request in self._scheduler.requests.values():
            if request.request_id in computing | moving_in | gone or request.state in _MOVING:
                continue
            if request.request_id in self._scheduler.state.held:
                continue
            reason = reasons.get(request.request_id, DeferralReason.BEHIND_DEFERRED)
            if reason is DeferralReason.COPY_IN_FLIGHT:
                assert plan.copies_out or len(self._scheduler.state.kv.copies) > len(self._scheduler.state.kv.lost)
            elif reason is DeferralReason.GIVES_WAY:
                assert plan.moves or plan.dropped or request.request_id in gone
            elif reason is DeferralReason.NO_ROOM_TO_STAY:
                assert request.has_paid
            elif reason is DeferralReason.PROMPT_IN_PROGRESS:
                assert after.is_prompt_computed_by_another(request)
            elif reason is DeferralReason.NO_TOKENS:
                assert not after.served_below(request), f"{request.request_id} got no token: {plan.describe()}"
            else:
                assert not after.would_fit(request), (
                    f"{request.request_id} waits ({reason}) on less urgent work: {plan.describe()}"
                )


_MOVING = frozenset({RequestState.SWAPPING_OUT, RequestState.SWAPPING_IN})


class _Afterwards:
    """Who holds what when a plan has been carried out, and what would be free if the less urgent let go."""

    def __init__(self, scheduler: Scheduler, plan: StepPlan) -> None:
        state = scheduler.state
        self._size = state.cache_config.block_size
        self._requests = state.requests
        self._kv = state.kv
        self._prefilling = {chunk.request_id for chunk in plan.chunks}
        self._computing = set(plan.request_ids())
        gone = {preemption.victim for preemption in plan.preemptions}
        self._tables = {name: table for name, table in state.kv.tables.items() if name not in gone}
        self._growths = {growth.request_id: growth.table for growth in plan.growths}
        self._tables.update(self._growths)
        self._kept = {name: table for name, table in state.kv.kept.items() if name not in gone}
        self._given = set[DeviceBlockId]()  # what is left of it is for those who are visited first in the next step
        for preemption in plan.preemptions:
            before = {**state.kv.tables, **state.kv.kept}[preemption.victim]
            self._kept[preemption.victim] = before[: preemption.num_kept]
            self._given |= set(before[preemption.num_kept :])
        for name, hits, new in (
            *((admission.request_id, admission.hits, admission.new) for admission in plan.admissions),
            *((swap_in.copy.request_id, swap_in.hits, swap_in.new) for swap_in in plan.swap_ins),
        ):
            self._tables[name] = self._kept.pop(name, ()) + hits + new
        live = list(state.kv.copies.values())
        if state.config.overlapped_copies:
            live += plan.copies_out
        self._pinned = {block for copy in live for block in copy.device_blocks}
        # Who gives something in this very plan, or has a copy under way, keeps the rest for one step at least.
        self._changing = {*state.swapping_out, *plan.dropped, *(move.request_id for move in plan.moves), *gone}
        self._pool = state.kv.device.size
        self._seats = state.config.max_num_seqs
        self._promised = [
            self._requests[deferral.request_id]
            for deferral in plan.deferrals
            if deferral.reason is DeferralReason.COPY_IN_FLIGHT or self._fits_but_for_headroom(deferral)
        ]

    def _fits_but_for_headroom(self, deferral: Deferral) -> bool:
        """Whether a newcomer waits although its blocks are free: for the growth of others, and nobody may take them.

        Only residents ranked below it may, for their own growth in this plan: they were visited after it.
        """
        request = self._requests[deferral.request_id]
        if deferral.reason is not DeferralReason.NO_DEVICE_BLOCKS or request.state is RequestState.RUNNING:
            return False
        held = {block for table in (*self._tables.values(), *self._kept.values()) for block in table} | self._pinned
        held -= {table[-1] for name, table in self._growths.items() if self._requests[name].rank > request.rank}
        slots = min(request.num_known_tokens + 1, request.spec.max_slots)
        kept = set(self._kept.get(request.request_id, ()))
        found = held & set(self._kv.find_prefix(request.request_id, request.num_known_tokens))  # held by others already
        return -(-slots // self._size) - len(kept | found) <= self._pool - len(held)

    def served_below(self, request: Request) -> bool:
        """Whether strictly less urgent work computes: a prefill; for a decode that got no token, also a decode."""
        is_decode = request.state is RequestState.RUNNING and request.is_decoding
        computing = self._computing if is_decode else self._prefilling
        return any(self._requests[name].rank[0] > request.rank[0] for name in computing)

    def would_fit(self, request: Request) -> bool:
        """Whether the request would fit if all strictly less urgent residents that can go let go of everything.

        False when nothing less urgent is resident: then it waits for its own class or for more urgent work. The need is
        counted high: no prefix hits, and room for everybody above to grow while the whole prefill runs at the slowest.
        """
        below, staying = set[RequestId](), dict[RequestId, tuple[DeviceBlockId, ...]]()
        for name, table in self._tables.items():
            other = self._requests[name]
            if other.rank[0] > request.rank[0] and other.state is not RequestState.SWAPPING_IN:
                below.add(name)
            elif name != request.request_id:
                staying[name] = table
        below |= {name for name, table in self._kept.items() if table and self._requests[name].rank > request.rank}
        if not below:
            return False
        held = {block for table in staying.values() for block in table} | self._pinned | self._given
        for name, table in self._kept.items():  # kept by better-ranked ones, or by those whose copy is still under way
            other = self._requests[name]
            if other.rank < request.rank or name in self._changing:
                held.update(table)
        ahead = [other for other in self._promised if other.rank < request.rank and other.state not in _MOVING]
        reserved = sum(self._need(other, staying) for other in ahead)
        if request.state is RequestState.RUNNING:
            return len(held | set(self._tables.get(request.request_id, ()))) + reserved < self._pool
        seats = len(staying) + sum(other.state is not RequestState.RUNNING for other in ahead)
        return seats < self._seats and self._pool - len(held) - reserved >= self._need(request, staying)

    def is_prompt_computed_by_another(self, request: Request) -> bool:
        """Whether another branch of the same prompt has a seat."""
        first = request.spec.branch_of
        return first is not None and any(
            name != request.request_id and self._requests[name].spec.branch_of == first for name in self._tables
        )

    def _need(self, request: Request, staying: Mapping[RequestId, tuple[DeviceBlockId, ...]]) -> int:
        """Blocks that a request lacks at most: one to grow, or everything known and the growth of those above."""
        if request.state is RequestState.RUNNING:
            return 1
        slots = request.num_known_tokens + 1
        return -(-slots // self._size) + self._growth(request, staying)

    def _growth(self, request: Request, staying: Mapping[RequestId, tuple[DeviceBlockId, ...]]) -> int:
        steps = request.num_known_tokens - request.num_computed_tokens + 1
        if request.num_preemptions:  # one that was evicted before comes back only to stay for a block of steps
            steps += self._size
        above = [(self._requests[name], len(table)) for name, table in staying.items()]
        return sum(
            max(-(-min(other.num_known_tokens + steps, other.spec.max_slots) // self._size) - owned, 0)
            for other, owned in above
            if other.rank < request.rank
        )
