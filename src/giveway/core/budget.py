"""What a step may hold: tokens down the ranking, and for less urgent work time too.

Decodes are protected from prefills of their own or a less urgent class. Two waits of urgent requests are kept short:
for the end of the step under way when one arrives, and for the end of the step that computes its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from giveway.core.cost_profile import CostProfile, ForwardWork
from giveway.core.request import Request
from giveway.core.state import SchedulerState

# What less urgent work may add to a step with a more urgent prompt in it, as a share of what the step takes without it.
# Not zero: a long prompt would stop everybody, and where reading the weights is what a step takes, decodes cost next
# to nothing.
_SHARE_BEHIND_PROMPT = 0.1


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


class StepTime:
    """The time that less urgent work may take of one step, in seconds of the cost profile.

    Two limits. *Beside decodes*: a prefill that is not of the most urgent class in use leaves the step short enough for
    an urgent request that arrives while it runs, whether or not one is there now. *Behind a prompt*: whatever is less
    urgent than a prompt of the step makes it a tenth longer at most, so that its first token is not kept waiting.
    Whoever is refused ends it for those behind it.

    decode_positions: of the decodes that are in the step so far, as the plan goes on.
    """

    def __init__(self, state: SchedulerState, decode_positions: Sequence[int]) -> None:
        self._state = state
        self._decode_positions = decode_positions
        self._prompt_class: int | None = None  # of the best-ranked prefill of the step
        self._prompts = ForwardWork(0, 0)  # prefills given so far
        self._beside_s: float | None = None  # what is left; None: nobody has asked yet
        self._behind_s: float | None = None

    def prefill_tokens_left(self, request: Request, start: int) -> int | None:
        """Return the tokens from `start` on that a prefill may have; None: no limit."""
        costs, block_size = self._state.costs, self._state.cache_config.block_size
        limits = (self._left_beside_decodes(request), self._left_behind_prompt(request))
        seconds = min((each for each in limits if each is not None), default=None)
        if seconds is None:
            return None
        num_tokens = tokens_within(costs, start, max(seconds, 0.0))
        if num_tokens is None:
            return None
        if num_tokens < 1:
            self._end()
        if num_tokens < block_size:
            return num_tokens
        return num_tokens - num_tokens % block_size  # attention works in whole pieces, and so does the cache

    def has_time_to_decode(self, request: Request) -> bool:
        """Whether a decode may be in the step; it has its time then."""
        left_s = self._left_behind_prompt(request)
        if left_s is None:
            return True
        computed = request.num_computed_tokens
        cost_s = self._state.costs.recompute_s(computed, computed + 1)
        if cost_s > left_s:
            self._end()
            return False
        self._behind_s = left_s - cost_s
        return True

    def spend(self, request: Request, start: int, num_tokens: int) -> None:
        """Count a prefill that is in the step."""
        if self._prompt_class is None:
            self._prompt_class = request.rank[0]
        work = ForwardWork.of([(start, start + num_tokens)])
        seconds = self._state.costs.added_s(work)
        if self._beside_s is not None:
            self._beside_s -= seconds
        if self._behind_s is not None:
            self._behind_s -= seconds
        self._prompts = ForwardWork(
            self._prompts.num_tokens + work.num_tokens, self._prompts.num_pairs + work.num_pairs
        )

    def _left_beside_decodes(self, request: Request) -> float | None:
        state = self._state
        if request.rank[0] <= state.most_urgent_class():
            return None
        if self._beside_s is None:
            residents = [resident for resident in state.residents if resident.is_decoding]
            decodes = ForwardWork.of([(r.num_computed_tokens, r.num_known_tokens) for r in residents] or [(0, 1)])
            target_s = state.config.target_step_s
            self._beside_s = allowance_s(state.costs, decodes, target_s)
            if target_s is not None:
                self._beside_s -= state.costs.added_s(self._prompts)
        return self._beside_s

    def _left_behind_prompt(self, request: Request) -> float | None:
        if self._prompt_class is None or request.rank[0] <= self._prompt_class:
            return None
        if self._behind_s is None:  # the ranking is walked down: all that is in the step so far is more urgent
            positions, target_s = self._decode_positions, self._state.config.target_step_s
            so_far = ForwardWork(
                self._prompts.num_tokens + len(positions),
                self._prompts.num_pairs + sum(positions) + len(positions),
            )
            so_far_s = self._state.costs.forward_s(so_far)
            self._behind_s = max(_SHARE_BEHIND_PROMPT * so_far_s, 0.0 if target_s is None else target_s - so_far_s)
        return self._behind_s

    def _end(self) -> None:
        if self._beside_s is not None:
            self._beside_s = 0.0
        if self._behind_s is not None:
            self._behind_s = 0.0
