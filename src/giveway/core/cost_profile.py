"""How many seconds work takes on one model and machine: what the choice between swap and recompute is made on.

A frozen value, part of the state a plan is made on. The scheduler replaces it by a refined one after a step, unless it
is pinned. Time enters the core only here and through `accept`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from giveway.core.errors import ConfigError
from giveway.core.kv_cache import CopyDirection, Tier

_LEARNING_RATE = 0.1
_LARGEST_SURPRISE = 4.0  # one slow step on a busy machine must not move the profile by more than this factor allows

_SLOT_FIELDS = {
    (CopyDirection.OUT, Tier.HOST): "slot_out_s",
    (CopyDirection.IN, Tier.HOST): "slot_in_s",
    (CopyDirection.OUT, Tier.DISK): "slot_to_disk_s",
    (CopyDirection.IN, Tier.DISK): "slot_from_disk_s",
}


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Seconds by kind of work. A step takes step_s + token_s * tokens + context_s * (token, position) pairs."""

    step_s: float  # a step, however little it computes
    token_s: float  # each token computed
    context_s: float  # each position that a computed token attends to
    copy_s: float  # each copy, however small
    slot_out_s: float  # KV of one token, device to host
    slot_in_s: float  # KV of one token, host to device
    slot_to_disk_s: float  # KV of one token, device or host to disk
    slot_from_disk_s: float  # KV of one token, disk to device

    def __post_init__(self) -> None:
        """Refuse what cannot be a cost."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
                raise ConfigError(f"cost profile: {field.name} is {value!r}; it must be from 0 to 1e6 seconds")

    def recompute_s(self, start: int, stop: int) -> float:
        """Seconds that computing positions start .. stop-1 again adds to steps that run anyway."""
        return self.token_s * (stop - start) + self.context_s * _pairs(start, stop)

    def copy_one_way_s(self, direction: CopyDirection, tier: Tier, num_slots: int) -> float:
        """Seconds to copy the KV of `num_slots` tokens off the device to a tier, or back."""
        return self.copy_s + num_slots * self._slot_s(direction, tier)

    def swap_s(self, tier: Tier, num_slots: int) -> float:
        """Seconds to copy the KV of `num_slots` tokens to a tier and back."""
        return sum(self.copy_one_way_s(direction, tier, num_slots) for direction in CopyDirection)

    def _slot_s(self, direction: CopyDirection, tier: Tier) -> float:
        value: float = getattr(self, _SLOT_FIELDS[direction, tier])
        return value

    def forward_s(self, work: ForwardWork) -> float:
        """Seconds of one forward pass."""
        return self.step_s + self.added_s(work)

    def added_s(self, work: ForwardWork) -> float:
        """Seconds that work adds to a step that runs anyway."""
        return self.token_s * work.num_tokens + self.context_s * work.num_pairs

    def with_copy(self, direction: CopyDirection, tier: Tier, num_slots: int, actual_s: float) -> CostProfile:
        """Return the profile moved a little towards what copies of so many slots took (s)."""
        expected_s = self.copy_one_way_s(direction, tier, num_slots)
        if not num_slots or actual_s <= 0 or expected_s <= 0:
            return self
        surprise = min(max(actual_s / expected_s, 1 / _LARGEST_SURPRISE), _LARGEST_SURPRISE) - 1
        moved_s = self._slot_s(direction, tier) * (1 + _LEARNING_RATE * surprise)
        changed: dict[str, float] = {_SLOT_FIELDS[direction, tier]: moved_s}
        return replace(self, **changed)

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name, as a profile file holds them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> CostProfile:
        """Read a profile file's content. Raises ConfigError for a missing, unknown or impossible entry."""
        names = {field.name for field in fields(cls)}
        if values.keys() != names:
            missing, unknown = (", ".join(sorted(each)) for each in (names - values.keys(), values.keys() - names))
            wrong = "; ".join(
                f"{what}: {which}" for what, which in (("missing", missing), ("unknown", unknown)) if which
            )
            raise ConfigError(f"cost profile: {wrong}. It holds {', '.join(sorted(names))}, in seconds.")
        return cls(**values)  # type: ignore[arg-type]  # __post_init__ checks each value


@dataclass(frozen=True, slots=True)
class ForwardWork:
    """What a forward pass computed."""

    num_tokens: int
    num_pairs: int  # sum over the tokens of the positions each attends to

    @classmethod
    def of(cls, spans: list[tuple[int, int]]) -> ForwardWork:
        """Sum up spans (start, stop) of positions."""
        return cls(sum(stop - start for start, stop in spans), sum(_pairs(start, stop) for start, stop in spans))


def _pairs(start: int, stop: int) -> int:
    """Positions attended to by the tokens at start .. stop-1: each sees itself and all before it."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


# SmolLM2-135M in float32 on 2 cores of a server CPU: steps from `giveway bench exact`, host copies at 4 GB/s, disk at
# 1 GB/s. Where it is wrong it is corrected by the first steps; the order of magnitude is what matters.
SHIPPED = CostProfile(
    step_s=0.015,
    token_s=0.0007,
    context_s=1e-6,
    copy_s=2e-5,
    slot_out_s=1.2e-5,
    slot_in_s=1.2e-5,
    slot_to_disk_s=4.6e-5,
    slot_from_disk_s=4.6e-5,
)
