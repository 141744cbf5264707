"""What is checked: requests, and the ways to preempt them. Each way says which preemptions it must have seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import cycle, islice
from typing import Any

from giveway.build import Model
from giveway.core.config import LEAST_URGENT_CLASS, MOST_URGENT_CLASS, blocks_for
from giveway.core.errors import ConfigError
from giveway.core.ids import TokenId
from giveway.core.sampling import SamplingParams

_TEXTS = (  # fewer than requests, so that prompts share their beginnings
    "The lighthouse keeper wrote in his diary that the night had been long and",
    "Once upon a time, in a village between two rivers, there lived a",
    "def fibonacci(n):\n    ",
)
_SHORTEST_EDGE = 16  # tokens: of smaller blocks a prompt holds several, or it would be too short to lose anything
_USUAL_REQUESTS = 8  # of a mode that does not say otherwise: enough for a fight


class Kind(Enum):
    """What can happen to a request, as the table and the JSON file name it."""

    HOST = "host"  # all of its KV swapped to host memory
    HOST_TAIL = "host tail"  # only the last blocks of it
    DISK = "disk"
    DISK_TAIL = "disk tail"
    RECOMPUTE = "recompute"
    RECOMPUTE_TAIL = "recompute tail"
    PAUSE = "pause"  # the seat alone
    UN_ADMIT = "un-admit"
    HOST_TO_DISK = "host to disk"  # parked KV moved on
    CACHE_HIT = "cache hit"  # no preemption: tokens of a prompt found in the prefix cache

    @property
    def is_preemption(self) -> bool:
        """Whether somebody lost something by it, and at once."""
        return self not in (Kind.CACHE_HIT, Kind.HOST_TO_DISK)


class Room(Enum):
    """How much of a tier there is for parked KV."""

    NONE = "none"
    LITTLE = "little"  # for one victim, or a part of it
    ENOUGH = "enough"  # for everybody

    def num_blocks(self, everything: int, block_size: int) -> int:
        """Return the size of the tier. everything: blocks that all requests take in the end."""
        if self is Room.LITTLE:
            return max(3, blocks_for(3 * _SHORTEST_EDGE, block_size))
        return everything if self is Room.ENOUGH else 0


Wanted = frozenset[Kind]  # one of these, at least once

_HOST, _DISK = frozenset({Kind.HOST, Kind.HOST_TAIL}), frozenset({Kind.DISK, Kind.DISK_TAIL})
_RECOMPUTE = frozenset({Kind.RECOMPUTE, Kind.RECOMPUTE_TAIL})
_ANY = _HOST | _DISK | _RECOMPUTE


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run the requests, on a pool of its own."""

    name: str
    settings: Mapping[str, Any]  # EngineOptions that differ from plain ones
    wanted: tuple[Wanted, ...]  # each must have been seen; otherwise the mode has shown nothing
    num_requests: int = _USUAL_REQUESTS
    host: Room = Room.ENOUGH
    disk: Room = Room.NONE
    is_scarce: bool = True  # the pool holds less than half of what the requests take; else all of it
    is_ordered: bool = False  # residents are told to give way now and then
    arrivals_at_once: int | None = 1  # how many arrive together, each group more urgent than the last; None: all
    arrives_every_step: bool = False  # else: when those before it have got somewhere
    num_rounds: int = 1  # the same requests again, on the same engine
    num_threads: int | None = None  # None: as loaded


_SWAP = {"preemption_mode": "swap", "enable_prefix_caching": False}
_DROP = {"preemption_mode": "recompute", "enable_prefix_caching": False}
_WHOLE = {"partial_preemption": False}

_WAYS = (
    Mode("swap, whole victims", {**_SWAP, **_WHOLE}, (frozenset({Kind.HOST}),)),
    Mode("swap, tails", _SWAP, (frozenset({Kind.HOST_TAIL}),)),
    Mode("disk, whole victims", {**_SWAP, **_WHOLE}, (frozenset({Kind.DISK}),), host=Room.NONE, disk=Room.ENOUGH),
    Mode("disk, tails", _SWAP, (frozenset({Kind.DISK_TAIL}),), host=Room.NONE, disk=Room.ENOUGH),
    Mode("host, then disk", _SWAP, (_HOST, _DISK | {Kind.HOST_TO_DISK}), host=Room.LITTLE, disk=Room.ENOUGH),
    Mode("recompute, whole victims", {**_DROP, **_WHOLE}, (frozenset({Kind.RECOMPUTE}),), host=Room.NONE),
    Mode("recompute, tails", _DROP, (frozenset({Kind.RECOMPUTE_TAIL}),), host=Room.NONE),
    Mode("auto", {**_SWAP, "preemption_mode": "auto"}, (_ANY,), disk=Room.ENOUGH),
    Mode("seat only", {**_SWAP, "max_num_seqs": 2}, (frozenset({Kind.PAUSE}),), is_scarce=False),
    Mode(
        "un-admission",
        {**_SWAP, "max_num_seqs": 3, "max_num_batched_tokens": 4},
        (frozenset({Kind.UN_ADMIT}),),
        num_requests=9,
        is_scarce=False,
        arrivals_at_once=3,
        arrives_every_step=True,
    ),
)
_CACHED = tuple(
    Mode(
        f"prefix cache, {name}",
        {"preemption_mode": name, "enable_prefix_caching": True},
        (wanted, frozenset({Kind.CACHE_HIT})),
        num_rounds=2,
    )
    for name, wanted in (("swap", _HOST), ("recompute", _RECOMPUTE))
)


