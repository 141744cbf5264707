"""How much of the KV pool holds KV: blocks, against one contiguous reservation per request.

The same requests arrive at the same steps in every layout, faster than any layout can serve them. Nobody knows how long
an answer will be: it ends by itself, or at the limit that its caller set. Counted after every step while somebody waits
for room, before those whose answer has ended leave:

utilisation = slots that hold the KV of a token / slots that belong to a request
of_pool     = the same slots / all slots of the pool

No model and no clock: the scheduler of the engine with an executor that answers at once. The contiguous layouts share
everything with it but the memory: order of arrival, token budget, how many are looked at behind one that does not fit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from giveway.bench.contiguous_pool import ContiguousPool
from giveway.bench.instant_executor import InstantExecutor
from giveway.bench.measure import Report
from giveway.core.commands import Submit
from giveway.core.config import CacheConfig, SchedulerConfig
from giveway.core.errors import InvariantError
from giveway.core.events import Preempted, TokensComputed
from giveway.core.ids import RequestId
from giveway.core.plan import StepPlan
from giveway.core.request import RequestSpec
from giveway.core.sampling import SamplingParams
from giveway.core.scheduler import Scheduler
from giveway.core.state import SchedulerState

NUM_SLOTS = 16384
BLOCK_SIZE = 16
# Whole victims and no prefix cache: what is measured is the layout alone.
CONFIG = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=2048, allow_tails=False)
MAX_TOKENS = (256, 512, 1024)  # limits that callers set, equally often
PROMPT = (128, 0.8)  # median and sigma of a log-normal distribution (tokens)
ANSWER = (220, 0.9)  # of the length at which the model would stop by itself
MEAN_GAP = 2  # steps between two arrivals, on average

_SAMPLING = SamplingParams(temperature=0.0, top_p=1.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, when it comes, and how long its answer turns out to be."""

    step: int
    spec: RequestSpec
    num_output: int  # tokens; nobody knows it beforehand

    @property
    def is_early(self) -> bool:
        """Whether the answer ends before its limit."""
        return self.num_output < self.spec.max_new_tokens


@dataclass(slots=True)
class Usage:
    """What one layout did with one workload."""

    stored: list[int] = field(default_factory=list)  # slots with KV, in every step in which somebody waited
    owned: list[int] = field(default_factory=list)  # slots that belong to requests
    running: list[int] = field(default_factory=list)  # requests that own them
    num_steps: int = 0  # until everybody was done
    num_preemptions: int = 0
    num_recomputed: int = 0  # tokens

    def count(self, *, stored: int, owned: int, running: int) -> None:
        """Take one step down. Raises InvariantError for what cannot be."""
        if not stored <= owned <= NUM_SLOTS:
            raise InvariantError(f"{stored} tokens stored in {owned} slots of {NUM_SLOTS}")
        self.stored.append(stored)
        self.owned.append(owned)
        self.running.append(running)

    @property
    def utilisation(self) -> float:
        """Share of the slots that belong to requests that hold KV, averaged over steps (0..1)."""
        return fmean(stored / owned for stored, owned in zip(self.stored, self.owned, strict=True))

    @property
    def of_pool(self) -> float:
        """Share of all slots that hold KV, averaged over steps (0..1)."""
        return fmean(self.stored) / NUM_SLOTS

    @property
    def not_owned(self) -> float:
        """Share of all slots that belong to nobody although somebody waits, averaged over steps (0..1)."""
        return 1 - fmean(self.owned) / NUM_SLOTS


