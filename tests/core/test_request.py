"""Progress of one request: the table of legal moves is complete, and counters mean what they say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from giveway.core.errors import InvariantError
from giveway.core.ids import RequestId
from giveway.core.request import (
    LEGAL_MOVES,
    NEWCOMER_STATES,
    FinishReason,
    Request,
    RequestSpec,
    RequestState,
    blocks_to_finish,
    paid_rank,
    slots_to_admit,
)

S = RequestState

Event = Callable[[Request], None]


def un_admit_after_output(request: Request) -> None:
    request.output_token_ids.append(7)
    request.un_admit()


# Every event of a request, and the state that it leads to.
EVENTS: dict[str, tuple[Event, RequestState]] = {
    "admit": (lambda r: r.admit(num_hit_tokens=0, is_guest=False), S.RUNNING),
    "un_admit": (lambda r: r.un_admit(), S.WAITING),
    "un_admit with output": (un_admit_after_output, S.PREEMPTED),
    "preempt": (lambda r: r.preempt(), S.PREEMPTED),
    "begin_swap_out": (lambda r: r.begin_swap_out(), S.SWAPPING_OUT),
    "finish_swap_out": (lambda r: r.finish_swap_out(), S.SWAPPED),
    "begin_swap_in": (lambda r: r.begin_swap_in(is_guest=False), S.SWAPPING_IN),
    "finish_swap_in": (lambda r: r.finish_swap_in(), S.RUNNING),
    "lose_copy": (lambda r: r.lose_copy(), S.PREEMPTED),
    "finish": (lambda r: r.finish(FinishReason.ABORT), S.FINISHED),
}

WAYS: dict[RequestState, tuple[str, ...]] = {
    S.WAITING: (),
    S.RUNNING: ("admit",),
    S.SWAPPING_OUT: ("admit", "begin_swap_out"),
    S.SWAPPED: ("admit", "begin_swap_out", "finish_swap_out"),
    S.SWAPPING_IN: ("admit", "begin_swap_out", "finish_swap_out", "begin_swap_in"),
    S.PREEMPTED: ("admit", "preempt"),
    S.FINISHED: ("finish",),
}

# Events that leave the state as it is: no move, so no row of the table allows or forbids them.
STAYS = {("preempt", S.PREEMPTED)}  # more of what it had kept is taken


def make_request(*, prompt_tokens: int = 6, max_new_tokens: int = 4) -> Request:
    spec = RequestSpec(RequestId("r"), tuple(range(prompt_tokens)), max_new_tokens)
    return Request(spec, rank=(10, 0))


def request_in(state: RequestState) -> Request:
    request = make_request()
    for event in WAYS[state]:
        EVENTS[event][0](request)
    assert request.state is state
    return request


@pytest.mark.parametrize(("start", "end"), list(product(RequestState, RequestState)))
def test_every_pair_of_states_is_reached_by_an_event_or_refused(start: RequestState, end: RequestState) -> None:
    # Goal: the table is complete. A legal pair has an event that makes the move, any other pair has none.
    made = False
    for name, (event, leads_to) in EVENTS.items():
        if leads_to is not end or (name, start) in STAYS:
            continue
        request = request_in(start)
        if end in LEGAL_MOVES[start]:
            event(request)
            assert request.state is end
            made = True
        else:
            with pytest.raises(InvariantError, match=f"{start.name} -> {end.name} is not a legal move"):
                event(request)
            assert request.state is start
    assert made == (end in LEGAL_MOVES[start])


def test_every_state_has_a_row_and_only_the_last_one_is_final() -> None:
    assert LEGAL_MOVES.keys() == set(RequestState)
    assert [state for state, moves in LEGAL_MOVES.items() if not moves] == [S.FINISHED]
    assert all(S.FINISHED in moves for state, moves in LEGAL_MOVES.items() if state is not S.FINISHED)
    assert {S.WAITING, S.PREEMPTED, S.SWAPPED} == NEWCOMER_STATES


def test_an_admission_that_computed_something_cannot_be_taken_back() -> None:
    request = request_in(S.RUNNING)
    request.compute(1)
    with pytest.raises(InvariantError, match="computed 1 tokens: cannot un-admit"):
        request.un_admit()


def test_taking_an_admission_back_counts_as_no_preemption() -> None:
    request = make_request()
    request.admit(num_hit_tokens=4, is_guest=True)
    request.un_admit()
    assert (request.state, request.num_preemptions, request.num_computed_tokens) == (S.WAITING, 0, 0)
    assert not request.is_guest


def test_repeated_eviction_leaves_the_size_of_the_state_constant() -> None:
    request = request_in(S.RUNNING)
    request.compute(6)
    request.append(9)
    for _ in range(100):
        request.preempt()
        request.admit(num_hit_tokens=0, is_guest=False)
        request.compute(6)
    assert request.output_token_ids == [9]
    assert (request.num_known_tokens, request.num_computed_tokens, request.num_preemptions) == (7, 6, 100)


def test_recomputation_is_what_was_computed_before_and_is_computed_again() -> None:
    # Goal: hits are not recomputed; tokens above the high-water mark are new.
    request = request_in(S.RUNNING)
    assert request.compute(6) == 0
    request.append(9)
    assert request.compute(1) == 0
    request.preempt()
    request.admit(num_hit_tokens=4, is_guest=False)
    assert request.compute(2) == 2
    assert request.compute(2) == 1
    assert request.num_recomputed_tokens == 3


def test_generated_tokens_follow_the_prompt_without_a_seam() -> None:
    request = make_request(prompt_tokens=3)
    for token in (7, 8, 9):
        request.append(token)
    known = [0, 1, 2, 7, 8, 9]
    for start in range(7):
        for stop in range(start, 7):
            assert request.known_token_ids(start, stop) == known[start:stop]


def test_a_request_decodes_when_only_its_newest_token_is_left() -> None:
    request = request_in(S.RUNNING)
    request.compute(5)
    assert not request.is_decoding  # the last prompt token is a prefill of one
    request.compute(1)
    request.append(3)
    assert request.is_decoding


@pytest.mark.parametrize(
    ("prompt", "max_new", "known", "slots"),
    [(7, 8, 7, 8), (8, 1, 8, 8), (8, 2, 8, 9), (8, 2, 9, 9), (1, 1, 1, 1)],
)
def test_an_admission_takes_the_known_context_and_the_next_token_but_never_a_slot_for_the_last(
    prompt: int, max_new: int, known: int, slots: int
) -> None:
    spec = RequestSpec(RequestId("r"), tuple(range(prompt)), max_new)
    assert slots_to_admit(spec, known) == slots


def test_the_last_token_needs_no_block() -> None:
    assert blocks_to_finish(RequestSpec(RequestId("r"), (1,) * 8, 1), 4) == 2
    assert blocks_to_finish(RequestSpec(RequestId("r"), (1,) * 8, 2), 4) == 3


# Tails: a request that has given way and kept its leading blocks


def test_a_preemption_that_leaves_a_head_costs_only_what_lay_behind_it() -> None:
    request = request_in(S.RUNNING)
    request.compute(6)
    request.append(9)
    request.preempt(num_kept_tokens=4)
    assert (request.state, request.num_computed_tokens, request.num_preemptions) == (S.PREEMPTED, 4, 1)
    request.admit(num_hit_tokens=0, is_guest=False)
    assert request.num_own_computed_tokens == 4  # it cannot be un-admitted for free
    assert request.compute(3) == 2
    assert request.num_recomputed_tokens == 2


def test_giving_up_more_of_what_was_kept_is_no_second_preemption() -> None:
    request = request_in(S.RUNNING)
    request.compute(6)
    for num_kept in (5, 4, 0):
        request.preempt(num_kept_tokens=num_kept)
        assert (request.state, request.num_computed_tokens, request.num_preemptions) == (S.PREEMPTED, num_kept, 1)


def test_a_preemption_never_makes_a_request_count_more_than_it_computed() -> None:
    # Goal: its last kept block is only partly filled.
    request = request_in(S.RUNNING)
    request.compute(5)
    request.preempt(num_kept_tokens=8)
    assert request.num_computed_tokens == 5


@pytest.mark.parametrize("is_swapped", [False, True])
def test_what_was_kept_may_be_swapped_out_later_and_that_is_no_second_preemption(is_swapped: bool) -> None:
    request = request_in(S.RUNNING)
    request.compute(6)
    if is_swapped:
        request.begin_swap_out()
        request.finish_swap_out()
    else:
        request.preempt(num_kept_tokens=4)
    request.begin_swap_out()
    assert (request.state, request.num_preemptions) == (S.SWAPPING_OUT, 1)


def test_hits_behind_what_was_kept_count_as_found_and_not_as_computed() -> None:
    request = make_request(prompt_tokens=16)
    request.admit(num_hit_tokens=0, is_guest=False)
    request.compute(16)
    request.append(1)
    request.preempt(num_kept_tokens=4)
    request.admit(num_hit_tokens=8, is_guest=False)
    assert (request.num_computed_tokens, request.num_hit_tokens, request.num_own_computed_tokens) == (12, 8, 4)


# What its own class may cost a request


def test_only_tokens_that_were_dropped_for_its_own_class_count_as_paid() -> None:
    request = request_in(S.RUNNING)
    request.compute(6)
    request.preempt(num_kept_tokens=4, is_for_its_class=True)
    assert request.num_lost_in_class == 2
    request.admit(num_hit_tokens=0, is_guest=False)
    request.compute(2)
    request.preempt()  # for a more urgent class
    assert request.num_lost_in_class == 2


def test_whoever_has_paid_goes_to_the_head_of_its_class_once_and_for_all() -> None:
    request = make_request(prompt_tokens=6, max_new_tokens=8)
    group, number = request.rank
    request.admit(num_hit_tokens=0, is_guest=False)
    request.compute(5)
    request.preempt(is_for_its_class=True)
    assert (request.has_paid, request.rank, request.num_lost_in_class) == (False, (group, number), 5)
    for _ in range(2):
        request.admit(num_hit_tokens=0, is_guest=False)
        request.compute(1)
        request.preempt(is_for_its_class=True, has_paid=True)
        assert request.has_paid
        assert request.rank == paid_rank((group, number)) < (group, 0)
    assert paid_rank((group, 3)) < paid_rank((group, 4)) < (group, 0) < paid_rank((group + 1, 0))


def test_a_resumed_request_settles_until_it_has_emitted_enough() -> None:
    request = request_in(S.RUNNING)
    assert not request.is_settling(2)  # it was never resumed
    request.compute(6)
    request.append(1)
    request.preempt()
    request.admit(num_hit_tokens=0, is_guest=False)
    assert request.is_settling(2)
    request.append(2)
    assert request.is_settling(2)
    request.append(3)
    assert not request.is_settling(2)
    assert not request.is_settling(0)