def _in_chunks(num_tokens: int, settings: Mapping[str, Any], wanted: Wanted) -> Mode:
    name = f"chunks of {num_tokens}, {settings['preemption_mode']}"
    settings = {**settings, "max_num_batched_tokens": num_tokens, "max_num_seqs": min(num_tokens, _USUAL_REQUESTS)}
    return Mode(name, settings, (wanted,), num_requests=4 if num_tokens < 4 else 6)


def _in_batches(size: int) -> Mode:
    return Mode(
        f"batches of {size}, by order",
        {**_SWAP, "max_num_seqs": size},
        (_HOST, _RECOMPUTE),
        num_requests=max(size, 3),
        is_scarce=False,
        is_ordered=True,
        arrivals_at_once=None,
    )


def choose_modes(num_requests: int, *, has_threads: bool) -> tuple[Mode, ...]:
    """Return everything to check, cut to the number of requests there are.

    has_threads: whether the backend computes on threads whose number can be set; the modes that set it come last.
    """
    modes = [*_WAYS, *_CACHED]
    modes += [_in_chunks(size, _DROP, _RECOMPUTE) for size in (1, 7, 64, 512)]
    modes += [_in_chunks(7, _SWAP, _HOST)]
    modes += [_in_batches(size) for size in (1, 2, 4, 8, 16) if size <= num_requests]
    if has_threads:
        modes += [
            Mode(f"{count} thread{'s' * (count > 1)}, auto", _WAYS[7].settings, (_ANY,), num_threads=count)
            for count in (1, 2)
        ]
    return tuple(replace(mode, num_requests=min(mode.num_requests, num_requests)) for mode in modes)


# Requests


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """One request."""

    name: str
    token_ids: tuple[TokenId, ...]
    sampling: SamplingParams

    @property
    def num_tokens(self) -> int:
        """Prompt + output (tokens)."""
        assert self.sampling.max_tokens is not None
        return len(self.token_ids) + self.sampling.max_tokens

    def num_blocks(self, block_size: int) -> int:
        """Blocks that it takes in the end."""
        return blocks_for(self.num_tokens, block_size)


def make_requests(model: Model, *, num_requests: int, num_tokens: int, block_size: int) -> tuple[CheckedRequest, ...]:
    """Return requests whose prompts end before, at and behind the edges of blocks, greedy and seeded in turn.

    num_tokens: output tokens of each. Raises ConfigError when that, or the number of requests, is too small to fight
    over blocks, or more than the model can do.
    """
    if num_requests < 6 or num_tokens < 4:
        raise ConfigError(
            f"{num_requests} requests of {num_tokens} output tokens: at least 6 of 4 are needed, or nobody gives way"
        )
    size = -(-_SHORTEST_EDGE // block_size) * block_size
    most = model.max_positions - num_tokens
    if most < 4 * size + 1:
        raise ConfigError(
            f"{num_tokens} output tokens leave {most} positions for prompts, and prompts of {4 * size + 1} are "
            f"needed: {model.name} has {model.max_positions} positions. Lower --num-tokens or --block-size."
        )
    lengths = cycle((5, 4 * size + 1, size, 2 * size - 1, 3 * size, size + 1, 2 * size, 4 * size - 1))
    kinds = cycle(_samplings(num_tokens))
    requests = []
    for number, (text, length, (kind, sampling)) in enumerate(zip(cycle(_TEXTS), lengths, kinds, strict=False)):
        if number == num_requests:
            break
        seeded = sampling if sampling.temperature == 0 else replace(sampling, seed=number)
        token_ids = tuple(islice(cycle(model.tokenizer.encode(text)), length))
        requests.append(CheckedRequest(f"request {number} ({kind})", token_ids, seeded))
    return tuple(requests)


def _samplings(num_tokens: int) -> Sequence[tuple[str, SamplingParams]]:
    greedy = SamplingParams(temperature=0, top_p=1.0, max_tokens=num_tokens, ignore_eos=True)
    seeded = replace(greedy, temperature=0.8, top_p=0.95, logprobs=1)
    return (
        ("greedy", replace(greedy, logprobs=2)),
        ("seeded", seeded),
        ("greedy, tokens only", greedy),  # a backend may have a shorter way for these
        ("seeded, penalties", replace(seeded, top_k=40, frequency_penalty=1.5, presence_penalty=0.5)),
        ("greedy, prompt scored", replace(greedy, logprobs=0, prompt_logprobs=1)),
        ("seeded, min_p", replace(seeded, temperature=1.0, top_p=1.0, min_p=0.02, logprobs=0)),
    )


def class_of(group: int) -> int:
    """Class of a group of arrivals: each is more urgent than the one before, as long as there are classes."""
    return max(LEAST_URGENT_CLASS - group, MOST_URGENT_CLASS)


def undisturbed(num_requests: int) -> Mode:
    """Return the run that all others are compared with: one seat and one class, so each request is alone."""
    settings = {**_SWAP, "max_num_seqs": 1}
    return Mode("undisturbed", settings, (), num_requests=num_requests, is_scarce=False, arrivals_at_once=None)