def bench_memory(*, num_workloads: int = 5, num_requests: int = 1000) -> Report:
    """Run every layout on `num_workloads` workloads, seeded 0, 1, ...; the result is the same every time."""
    workloads = [make_workload(seed, num_requests) for seed in range(num_workloads)]
    layouts: dict[str, Callable[[Sequence[Arrival]], Usage]] = {
        "contiguous, max_model_len": lambda arrivals: run_contiguous(arrivals, lambda _: CONFIG.max_model_len),
        "contiguous, prompt + max_tokens": lambda arrivals: run_contiguous(arrivals, lambda spec: spec.max_slots),
        f"blocks of {BLOCK_SIZE}": run_blocks,
    }
    rows = [_row(name, [run(arrivals) for arrivals in workloads]) for name, run in layouts.items()]
    everybody = [arrival for arrivals in workloads for arrival in arrivals]
    settings = {
        "pool": f"{NUM_SLOTS} slots",
        "max_model_len": CONFIG.max_model_len,
        "workloads": f"{num_workloads} of {num_requests} requests, one every {MEAN_GAP} steps on average",
        "prompt": f"log-normal, median {PROMPT[0]}, sigma {PROMPT[1]}, mean {_mean_prompt(everybody):.0f}",
        "max_tokens": " or ".join(str(limit) for limit in MAX_TOKENS),
        "answer": f"log-normal, median {ANSWER[0]}, sigma {ANSWER[1]}, cut at max_tokens, "
        f"mean {fmean(arrival.num_output for arrival in everybody):.0f}, "
        f"{100 * fmean(arrival.is_early for arrival in everybody):.0f} % end early",
        "utilisation": "slots with KV / slots that belong to requests, while somebody waits",
        "of_pool": "slots with KV / all slots",
        "not_owned": "slots of nobody / all slots",
    }
    return Report("Memory: blocks and contiguous reservations", settings, rows)


def _mean_prompt(arrivals: Sequence[Arrival]) -> float:
    return fmean(len(arrival.spec.prompt_token_ids) for arrival in arrivals)


def _row(name: str, usages: Sequence[Usage]) -> dict[str, Any]:
    shares = [usage.utilisation for usage in usages]
    return {
        "layout": name,
        "utilisation": median(shares),
        "low": min(shares),
        "high": max(shares),
        "of_pool": median(usage.of_pool for usage in usages),
        "not_owned": median(usage.not_owned for usage in usages),
        "running": median(fmean(usage.running) for usage in usages),
        "steps": int(median(usage.num_steps for usage in usages)),
        "preemptions": int(median(usage.num_preemptions for usage in usages)),
        "recomputed_tokens": int(median(usage.num_recomputed for usage in usages)),
    }


def make_workload(seed: int, num_requests: int) -> list[Arrival]:
    """Draw requests whose lengths are of the order of those of chat logs; in order of arrival."""
    rng = random.Random(seed)  # noqa: S311  # repeatable on purpose
    arrivals, step = [], 0
    for number in range(num_requests):
        limit = rng.choice(MAX_TOKENS)
        num_prompt = _length(rng, PROMPT, CONFIG.max_model_len - limit)
        spec = RequestSpec(RequestId(f"r{number}"), (1,) * num_prompt, limit, sampling=_SAMPLING)
        arrivals.append(Arrival(step, spec, _length(rng, ANSWER, limit)))
        step += round(rng.expovariate(1 / MEAN_GAP))
    return arrivals


def _length(rng: random.Random, shape: tuple[int, float], limit: int) -> int:
    """Draw a length from a log-normal distribution with this median and sigma, between 1 and `limit` (tokens)."""
    middle, sigma = shape
    return min(max(round(middle * rng.lognormvariate(0, sigma)), 1), limit)


# Blocks


