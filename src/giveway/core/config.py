"""Settings of the scheduler and of the KV cache: frozen values whose ranges are checked once, at construction."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from giveway.core.errors import ConfigError

MOST_URGENT_CLASS = 0
LEAST_URGENT_CLASS = 100
DEFAULT_CLASS = 10


class SchedulingPolicy(Enum):
    """Who goes first, and therefore who gives way."""

    PRIORITY = "priority"  # smaller class first, then arrival; strictly less urgent residents give way
    FCFS = "fcfs"  # arrival alone; the newest gives way (LIFO)
    NONE = "none"  # the control: arrival order, nobody ever gives way, and a full pool loses the batch


class PreemptionChoice(Enum):
    """What becomes of a victim's KV, by option."""

    AUTO = "auto"  # whichever costs this victim fewer seconds now
    SWAP = "swap"  # keep it in host memory; recompute only where the host pool has no room
    RECOMPUTE = "recompute"  # drop it, and prefill prompt + generated tokens again


class VictimOrder(Enum):
    """Who gives way first among the residents of one class."""

    NEWEST = "newest"  # the latest arrival: it has least to lose (last in, first out)
    LEAST_WORK = "least-work"  # whoever would have the fewest tokens to compute again
    CHEAPEST = "cheapest"  # the fewest seconds lost for each block that is still lacking


def blocks_for(num_slots: int, block_size: int) -> int:
    """Return the number of blocks that `num_slots` token slots take (blocks)."""
    return -(-num_slots // block_size)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes of the KV pools."""

    num_device_blocks: int  # blocks that requests compute in
    num_host_blocks: int = 0  # blocks of host memory that swapped-out KV is parked in; 0: none
    block_size: int = 16  # tokens per block
    enable_prefix_caching: bool = True
    num_disk_blocks: int = 0  # blocks on disk, for what the host has no room for; 0: none
    cache_lead_s: float = 60.0  # findable blocks of a class outlive those of the next one by so long

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.block_size < 1:
            raise ConfigError(f"block_size is {self.block_size}; at least 1 token per block")
        if self.num_device_blocks < 1:
            raise ConfigError(
                f"the KV pool has {self.num_device_blocks} blocks, so there is no room for even one of "
                f"{self.block_size} tokens. Raise --kv-cache-memory-bytes or --num-kv-blocks."
            )
        for name in ("num_host_blocks", "num_disk_blocks"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; 0 turns this tier off, less is no size")
        if not 0 <= self.cache_lead_s < 1e9:
            raise ConfigError(f"cache_lead_s is {self.cache_lead_s}; it must be from 0 to 1e9 seconds")

    @property
    def num_device_slots(self) -> int:
        """Tokens whose KV the device pool can hold."""
        return self.num_device_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and rules of one step."""

    max_num_seqs: int = 64  # seats: requests resident at the same time
    max_num_batched_tokens: int = 2048  # token budget of a step
    max_model_len: int = 8192  # prompt + output tokens of one request
    policy: SchedulingPolicy = SchedulingPolicy.PRIORITY
    preemption_mode: PreemptionChoice = PreemptionChoice.SWAP
    victim_order: VictimOrder | None = None  # None: newest under `fcfs`, else cheapest
    allow_tails: bool = True  # a victim gives up only what is lacking; False: always everything
    settle_tokens: int = 16  # of its class, who has emitted fewer since it was resumed gives way last
    priority_aging_s: float | None = None  # a class counts as one lower for every so many seconds since arrival
    # Seconds that a step with less urgent work may take (budget.StepTime). None: a less urgent chunk may double the
    # time of a decode step, and less urgent work may make the step of a more urgent prompt a tenth longer.
    target_step_s: float | None = None
    # A class that may come at any time, for the step-time target. More urgent ones count for ten minutes.
    most_urgent_class: int | None = None
    overlapped_copies: bool = False  # False: every copy of a plan has ended when its outcome arrives
    copy_timeout_s: float = 30.0  # an overlapped copy not heard of for so long counts as failed
    max_disk_failures: int = 3  # failed writes in a row after which the disk is left alone
    max_guest_looks: int = 32  # newcomers looked at behind the first that did not fit
    refine_costs: bool = False  # learn the cost profile from real steps; off for whatever compares counts
    check_invariants: bool = False  # the full consistency check after every commit: tests, debugging

    def __post_init__(self) -> None:
        """Check the ranges, and that every seat can get a token."""
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_guest_looks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; at least 1 needed")
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}; at least 2: one prompt and one output token")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs {self.max_num_seqs}: "
                "some seats would get no token in a step. Raise the first or lower the second."
            )
        urgent = self.most_urgent_class
        if urgent is not None and not MOST_URGENT_CLASS <= urgent <= LEAST_URGENT_CLASS:
            raise ConfigError(f"the most urgent class is {urgent}; classes are 0 (most urgent) to 100")
        for name in ("priority_aging_s", "target_step_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ConfigError(f"{name} is {value}; it must be above 0 and below 1e9 seconds")
        if not self.copy_timeout_s > 0:
            raise ConfigError(f"copy_timeout_s is {self.copy_timeout_s}; it must be above 0 seconds")

    @property
    def chosen_victim_order(self) -> VictimOrder:
        """The order inside a class, with the default resolved."""
        if self.victim_order is not None:
            return self.victim_order
        return VictimOrder.NEWEST if self.policy is SchedulingPolicy.FCFS else VictimOrder.CHEAPEST


def clamp_class(priority: int) -> int:
    """Return the class that a client's integer stands for: negative numbers, a habit from vLLM, count as 0."""
    return min(max(priority, MOST_URGENT_CLASS), LEAST_URGENT_CLASS)
