"""The consistency check notices each kind of damage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from giveway.core.errors import InvariantError
from giveway.core.ids import CopyId, DeviceBlockId, HostBlockId, RequestId
from giveway.core.invariants import check_invariants
from giveway.core.kv_cache import Parked, Tier
from giveway.core.request import RequestState
from giveway.core.state import SchedulerState
from tests.world import World

R = RequestId("resident")
W = RequestId("waiting")


def make_state() -> SchedulerState:
    world = World(device_blocks=8, host_blocks=4)
    world.make_resident("resident", prompt_tokens=7)
    world.submit("waiting", prompt_tokens=7)
    world.plan()
    state = world.scheduler.state
    check_invariants(state)
    return state


def drop_table(state: SchedulerState) -> None:
    state.kv.release(R)


def park_a_waiting_request(state: SchedulerState) -> None:
    state.kv.host.take([HostBlockId(0)])
    state.kv.parked[W] = Parked(Tier.HOST, (HostBlockId(0),))


def keep_blocks_of_nobody(state: SchedulerState) -> None:
    state.kv.admit(RequestId("ghost"), hits=(), new=(DeviceBlockId(7),))


def change_state_without_moving(state: SchedulerState) -> None:
    state.requests[W].state = RequestState.PREEMPTED
    state.requests[W].num_computed_tokens = 3


def list_a_resident_among_newcomers(state: SchedulerState) -> None:
    state.newcomers.add(state.requests[R])


def forget_a_newcomer(state: SchedulerState) -> None:
    state.newcomers.remove(state.requests[W])


def count_a_token_too_many(state: SchedulerState) -> None:
    state.requests[R].num_known_tokens += 1


def compute_more_than_is_known(state: SchedulerState) -> None:
    state.requests[R].num_computed_tokens = 8


def compute_beyond_the_table(state: SchedulerState) -> None:
    request = state.requests[R]
    request.output_token_ids += [1] * 9
    request.num_known_tokens += 9
    request.num_computed_tokens = 9


def take_a_block_without_a_table(state: SchedulerState) -> None:
    state.kv.device.take([DeviceBlockId(7)])


def let_a_waiting_request_keep_blocks(state: SchedulerState) -> None:
    state.kv.device.take([DeviceBlockId(7)])
    state.kv.kept[W] = (DeviceBlockId(7),)


def let_a_resident_keep_blocks_beside_its_table(state: SchedulerState) -> None:
    state.kv.device.take([DeviceBlockId(7)])
    state.kv.kept[R] = (DeviceBlockId(7),)


def count_more_than_was_kept(state: SchedulerState) -> None:
    request = state.requests[R]
    state.kv.give_up(R, 1)
    state.residents.remove(request)
    request.preempt(num_kept_tokens=5)
    state.newcomers.add(request)


def park_less_than_was_computed(state: SchedulerState) -> None:
    request = state.requests[R]
    state.kv.give_up(R, 1)
    state.residents.remove(request)
    request.begin_swap_out()
    request.finish_swap_out()
    state.newcomers.add(request)
    state.kv.parked[R] = Parked(Tier.HOST, ())


def change_a_rank_without_resorting(state: SchedulerState) -> None:
    state.requests[W].rank = (0, 9)
    state.newcomers.add(state.requests[W])


def await_a_copy_that_nobody_began(state: SchedulerState) -> None:
    state.awaited_copies[W] = CopyId(3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_table, "lacks a block table"),
        (park_a_waiting_request, "waiting is WAITING, parked: Parked"),
        (keep_blocks_of_nobody, "still own blocks"),
        (change_state_without_moving, "waiting counts 3 tokens and keeps 0 blocks"),
        (list_a_resident_among_newcomers, "listed among the newcomers"),
        (forget_a_newcomer, "2 unfinished requests, but 1 are listed"),
        (count_a_token_too_many, "not prompt \\+ output"),
        (compute_more_than_is_known, "does not hold"),
        (compute_beyond_the_table, "9 tokens into 2 blocks"),
        (take_a_block_without_a_table, "counts 1 references but 0 hold it"),
        (await_a_copy_that_nobody_began, "copies are awaited by"),
        (let_a_waiting_request_keep_blocks, "waiting is WAITING and keeps 1 blocks"),
        (let_a_resident_keep_blocks_beside_its_table, "resident is RUNNING and keeps 1 blocks"),
        (count_more_than_was_kept, "counts 5 tokens and keeps 1 blocks"),
        (park_less_than_was_computed, "keeps 1 blocks and parks 0 for 7 tokens"),
        (change_a_rank_without_resorting, "newcomers are out of rank order"),
    ],
)
def test_damage_is_noticed_and_named(damage: Callable[[SchedulerState], None], message: str) -> None:
    state = make_state()
    damage(state)
    with pytest.raises(InvariantError, match=message):
        check_invariants(state)
