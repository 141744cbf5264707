"""What a step is: a frozen `StepPlan`, and the `StepOutcome` that comes back from executing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from giveway.core.config import PreemptionChoice
from giveway.core.ids import BlockTable, CopyId, DeviceBlockId, RequestId, TokenId
from giveway.core.kv_cache import BlockCopy, CopyDirection, ParkedTable, Tier, TierMove
from giveway.core.request import StopDecision

__all__ = [
    "Admission",
    "BlockCopy",
    "BlockFork",
    "CopyDirection",
    "Decodes",
    "Deferral",
    "DeferralReason",
    "GivenUp",
    "Giving",
    "Growth",
    "Preemption",
    "PreemptionCost",
    "PreemptionMode",
    "ScheduledChunk",
    "StepOutcome",
    "StepPlan",
    "SwapIn",
    "Tier",
    "TierMove",
    "TokenLogprobs",
]


class PreemptionMode(Enum):
    """What becomes of the KV of a victim."""

    SWAP = "swap"  # copied off the device, and back later
    RECOMPUTE = "recompute"  # dropped; prompt + generated tokens are prefilled again later
    PAUSE = "pause"  # all of it stays where it is: only the seat, or blocks not yet written, were asked for
    UN_ADMIT = "un_admit"  # nothing of its own was computed: the admission is taken back


class DeferralReason(Enum):
    """Why a request was not served in a step."""

    NO_DEVICE_BLOCKS = "no_device_blocks"  # the pool lacks room, and those it may displace would not free enough
    NO_TOKENS = "no_tokens"  # the tokens or the time of the step went to others
    NO_SEAT = "no_seat"  # every seat is taken by work that it may not displace
    COPY_IN_FLIGHT = "copy_in_flight"  # its own copy, or the copy that frees its room, is under way
    NO_ROOM_TO_STAY = "no_room_to_stay"  # it has paid and comes back for good; others like it may need all of the pool
    PROMPT_IN_PROGRESS = "prompt_in_progress"  # another answer to its prompt is computing the KV that both will share
    GIVES_WAY = "gives_way"  # more of what it had kept, or its place on the host, is taken in this very step
    FORCED_OUT = "forced_out"  # told to give way in this very step
    HELD = "held"  # nobody takes what it has made already: its reader is too slow
    FAULT_ISOLATION = "fault_isolation"  # a failed step is being repeated in parts to find the culprit
    BEHIND_DEFERRED = "behind_deferred"  # not looked at: a better-ranked request could not be served


@dataclass(frozen=True, slots=True)
class Giving:
    """What one victim would give up: the facts that its mode is chosen by, as plain numbers for the trace."""

    num_blocks: int  # device blocks that it would give up
    num_computed_tokens: int  # tokens that have KV, on whatever tier
    num_kept_tokens: int  # of these, in leading blocks that it keeps
    num_copied_blocks: int  # blocks that a swap would copy: filled, and not copied for another victim already
    is_untouched: bool  # it has computed nothing of its own, and keeps nothing
    host_room: int  # host blocks that are free for it, or would be
    disk_room: int
    num_moved_blocks: int = 0  # blocks that must go from the host to the disk first: of others, or an earlier tail
    bound_to: Tier | None = None  # a part of it is parked there already
    is_awaited: bool = False  # its beneficiary has to wait until a copy out has ended


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """The choice for one victim, and the seconds that each way would cost it. None: not possible."""

    mode: PreemptionMode
    tier: Tier | None  # where a swap goes
    recompute_s: float
    host_s: float | None
    disk_s: float | None

    @property
    def seconds(self) -> float | None:
        """What the chosen way costs; leaving KV in place, and taking back what computed nothing, cost nothing."""
        if self.mode is PreemptionMode.SWAP:
            return self.disk_s if self.tier is Tier.DISK else self.host_s
        return self.recompute_s if self.mode is PreemptionMode.RECOMPUTE else 0.0


@dataclass(frozen=True, slots=True)
class Preemption:
    """One request gives way: a resident, or one that had kept a part and now gives up more of it."""

    victim: RequestId
    beneficiary: RequestId | None  # None: told to, by command
    giving: Giving
    wanted: PreemptionChoice
    cost: PreemptionCost
    num_kept: int = 0  # leading blocks that stay with it
    parked: ParkedTable = ()  # with a swap: where the blocks behind them will be, in order
    whole: PreemptionCost | None = None  # what giving up everything would have cost; None: it does
    is_resident: bool = True  # it had a seat
    is_for_its_class: bool = False  # among those who profit is one of its own class
    has_paid: bool = False  # with this it has lost its own length to its class

    @property
    def mode(self) -> PreemptionMode:
        """What becomes of its KV."""
        return self.cost.mode

    @property
    def num_blocks(self) -> int:
        """Device blocks that it gives up."""
        return self.giving.num_blocks


@dataclass(frozen=True, slots=True)
class BlockFork:
    """A partly filled block of one request becomes the start of another's: copied before either writes on."""

    source: DeviceBlockId
    target: DeviceBlockId


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a seat and blocks to compute in: behind what it kept, prefix hits, then new ones."""

    request_id: RequestId
    hits: BlockTable
    new: BlockTable
    is_guest: bool
    num_computed_tokens: int = 0  # whose KV it then has
    fork: BlockFork | None = None


@dataclass(frozen=True, slots=True)
class SwapIn:
    """A swapped request takes a seat; `copy` brings its KV into the first of the new blocks."""

    copy: BlockCopy
    hits: BlockTable
    new: BlockTable
    is_guest: bool


@dataclass(frozen=True, slots=True)
class Growth:
    """The block table of a resident is replaced by a longer one."""

    request_id: RequestId
    table: BlockTable


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens of one prefill in this step."""

    request_id: RequestId
    start: int  # position of the first token
    num_tokens: int
    samples: bool  # the chunk ends the known tokens, so the next one is chosen
    block_table: BlockTable


