"""How late the event loop is while the engine computes in a thread beside it, as in `giveway serve`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from statistics import quantiles
from typing import Any

from giveway.bench.measure import Report
from giveway.build import build_engine
from giveway.core.sampling import SamplingParams
from giveway.engine.async_engine import AsyncEngine
from giveway.engine.engine import Engine
from giveway.options import EngineOptions

NUM_STREAMS = 32
PROMPT_TOKENS = 64
_TIMER_S = 0.002
_SMALLEST_VOCABULARY = 256


def bench_loop(options: EngineOptions, *, num_timers: int = 1500) -> Report:
    """Set timers of 2 ms in an event loop, one after another, with an idle engine beside it and with a busy one.

    late_p50_ms and so on: how much later than asked they fired. step_ms: a step of the busy engine, of 32 streams that
    decode.
    """
    built = build_engine(replace(options, max_num_seqs=NUM_STREAMS))
    rows = asyncio.run(_measure(AsyncEngine(built.engine), num_timers))
    settings = {"model": built.describe(), "streams": NUM_STREAMS, "timers": num_timers, "timer_ms": 1e3 * _TIMER_S}
    return Report("Event loop beside the engine", settings, rows)


async def _measure(engine: AsyncEngine, num_timers: int) -> list[dict[str, Any]]:
    async with engine:
        rows = [{"engine": "idle", **_late_ms(await _lateness_s(num_timers)), "step_ms": 0.0}]
        readers = [asyncio.ensure_future(_read(engine, number)) for number in range(NUM_STREAMS)]
        try:
            while await engine.ask(_num_decoding) < NUM_STREAMS:  # until then its steps are a few long prefills
                await asyncio.sleep(0.01)
            first_step, started_s = await engine.ask(_next_step), time.perf_counter()
            late_s = await _lateness_s(num_timers)
            seconds, num_steps = time.perf_counter() - started_s, await engine.ask(_next_step) - first_step
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        rows.append({"engine": "busy", **_late_ms(late_s), "step_ms": 1e3 * seconds / max(num_steps, 1)})
    return rows


async def _read(engine: AsyncEngine, number: int) -> None:
    prompt = [(number + place) % _SMALLEST_VOCABULARY for place in range(PROMPT_TOKENS)]
    # As long as it takes: an answer without a limit.
    async for _ in engine.generate(prompt, SamplingParams(temperature=0, ignore_eos=True)):
        pass


def _num_decoding(engine: Engine) -> int:
    return sum(bool(request.output_token_ids) for request in engine.scheduler.requests.values())


def _next_step(engine: Engine) -> int:
    return engine.scheduler.state.next_step_id


async def _lateness_s(num_timers: int) -> list[float]:
    late_s = []
    for _ in range(num_timers):
        due_s = time.perf_counter() + _TIMER_S
        await asyncio.sleep(_TIMER_S)
        late_s.append(time.perf_counter() - due_s)
    return late_s


def _late_ms(late_s: list[float]) -> dict[str, float]:
    """Sum up how late timers were (ms)."""
    cuts = quantiles(late_s, n=100, method="inclusive")
    return {
        "late_p50_ms": 1e3 * cuts[49],
        "late_p90_ms": 1e3 * cuts[89],
        "late_p99_ms": 1e3 * cuts[98],
        "late_max_ms": 1e3 * max(late_s),
    }
