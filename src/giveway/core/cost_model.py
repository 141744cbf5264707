"""What becomes of a victim's KV. By option for now; every victim that has computed nothing is un-admitted for free."""

from __future__ import annotations

from giveway.core.config import PreemptionChoice
from giveway.core.plan import PreemptionMode
from giveway.core.request import Request


def choose_mode(
    victim: Request, *, wanted: PreemptionChoice, num_blocks: int, num_host_available: int
) -> PreemptionMode:
    """Choose how one victim gives way.

    num_blocks: blocks that a swap would copy. num_host_available: host blocks still free in this plan; where they do
    not suffice the victim recomputes, and nobody sees an error.
    """
    if victim.num_own_computed_tokens == 0:
        return PreemptionMode.UN_ADMIT
    if wanted is PreemptionChoice.SWAP and num_blocks <= num_host_available:
        return PreemptionMode.SWAP
    return PreemptionMode.RECOMPUTE
