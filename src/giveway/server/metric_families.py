"""Every metric by name, with its labels: what docs/metrics.md explains, declared once.

Names that begin with `vllm:` are those that dashboards made for vLLM ask for; the others are GiveWay's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from enum import Enum

from giveway.core.kv_cache import TIERS, CopyDirection
from giveway.core.plan import DeferralReason, PreemptionMode
from giveway.core.request import FinishReason
from giveway.engine.engine import StepTimes
from giveway.server.preemption_causes import PreemptionCause
from giveway.server.series import Counter, Family, Gauge, Histogram

OTHER = "other"  # value of a label for whatever was not declared

# What a response may be counted as; any other status is counted by its hundred.
STATUSES = (
    "200",
    "400",
    "401",
    "403",
    "404",
    "405",
    "408",
    "409",
    "413",
    "415",
    "422",
    "429",
    "499",
    "500",
    "503",
    "504",
)
STATUS_HUNDREDS = ("1xx", "2xx", "3xx", "4xx", "5xx")

STEP_PARTS = tuple(field.name.removesuffix("_s") for field in fields(StepTimes))

# Edges of buckets (s). A first token comes within a step or after minutes in a queue; steps take from under one to
# some hundred milliseconds.
_FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.75, 1, 2, 4, 8, 15, 30, 60, 120, 300, 900)
_BETWEEN_TOKENS_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2, 5, 10, 30, 120)
_WHOLE_S = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600, 1800, 3600, 14400, 86400)
_STEP_PART_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Rejection(Enum):
    """Why the server turned a request away before it reached the engine."""

    INVALID = "invalid"  # it is wrong, and would be wrong at any time
    TOO_LARGE = "too_large"  # more bytes, tokens or prompts than are taken
    UNAUTHORIZED = "unauthorized"  # no key, an unknown one, or one that may not do this
    QUEUE_FULL = "queue_full"  # too many of its class wait
    CONCURRENCY = "concurrency"  # its key has as many requests in progress as it may
    SHUTTING_DOWN = "shutting_down"
    ENGINE_STOPPED = "engine_stopped"


def _values(kind: type[Enum]) -> tuple[str, ...]:
    return tuple(member.value for member in kind)


class EngineFamilies:
    """What the engine's steps tell. names: of the priority classes."""

    def __init__(self, names: Sequence[str]) -> None:
        each = {"priority_class": names}
        # Requests
        self.running = Gauge("vllm:num_requests_running", "Requests that have a seat.", each)
        self.waiting = Gauge(
            "vllm:num_requests_waiting",
            "Requests without a seat whose KV is not parked: new ones and recomputing ones.",
            each,
        )
        self.swapped = Gauge(
            "vllm:num_requests_swapped", "Requests without a seat whose KV is parked off the device.", each
        )
        self.held = Gauge("giveway:num_requests_held", "Requests kept off the device because their reader is too slow.")
        self.accepted = Counter("giveway:requests_accepted", "Requests that the engine took in.", each)
        self.finished = Counter(
            "vllm:request_success", "Requests that ended.", {"finished_reason": _values(FinishReason), **each}
        )
        # Times
        self.queue_s = Histogram("vllm:request_queue_time_seconds", "Arrival to first seat.", _FIRST_TOKEN_S, each)
        self.first_token_s = Histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S, each
        )
        self.between_tokens_s = Histogram(
            "vllm:inter_token_latency_seconds",
            "One token to the next of the same request, stalls included.",
            _BETWEEN_TOKENS_S,
            each,
            older_name="vllm:time_per_output_token_seconds",
        )
        self.whole_s = Histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to end, of requests that ended by themselves.", _WHOLE_S, each
        )
        # Tokens
        self.prompt_tokens = Counter(
            "vllm:prompt_tokens", "Prompt tokens, once for each request, when its first token comes.", each
        )
        self.generated_tokens = Counter("vllm:generation_tokens", "Output tokens.", each)
        self.prefix_queries = Counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache, at the first admission.", each
        )
        self.prefix_hits = Counter("vllm:prefix_cache_hits", "Of these, tokens that were found.", each)
        self.step_tokens = Histogram(
            "vllm:iteration_tokens_total", "Tokens computed in one step, prefills and decodes.", _STEP_TOKENS
        )
        self.computed_tokens = Counter("giveway:computed_tokens", "Tokens computed, those computed again among them.")
        self.recomputed_tokens = Counter(
            "giveway:recomputed_tokens", "Tokens computed again because a preemption dropped their KV.", each
        )
        # Memory
        self.cache_usage = Gauge(
            "vllm:kv_cache_usage_perc",
            "Part of the device's KV blocks that is owned, from 0 to 1.",
            older_name="vllm:gpu_cache_usage_perc",
        )
        pools = {"tier": ("device", *(tier.value for tier in TIERS)), "state": ("owned", "idle", "free")}
        self.blocks = Gauge(
            "giveway:kv_blocks", "KV blocks of each tier: owned, idle (findable, unowned), free.", pools
        )
        # Giving way
        self.preemptions = Counter("vllm:num_preemptions", "Times a request lost its seat after computing.", each)
        self.preemptions_by_cause = Counter(
            "giveway:preemptions",
            "Times a request lost its seat, by what became of its KV and why.",
            {"mode": _values(PreemptionMode), "cause": _values(PreemptionCause), **each},
        )
        self.further_losses = Counter(
            "giveway:further_losses",
            "Times a request that had given way lost more: blocks it had kept, or its parked KV.",
            each,
        )
        self.swapped_bytes = Counter(
            "giveway:swapped_bytes",
            "Bytes of KV copied between the device and another tier.",
            {"direction": _values(CopyDirection), "tier": tuple(tier.value for tier in TIERS), **each},
        )
        self.moved_bytes = Counter("giveway:moved_bytes", "Bytes of parked KV that moved on from the host to the disk.")
        self.failed_copies = Counter("giveway:failed_copies", "Copies of KV that failed: it was computed again.")
        self.stall_s = Counter(
            "giveway:stall_seconds", "Seconds that requests spent without a seat after they had lost it.", each
        )
        self.deferrals = Counter(
            "giveway:deferrals",
            "Times a request was looked at in a step and not served.",
            {
                "reason": [each.value for each in DeferralReason if each is not DeferralReason.BEHIND_DEFERRED],
                **each,
            },
        )
        # Steps
        self.step_s = Histogram(
            "giveway:step_time_seconds", "Seconds of a step by part.", _STEP_PART_S, {"part": STEP_PARTS}
        )
        self.failed_steps = Counter(
            "giveway:failed_steps", "Steps that failed on the device and are repeated in parts."
        )

    def all(self) -> list[Family]:
        """Return every family, in the order above."""
        return list(vars(self).values())


class HttpFamilies:
    """What the HTTP side tells. routes: templates of all routes; any other route counts as one."""

    def __init__(self, routes: Sequence[str], names: Sequence[str]) -> None:
        self.responses = Counter(
            "giveway:http_responses",
            "HTTP requests that were answered.",
            {"route": tuple(dict.fromkeys((*routes, OTHER))), "status": (*STATUSES, *STATUS_HUNDREDS)},
        )
        self.rejections = Counter(
            "giveway:requests_rejected",
            "Requests turned away before they reached the engine.",
            {"reason": _values(Rejection)},
        )
        self.disconnects = Counter(
            "giveway:client_disconnects",
            "Clients that went away before their answer was complete.",
            {"priority_class": names},
        )

    def all(self) -> list[Family]:
        """Return every family."""
        return list(vars(self).values())
