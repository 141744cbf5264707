"""What becomes of a victim's KV."""

from __future__ import annotations

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.cost_model import choose_mode
from giveway.core.ids import RequestId
from giveway.core.plan import PreemptionMode
from giveway.core.request import Request, RequestSpec


@pytest.mark.parametrize(
    ("computed", "wanted", "on_host", "mode"),
    [
        (0, PreemptionChoice.SWAP, 9, PreemptionMode.UN_ADMIT),
        (0, PreemptionChoice.RECOMPUTE, 9, PreemptionMode.UN_ADMIT),
        (1, PreemptionChoice.SWAP, 3, PreemptionMode.SWAP),
        (1, PreemptionChoice.SWAP, 2, PreemptionMode.RECOMPUTE),  # the host pool is one block short
        (1, PreemptionChoice.SWAP, 0, PreemptionMode.RECOMPUTE),
        (1, PreemptionChoice.RECOMPUTE, 9, PreemptionMode.RECOMPUTE),
    ],
)
def test_a_victim_swaps_if_the_host_has_room_and_is_un_admitted_if_it_computed_nothing(
    computed: int, wanted: PreemptionChoice, on_host: int, mode: PreemptionMode
) -> None:
    victim = Request(RequestSpec(RequestId("v"), (1,) * 12, 1), (9, 0))
    victim.admit(num_hit_tokens=8, is_guest=False)
    victim.compute(computed)
    assert choose_mode(victim, wanted=wanted, num_blocks=3, num_host_available=on_host) is mode
