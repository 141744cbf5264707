"""A planner that knows no priorities: what is left when ranking, victims and the cost model are taken out.

Only a baseline. It needs memory that suffices for everybody it admits, because nobody ever gives way.
"""

from __future__ import annotations

from giveway.core.config import SchedulingPolicy, blocks_for
from giveway.core.errors import ConfigError, InvariantError, KVCacheFullError
from giveway.core.ids import BlockTable, RequestId
from giveway.core.kv_draft import KVDraft
from giveway.core.plan import Admission, Decodes, Growth, ScheduledChunk, StepPlan
from giveway.core.request import Request, slots_to_admit
from giveway.core.state import SchedulerState


def plan_in_arrival_order(state: SchedulerState) -> StepPlan:
    """Serve residents, then admit newcomers while seats and blocks suffice, all in the order of their arrival.

    Prefix hits are not looked for. Raises KVCacheFullError when a resident cannot grow, ConfigError under the policy
    `priority` (its lists are not in arrival order), InvariantError for orders and faults that it cannot plan for.
    """
    if state.config.policy is SchedulingPolicy.PRIORITY:
        raise ConfigError("the plain planner needs the policy 'none' or 'fcfs': under 'priority' requests are ranked")
    if state.forced or state.suspects:
        raise InvariantError("the plain planner can neither make a request give way nor single out a faulty one")
    return _Line(state).plan()


class _Line:
    """One plan in the making."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._block_size = state.cache_config.block_size
        self._draft = KVDraft(state.kv)
        self._tokens_left = state.config.max_num_batched_tokens
        self._admissions: list[Admission] = []
        self._growths: list[Growth] = []
        self._chunks: list[ScheduledChunk] = []
        self._decode_ids: list[RequestId] = []
        self._decode_positions: list[int] = []
        self._decode_tables: list[BlockTable] = []

    def plan(self) -> StepPlan:
        """Walk down the line once."""
        state = self._state
        for resident in state.residents:
            if self._tokens_left:
                self._serve(resident, self._table_with_room(resident))
        seats_left = state.config.max_num_seqs - len(state.residents)
        for newcomer in state.newcomers:
            num_blocks = blocks_for(slots_to_admit(newcomer.spec, newcomer.num_known_tokens), self._block_size)
            if not (self._tokens_left and seats_left) or num_blocks > self._draft.num_available:
                break  # nobody overtakes
            seats_left -= 1
            table = self._draft.take(num_blocks)
            self._admissions.append(Admission(newcomer.request_id, (), table, is_guest=False))
            self._serve(newcomer, table)
        return StepPlan(
            step_id=state.next_step_id,
            state_version=state.version,
            admissions=tuple(self._admissions),
            growths=tuple(self._growths),
            chunks=tuple(self._chunks),
            decodes=Decodes(tuple(self._decode_ids), tuple(self._decode_positions), tuple(self._decode_tables)),
        )

    def _table_with_room(self, resident: Request) -> BlockTable:
        """Return the table of a resident, one block longer if its next token needs that."""
        table = self._state.kv.tables[resident.request_id]
        if resident.num_computed_tokens < len(table) * self._block_size:
            return table
        if self._draft.num_available < 1:
            raise KVCacheFullError(
                f"all {self._state.cache_config.num_device_blocks} KV blocks are taken, {resident.request_id!r} needs "
                "one more, and the plain planner lets nobody give way. Raise --num-kv-blocks."
            )
        table += self._draft.take(1)
        self._growths.append(Growth(resident.request_id, table))
        return table

    def _serve(self, request: Request, table: BlockTable) -> None:
        """Give a request what is left of the token budget, at most all that it has to compute."""
        start = request.num_computed_tokens
        wanted = request.num_known_tokens - start
        num_tokens = min(wanted, self._tokens_left)
        self._tokens_left -= num_tokens
        if wanted == 1:
            self._decode_ids.append(request.request_id)
            self._decode_positions.append(start)
            self._decode_tables.append(table)
        else:
            self._chunks.append(ScheduledChunk(request.request_id, start, num_tokens, num_tokens == wanted, table))
