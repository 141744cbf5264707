"""What becomes of a victim's KV: left in place, taken back for free, parked on a tier, or dropped and recomputed."""

from __future__ import annotations

from giveway.core.config import PreemptionChoice
from giveway.core.cost_profile import CostProfile
from giveway.core.kv_cache import TIERS, CopyDirection, Tier
from giveway.core.plan import Giving, PreemptionCost, PreemptionMode


def choose_mode(giving: Giving, profile: CostProfile, wanted: PreemptionChoice, *, block_size: int) -> PreemptionCost:
    """Choose how one victim gives way, and price every way (s).

    Where no tier has room the victim recomputes, and nobody sees an error. `swap` takes the host while it has room,
    `auto` whatever costs the fewest seconds; ties go to the tier nearer to the device, then to recomputing.
    """
    if giving.is_untouched:
        return PreemptionCost(PreemptionMode.UN_ADMIT, None, 0.0, None, None)
    if giving.num_kept_tokens >= giving.num_computed_tokens:
        return PreemptionCost(PreemptionMode.PAUSE, None, 0.0, None, None)
    recompute_s = profile.recompute_s(giving.num_kept_tokens, giving.num_computed_tokens)
    prices = {tier: _swap_s(giving, profile, tier, block_size) for tier in TIERS}
    tier = _choose_tier(prices, wanted)
    price = None if tier is None else prices[tier]
    keeps = price is not None and (wanted is PreemptionChoice.SWAP or price < recompute_s)
    if wanted is PreemptionChoice.RECOMPUTE or not keeps:
        return PreemptionCost(PreemptionMode.RECOMPUTE, None, recompute_s, prices[Tier.HOST], prices[Tier.DISK])
    return PreemptionCost(PreemptionMode.SWAP, tier, recompute_s, prices[Tier.HOST], prices[Tier.DISK])


def _choose_tier(prices: dict[Tier, float | None], wanted: PreemptionChoice) -> Tier | None:
    """Return the tier that a swap would go to: the nearest with room, or the cheapest."""
    possible = [(price, place, tier) for place, (tier, price) in enumerate(prices.items()) if price is not None]
    if not possible:
        return None
    return possible[0][2] if wanted is PreemptionChoice.SWAP else min(possible)[2]


def _swap_s(giving: Giving, profile: CostProfile, tier: Tier, block_size: int) -> float | None:
    """Seconds to park what is given up on a tier and bring it back; None: it has no room there."""
    room = giving.host_room if tier is Tier.HOST else giving.disk_room
    if giving.num_copied_blocks > room or giving.bound_to not in (None, tier):
        return None
    price = profile.swap_s(tier, giving.num_copied_blocks * block_size)
    if giving.num_moved_blocks and (tier is Tier.HOST or giving.bound_to is Tier.DISK):
        price += profile.copy_one_way_s(CopyDirection.OUT, Tier.DISK, giving.num_moved_blocks * block_size)
    if giving.is_awaited:
        price += profile.copy_one_way_s(CopyDirection.OUT, tier, giving.num_copied_blocks * block_size)
    return price
