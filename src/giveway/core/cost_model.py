"""What becomes of a victim's KV: taken back for free, kept on the host, or dropped and computed again."""

from __future__ import annotations

from dataclasses import dataclass

from giveway.core.config import PreemptionChoice
from giveway.core.cost_profile import CostProfile
from giveway.core.plan import PreemptionMode
from giveway.core.request import Request


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """The choice for one victim, and what each way would cost it (s). None: not possible."""

    mode: PreemptionMode
    recompute_s: float
    swap_s: float | None


def choose_mode(
    victim: Request,
    profile: CostProfile,
    *,
    wanted: PreemptionChoice,
    num_blocks: int,
    block_size: int,
    num_host_available: int,
    num_shared_tokens: int = 0,
) -> PreemptionCost:
    """Choose how one victim gives way.

    num_blocks: blocks that a swap would copy. num_host_available: host blocks still free in this plan; where they do
    not suffice the victim recomputes, and nobody sees an error. num_shared_tokens: leading tokens in blocks that others
    hold too and the prefix index can find, so that a recompute gets them back for nothing.
    """
    computed = victim.num_computed_tokens
    recompute_s = profile.recompute_s(min(num_shared_tokens, computed), computed)
    if victim.num_own_computed_tokens == 0:
        return PreemptionCost(PreemptionMode.UN_ADMIT, 0.0, None)
    if num_blocks > num_host_available:
        return PreemptionCost(PreemptionMode.RECOMPUTE, recompute_s, None)
    swap_s = profile.swap_s(num_blocks * block_size)
    keeps = wanted is PreemptionChoice.SWAP or (wanted is PreemptionChoice.AUTO and swap_s < recompute_s)
    return PreemptionCost(PreemptionMode.SWAP if keeps else PreemptionMode.RECOMPUTE, recompute_s, swap_s)
