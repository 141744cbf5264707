"""What exactness costs on the PyTorch path: the same work with and without it, in turn, in one process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from giveway.bench.measure import Report, sample
from giveway.build import BuiltEngine, build_on, load_model
from giveway.core.config import blocks_for
from giveway.core.sampling import SamplingParams
from giveway.options import EngineOptions


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, and how often."""

    batches: tuple[int, ...] = (1, 8, 16)
    context_tokens: int = 256  # of each request that decodes
    num_steps: int = 32  # of decode
    prefill_tokens: int = 512
    num_rounds: int = 7


FULL = Sizes()
QUICK = Sizes(batches=(1, 8), context_tokens=32, num_steps=8, prefill_tokens=128, num_rounds=2)


def bench_exact(options: EngineOptions, *, sizes: Sizes = FULL) -> Report:
    """Measure decode at several batch sizes and one long prefill, exact and not exact alternating."""
    engines = {
        exact: build_on(
            load_model(replace(options, backend="torch", exact=exact)),
            replace(
                options,
                exact=exact,
                num_kv_blocks=_num_blocks(options, sizes),
                swap_space=0,
                enable_prefix_caching=False,  # the same prompts come in every round, and are to be computed
            ),
        )
        for exact in (True, False)
    }
    works: list[tuple[str, Callable[[BuiltEngine], float]]] = [
        (f"decode, batch {batch}", lambda built, batch=batch: _decode_tok_s(built, batch, sizes))  # type: ignore[misc]
        for batch in sizes.batches
    ]
    num_tokens = sizes.prefill_tokens
    works.append((f"prefill of {num_tokens}", lambda built: _prefill_tok_s(built, num_tokens)))
    rows = []
    for name, work in works:
        for built in engines.values():
            work(built)  # warm-up
        speeds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(sizes.num_rounds):
            for exact in (True, False) if number % 2 else (False, True):
                speeds[exact].append(work(engines[exact]))
        with_it, without = sample(speeds[True]), sample(speeds[False])
        ratios = sample([a / b for a, b in zip(speeds[True], speeds[False], strict=True)])
        rows.append(
            {
                "work": name,
                "exact_tok_s": with_it.median,
                "fast_tok_s": without.median,
                "cost_pct": 100 * (1 - ratios.median),
                "spread_pct": ratios.spread_pct,
            }
        )
    settings = {
        "exact": engines[True].model.backend.description,
        "fast": engines[False].model.backend.description,
        "model": engines[True].model.name,
        "context_tokens": sizes.context_tokens,
        "decode_steps": sizes.num_steps,
        "rounds": sizes.num_rounds,
    }
    return Report("What exactness costs", settings, rows)


def _num_blocks(options: EngineOptions, sizes: Sizes) -> int:
    """Blocks with room for everything measured."""
    of_one = 1 + (sizes.context_tokens + sizes.num_steps) // options.block_size
    return max(max(sizes.batches) * of_one, blocks_for(sizes.prefill_tokens, options.block_size))


def _prompt(built: BuiltEngine, num_tokens: int, number: int) -> list[int]:
    rng = random.Random(number)  # noqa: S311  # repeatable on purpose
    vocab_size = min(built.model.tokenizer.vocab_size, built.model.backend.vocab_size)
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def _decode_tok_s(built: BuiltEngine, batch: int, sizes: Sizes) -> float:
    """Tokens per second of `batch` requests in steady decode."""
    params = SamplingParams(temperature=0, max_tokens=sizes.num_steps + 1, ignore_eos=True)
    engine = built.engine
    for number in range(batch):
        engine.submit(_prompt(built, sizes.context_tokens, number), params)
    engine.step()
    while any(not request.output_token_ids for request in engine.scheduler.requests.values()):
        engine.step()
    started_s, num_tokens = time.perf_counter(), 0
    while engine.has_work:
        num_tokens += sum(len(update.token_ids) for update in engine.step())
    return num_tokens / (time.perf_counter() - started_s)


def _prefill_tok_s(built: BuiltEngine, num_tokens: int) -> float:
    """Prompt tokens per second of one prefill."""
    built.engine.submit(_prompt(built, num_tokens, 0), SamplingParams(temperature=0, max_tokens=1))
    started_s = time.perf_counter()
    while built.engine.has_work:
        built.engine.step()
    return num_tokens / (time.perf_counter() - started_s)
