"""The token budget of a step: down the ranking, decodes protected from prefills of their own or a less urgent class.

A less urgent prefill is also held to a time: an urgent request that arrives while the step runs waits until it ends.
"""

from __future__ import annotations

from math import sqrt

from giveway.core.cost_profile import CostProfile, ForwardWork


def prefill_tokens(
    *, wanted: int, left: int, set_aside: int, block_size: int, is_best_prefill: bool, in_time: int | None = None
) -> int:
    """Return how many tokens a prefill gets in this step.

    wanted: tokens still to compute. left: budget not yet given away. set_aside: decodes of the same class that are
    still to be visited; a token for each is kept. in_time: tokens that the step-time target leaves; None: no target
    holds for it. The best-ranked prefill gets at least one block of what is left whatever is set aside or aimed at, so
    that nothing starves it.
    """
    granted = max(left - set_aside, 0)
    if in_time is not None:
        granted = min(granted, in_time)
    if is_best_prefill:
        granted = max(granted, min(block_size, left))
    return min(wanted, granted)


def allowance_s(profile: CostProfile, decodes: ForwardWork, target_s: float | None) -> float:
    """Return the seconds that less urgent prefills may add to a step with these decodes.

    target_s: what the whole step may take. None: as much again as the decodes alone take.
    """
    decode_s = profile.forward_s(decodes)
    return decode_s if target_s is None else max(target_s - decode_s, 0.0)


def tokens_within(profile: CostProfile, start: int, seconds: float) -> int | None:
    """Return how many tokens from position `start` on a step that runs anyway can take in that time.

    None: the profile sets no price. Solves token_s * n + context_s * (n * start + n * (n + 1) / 2) <= seconds.
    """
    linear = profile.token_s + profile.context_s * (start + 0.5)
    if linear <= 0:
        return None
    # The root in the form that loses no digits when the context costs next to nothing.
    return int(2 * seconds / (linear + sqrt(linear * linear + 2 * profile.context_s * seconds)))
