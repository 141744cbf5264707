"""How real steps refine the cost profile: an extended Kalman filter over the logarithms of its three prices.

A step takes step_s + token_s * tokens + context_s * pairs. Steps of many shapes (decodes at short and long contexts,
chunks at the head and the tail of a prompt) tell the three apart; old steps are forgotten little by little. Logarithms,
because errors of times are ratios, and because a price can then never fall to zero or below: held at zero, it would
swallow whatever the next steps say of it.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt

from giveway.core.cost_profile import CostProfile, ForwardWork

_FORGETTING = 0.995  # weight of a step after the next one: about 200 steps are remembered
_LARGEST_SURPRISE = log(4.0)  # one slow step on a busy machine counts as at most so much longer, or shorter
_NOISE = 0.1  # variance of the logarithm of a step's time: a third more or less is nothing unusual
# Variance of the logarithms of the first prices. What context costs differs most between machines and kernels.
_DOUBT = (0.5, 0.5, 4.0)
# In seconds: no machine is faster than the lowest, none that anybody waits for slower than the highest. A price of
# which no step tells anything wanders, and from further away it would never find back: its share of a step would be too
# small to learn from.
_LOWEST = (1e-7, 1e-9, 1e-13)
_HIGHEST = 1e3


class CostLearner:
    """Learns the three prices of a forward pass; between two steps it remembers how sure it is of each."""

    __slots__ = ("_covariance",)

    def __init__(self) -> None:
        self._covariance = [[_DOUBT[row] if row == column else 0.0 for column in range(3)] for row in range(3)]

    def refined(self, profile: CostProfile, seen: ForwardWork, actual_s: float) -> CostProfile:
        """Return the profile moved towards what a step took; unchanged when the time says nothing."""
        expected_s = profile.forward_s(seen)
        if expected_s <= 0 or actual_s <= 0:
            return profile
        surprise = log(actual_s / expected_s)
        surprise = min(max(surprise, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)
        parts = (profile.step_s, profile.token_s * seen.num_tokens, profile.context_s * seen.num_pairs)
        gain = self._update([part / expected_s for part in parts])
        step_s, token_s, context_s = (
            min(max(price * exp(follow * surprise), lowest), _HIGHEST) if price else price
            for price, follow, lowest in zip(
                (profile.step_s, profile.token_s, profile.context_s), gain, _LOWEST, strict=True
            )
        )
        return replace(profile, step_s=step_s, token_s=token_s, context_s=context_s)

    def _update(self, shares: list[float]) -> list[float]:
        """Take in that a step was seen whose time had these shares. Returns how far each price follows its surprise."""
        covariance = self._covariance
        weighed = [sum(cell * share for cell, share in zip(line, shares, strict=True)) for line in covariance]
        total = _FORGETTING * _NOISE + sum(share * part for share, part in zip(shares, weighed, strict=True))
        gain = [part / total for part in weighed]
        for i in range(3):
            for j in range(i + 1):
                # Both halves at once: what rounding leaves between them would grow by 1 / _FORGETTING with every step,
                # and after some thousand steps turn a gain over.
                cell = (covariance[i][j] - gain[i] * weighed[j]) / _FORGETTING
                covariance[i][j] = covariance[j][i] = cell
        for i, doubt in enumerate(_DOUBT):  # of what steps of one shape do not tell, doubt grows, but not for ever
            if covariance[i][i] > doubt:
                shrink = sqrt(doubt / covariance[i][i])
                for j in range(3):
                    covariance[i][j] *= shrink
                    covariance[j][i] *= shrink
        return gain
