"""The full consistency check: everything that must hold between two steps. Slow; after every step in tests."""

from __future__ import annotations

from itertools import pairwise

from giveway.core.config import blocks_for
from giveway.core.errors import InvariantError
from giveway.core.request import NEWCOMER_STATES, Request, RequestState
from giveway.core.state import SchedulerState

RESIDENT_STATES = frozenset({RequestState.RUNNING, RequestState.SWAPPING_IN})
MOVING_STATES = frozenset({RequestState.SWAPPING_OUT, RequestState.SWAPPING_IN})


def check_invariants(state: SchedulerState) -> None:
    """Raise InvariantError, with what is wrong, unless the whole state is consistent."""
    state.kv.check()
    _check_containers(state)
    for request in state.requests.values():
        _check_request(state, request)
    residents = len(state.residents)
    if residents > state.config.max_num_seqs:
        raise InvariantError(f"{residents} residents on {state.config.max_num_seqs} seats")
    if not state.held <= state.requests.keys():
        raise InvariantError(f"finished requests are still held: {sorted(state.held - state.requests.keys())}")
    owners = state.kv.tables.keys() | state.kv.kept.keys() | state.kv.parked.keys()
    if not owners <= state.requests.keys():
        raise InvariantError(f"finished requests still own blocks: {sorted(owners - state.requests.keys())}")


def _check_containers(state: SchedulerState) -> None:
    for name, group, states in (
        ("residents", list(state.residents), RESIDENT_STATES),
        ("newcomers", list(state.newcomers), NEWCOMER_STATES),
        ("swapping_out", list(state.swapping_out.values()), frozenset({RequestState.SWAPPING_OUT})),
    ):
        for request in group:
            if request.state not in states or state.requests.get(request.request_id) is not request:
                raise InvariantError(f"{request.request_id} is {request.state.name} but listed among the {name}")
        if name != "swapping_out" and any(a.rank >= b.rank for a, b in pairwise(group)):
            raise InvariantError(f"the {name} are out of rank order")
    moving = {name for name, request in state.requests.items() if request.state in MOVING_STATES}
    if moving != state.awaited_copies.keys():
        raise InvariantError(f"copies are awaited by {sorted(state.awaited_copies)}, under way for {sorted(moving)}")
    listed = len(state.residents) + len(state.newcomers) + len(state.swapping_out)
    if listed != len(state.requests):
        raise InvariantError(f"{len(state.requests)} unfinished requests, but {listed} are listed")


def _check_request(state: SchedulerState, request: Request) -> None:
    name, block_size = request.request_id, state.cache_config.block_size
    table = state.kv.tables.get(name)
    kept, parked = state.kv.kept.get(name, ()), state.kv.parked.get(name)
    if (table is not None) != (request.state in RESIDENT_STATES):
        raise InvariantError(
            f"{name} is {request.state.name} and {'has' if table is not None else 'lacks'} a block table"
        )
    if (parked is not None) != (request.state is RequestState.SWAPPED):
        raise InvariantError(f"{name} is {request.state.name}, parked: {parked}")
    if kept and (table is not None or request.state is RequestState.WAITING):
        raise InvariantError(f"{name} is {request.state.name} and keeps {len(kept)} blocks")
    if table is not None and len(table) * block_size < request.num_computed_tokens:
        raise InvariantError(f"{name} has computed {request.num_computed_tokens} tokens into {len(table)} blocks")
    num_parked = len(parked.blocks) if parked is not None else 0
    if parked is not None and len(kept) + num_parked != blocks_for(request.num_computed_tokens, block_size):
        raise InvariantError(
            f"{name} keeps {len(kept)} blocks and parks {num_parked} for {request.num_computed_tokens} tokens"
        )
    if request.state is RequestState.WAITING and request.num_computed_tokens:
        raise InvariantError(f"{name} is waiting but counts {request.num_computed_tokens} computed tokens")
    if request.state is RequestState.PREEMPTED and request.num_computed_tokens > len(kept) * block_size:
        raise InvariantError(f"{name} counts {request.num_computed_tokens} tokens and keeps {len(kept)} blocks")
    if request.num_known_tokens != len(request.spec.prompt_token_ids) + len(request.output_token_ids):
        raise InvariantError(f"{name} knows {request.num_known_tokens} tokens, which is not prompt + output")
    if not request.num_hit_tokens <= request.num_computed_tokens < request.num_known_tokens:
        raise InvariantError(
            f"{name}: {request.num_hit_tokens} found <= {request.num_computed_tokens} computed < "
            f"{request.num_known_tokens} known does not hold"
        )
