"""What becomes of a victim's KV."""

from __future__ import annotations

from dataclasses import replace

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.cost_model import PreemptionCost, choose_mode
from giveway.core.cost_profile import SHIPPED, CostProfile
from giveway.core.ids import RequestId
from giveway.core.plan import PreemptionMode
from giveway.core.request import Request, RequestSpec

AUTO, SWAP, RECOMPUTE = PreemptionChoice.AUTO, PreemptionChoice.SWAP, PreemptionChoice.RECOMPUTE


def choose(
    computed: int, wanted: PreemptionChoice, *, on_host: int = 99, costs: CostProfile = SHIPPED, shared: int = 0
) -> PreemptionCost:
    victim = Request(RequestSpec(RequestId("v"), (1,) * 2000, 1), (9, 0))
    victim.admit(num_hit_tokens=8, is_guest=False)
    victim.compute(computed)
    num_blocks = -(-(8 + computed) // 4)
    return choose_mode(
        victim,
        costs,
        wanted=wanted,
        num_blocks=num_blocks,
        block_size=4,
        num_host_available=on_host,
        num_shared_tokens=shared,
    )


@pytest.mark.parametrize(
    ("computed", "wanted", "on_host", "mode"),
    [
        (0, SWAP, 9, PreemptionMode.UN_ADMIT),
        (0, RECOMPUTE, 9, PreemptionMode.UN_ADMIT),
        (0, AUTO, 0, PreemptionMode.UN_ADMIT),
        (1, SWAP, 3, PreemptionMode.SWAP),
        (1, SWAP, 2, PreemptionMode.RECOMPUTE),  # the host pool is one block short
        (1, AUTO, 2, PreemptionMode.RECOMPUTE),
        (1, SWAP, 0, PreemptionMode.RECOMPUTE),
        (1, RECOMPUTE, 9, PreemptionMode.RECOMPUTE),
    ],
)
def test_a_victim_swaps_if_the_host_has_room_and_is_un_admitted_if_it_computed_nothing(
    computed: int, wanted: PreemptionChoice, on_host: int, mode: PreemptionMode
) -> None:
    assert choose(computed, wanted, on_host=on_host).mode is mode


def test_auto_recomputes_short_contexts_and_swaps_long_ones_where_the_lines_cross() -> None:
    # Goal: a copy that costs 50 ms whatever its size, then little; recomputing costs 1 ms a token.
    costs = replace(SHIPPED, token_s=0.001, context_s=0.0, copy_s=0.05, slot_out_s=1e-6, slot_in_s=1e-6)
    modes = {computed: choose(computed, AUTO, costs=costs).mode for computed in (40, 80, 120, 300)}
    assert modes == {
        40: PreemptionMode.RECOMPUTE,
        80: PreemptionMode.RECOMPUTE,
        120: PreemptionMode.SWAP,
        300: PreemptionMode.SWAP,
    }


def test_auto_follows_the_cheaper_way_and_tells_both_prices() -> None:
    for computed in range(1, 300, 7):
        cost = choose(computed, AUTO)
        assert cost.swap_s is not None
        cheaper = PreemptionMode.SWAP if cost.swap_s < cost.recompute_s else PreemptionMode.RECOMPUTE
        assert cost.mode is cheaper


def test_what_others_hold_and_the_index_finds_costs_nothing_to_recompute() -> None:
    # 108 computed tokens of which 104 come back for nothing; a swap would copy them all.
    costs = replace(SHIPPED, token_s=0.001, copy_s=0.01)
    assert choose(100, AUTO, costs=costs).mode is PreemptionMode.SWAP
    assert choose(100, AUTO, costs=costs, shared=104).mode is PreemptionMode.RECOMPUTE