@dataclass(frozen=True, slots=True)
class Decodes:
    """Steady decodes, as columns: one token each, and each samples."""

    request_ids: tuple[RequestId, ...] = ()
    positions: tuple[int, ...] = ()  # of the token to compute
    block_tables: tuple[BlockTable, ...] = ()

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True)
class Deferral:
    """A request that was looked at and not served, and why."""

    request_id: RequestId
    reason: DeferralReason
    lacking_blocks: int = 0  # with NO_DEVICE_BLOCKS: how many more it would need


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A request that can never go on, although nothing else holds what it lacks; it ends with this message."""

    request_id: RequestId
    message: str


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything one step does. In this order: moves, copies out, forks, copies in, forward, sample."""

    step_id: int
    state_version: int  # of the state it was made on; commit refuses any other
    preemptions: tuple[Preemption, ...] = ()
    moves: tuple[TierMove, ...] = ()
    dropped: tuple[RequestId, ...] = ()  # their parked KV makes room on the host for somebody more urgent
    copies_out: tuple[BlockCopy, ...] = ()
    swap_ins: tuple[SwapIn, ...] = ()
    admissions: tuple[Admission, ...] = ()
    growths: tuple[Growth, ...] = ()
    chunks: tuple[ScheduledChunk, ...] = ()
    decodes: Decodes = field(default_factory=Decodes)
    deferrals: tuple[Deferral, ...] = ()
    given_up: tuple[GivenUp, ...] = ()

    @property
    def is_idle(self) -> bool:
        """Whether executing the plan would touch nothing on the device."""
        return not (self.chunks or self.decodes or self.copies_out or self.swap_ins or self.moves)

    @property
    def is_empty(self) -> bool:
        """Whether the plan changes nothing at all."""
        return self.is_idle and not (self.preemptions or self.admissions or self.given_up)

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the forward pass."""
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)

    def request_ids(self) -> tuple[RequestId, ...]:
        """Return the requests that compute in this step: chunks, then decodes."""
        return tuple(chunk.request_id for chunk in self.chunks) + self.decodes.request_ids

    def chunk_of(self, request_id: RequestId) -> ScheduledChunk | None:
        """Return the tokens of one request in this step, a decode as a chunk of one token; None if not served."""
        for chunk in self.chunks:
            if chunk.request_id == request_id:
                return chunk
        decodes = self.decodes
        if request_id in decodes.request_ids:
            row = decodes.request_ids.index(request_id)
            return ScheduledChunk(request_id, decodes.positions[row], 1, True, decodes.block_tables[row])
        return None

    def describe(self) -> str:
        """Return the plan in words, one action a line."""
        lines = [f"step {self.step_id}: {self.num_tokens} tokens"]
        lines += [f"  {_in_words(preemption)}" for preemption in self.preemptions]
        lines += [f"  {m.request_id} moves from host to disk: {len(m.host_blocks)} blocks" for m in self.moves]
        lines += [f"  {name} loses its parked KV" for name in self.dropped]
        lines += [f"  {s.copy.request_id} is swapped in: {len(s.copy.device_blocks)} blocks" for s in self.swap_ins]
        lines += [
            f"  {a.request_id} is admitted{' as a guest' if a.is_guest else ''}: "
            f"{len(a.hits)} blocks found, {len(a.new)} new"
            for a in self.admissions
        ]
        lines += [f"  {c.request_id} prefills {c.start}..{c.start + c.num_tokens - 1}" for c in self.chunks]
        if self.decodes:
            lines.append(f"  decode: {', '.join(self.decodes.request_ids)}")
        lines += [f"  {d.request_id} waits: {d.reason.value}" for d in self.deferrals]
        lines += [f"  {g.request_id} ends: {g.message}" for g in self.given_up]
        return "\n".join(lines)


def _in_words(preemption: Preemption) -> str:
    who = f"for {preemption.beneficiary}" if preemption.beneficiary else "by command"
    cost, tier = preemption.cost, preemption.cost.tier
    prices = {"recompute": cost.recompute_s, "host": cost.host_s, "disk": cost.disk_s}
    told = ", ".join(f"{way} " + ("impossible" if s is None else f"{1e3 * s:.2f} ms") for way, s in prices.items())
    return (
        f"{preemption.victim} gives way {who}: {cost.mode.value}{f' to {tier.value}' if tier else ''}, "
        f"{preemption.num_blocks} blocks, keeps {preemption.num_kept} ({told})"
    )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural logarithm."""

    token_id: TokenId  # the token that was chosen, or the prompt token that stands there
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[TokenId, float], ...]  # the k most likely, best first; ties: smaller id first


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What executing a plan gave. Missing entries mean "nothing to say", never "failed"."""

    step_id: int
    now_s: float  # when the step ended
    duration_s: float = 0.0
    forward_s: float = 0.0  # of this, the forward pass and sampling
    copy_out_s: float = 0.0  # of this, copies (and moves) off the device that ended within the step
    copy_in_s: float = 0.0
    sampled: Mapping[RequestId, TokenId] = field(default_factory=dict)
    logprobs: Mapping[RequestId, TokenLogprobs] = field(default_factory=dict)
    # Of the tokens after each position of a chunk, first position first.
    prompt_logprobs: Mapping[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    faults: Mapping[RequestId, str] = field(default_factory=dict)  # ends that request alone
    stops: Mapping[RequestId, StopDecision] = field(default_factory=dict)
    finished_copies: tuple[CopyId, ...] = ()  # moves between tiers among them
    failed_copies: tuple[CopyId, ...] = ()
