"""The token budget of a step: down the ranking, decodes protected from prefills of their own or a less urgent class."""

from __future__ import annotations


def prefill_tokens(*, wanted: int, left: int, set_aside: int, block_size: int, is_best_prefill: bool) -> int:
    """Return how many tokens a prefill gets in this step.

    wanted: tokens still to compute. left: budget not yet given away. set_aside: decodes of the same class that are
    still to be visited; a token for each is kept. The best-ranked prefill gets at least one block of what is left
    whatever is set aside, so that decodes behind it cannot starve it.
    """
    granted = max(left - set_aside, 0)
    if is_best_prefill:
        granted = max(granted, min(block_size, left))
    return min(wanted, granted)