def run_blocks(arrivals: Sequence[Arrival]) -> Usage:
    """Run a workload on the scheduler of the engine. Without a host pool: who gives way is computed again."""
    scheduler = Scheduler(CONFIG, CacheConfig(NUM_SLOTS // BLOCK_SIZE, 0, BLOCK_SIZE, enable_prefix_caching=False))
    executor = InstantExecutor({arrival.spec.request_id: arrival.num_output for arrival in arrivals})
    usage, waiting = Usage(), list(reversed(arrivals))
    while waiting or scheduler.has_work:
        commands = []
        while waiting and waiting[-1].step <= usage.num_steps:
            commands.append(Submit(waiting.pop().spec))
        scheduler.accept(commands, 0.0)
        plan = scheduler.plan()
        _count_blocks(usage, scheduler.state, plan)
        for event in scheduler.commit(plan, executor.execute(plan, scheduler.requests)):
            usage.num_preemptions += isinstance(event, Preempted)
            if isinstance(event, TokensComputed):
                usage.num_recomputed += event.num_recomputed
        usage.num_steps += 1
    return usage


def _count_blocks(usage: Usage, state: SchedulerState, plan: StepPlan) -> None:
    """Count what the pool holds once the plan is executed, if somebody waits."""
    tables = dict(state.kv.tables)
    for preemption in plan.preemptions:
        del tables[preemption.victim]
    tables |= {admission.request_id: admission.hits + admission.new for admission in plan.admissions}
    tables |= {growth.request_id: growth.table for growth in plan.growths}
    if len(tables) == len(state.requests):
        return
    stored = {request_id: state.requests[request_id].num_computed_tokens for request_id in tables}
    stored |= {chunk.request_id: chunk.start + chunk.num_tokens for chunk in plan.chunks}
    decodes = plan.decodes
    stored |= {name: position + 1 for name, position in zip(decodes.request_ids, decodes.positions, strict=True)}
    usage.count(
        stored=sum(stored.values()),
        owned=BLOCK_SIZE * sum(len(table) for table in tables.values()),
        running=len(tables),
    )


# Contiguous


@dataclass(slots=True)
class _Tenant:
    """A request with its range."""

    arrival: Arrival
    start: int  # slot
    num_stored: int = 0  # tokens whose KV exists
    num_output: int = 0

    @property
    def num_missing(self) -> int:
        """Tokens to compute before the next one can be chosen."""
        return len(self.arrival.spec.prompt_token_ids) + self.num_output - self.num_stored


def run_contiguous(arrivals: Sequence[Arrival], slots_of: Callable[[RequestSpec], int]) -> Usage:
    """Run a workload where each request reserves `slots_of` it, all at once, until its answer has ended."""
    pool, tenants, usage = ContiguousPool(NUM_SLOTS), list[_Tenant](), Usage()
    line: list[Arrival] = []
    coming = list(reversed(arrivals))
    while coming or line or tenants:
        while coming and coming[-1].step <= usage.num_steps:
            line.append(coming.pop())
        line, seated = _seat(line, pool, slots_of, CONFIG.max_num_seqs - len(tenants))
        tenants += seated
        _compute(tenants)
        if line:
            usage.count(stored=sum(tenant.num_stored for tenant in tenants), owned=pool.num_taken, running=len(tenants))
        for tenant in [tenant for tenant in tenants if tenant.num_output >= tenant.arrival.num_output]:
            pool.release(tenant.start)
            tenants.remove(tenant)
        usage.num_steps += 1
    return usage


def _seat(
    line: Sequence[Arrival], pool: ContiguousPool, slots_of: Callable[[RequestSpec], int], num_seats: int
) -> tuple[list[Arrival], list[_Tenant]]:
    """Give ranges out down the line; behind one that does not fit, some more are tried. Returns who waits, who sits."""
    waiting: list[Arrival] = []
    seated: list[_Tenant] = []
    for place, arrival in enumerate(line):
        if len(waiting) > CONFIG.max_guest_looks or len(seated) == num_seats:
            return [*waiting, *line[place:]], seated
        start = pool.take(slots_of(arrival.spec))
        if start is None:
            waiting.append(arrival)
        else:
            seated.append(_Tenant(arrival, start))
    return waiting, seated


def _compute(tenants: Sequence[_Tenant]) -> None:
    """Make one step: a token for each decode, what is left of the budget for prefills, in order of arrival."""
    left = CONFIG.max_num_batched_tokens - sum(1 for tenant in tenants if tenant.num_output)
    for tenant in tenants:
        num_tokens = 1 if tenant.num_output else min(tenant.num_missing, left)
        if not tenant.num_output:
            left -= num_tokens
        tenant.num_stored += num_tokens
        if not tenant.num_missing:
            tenant.num_output += 1
