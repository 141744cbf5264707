"""From settings to a report: wait for the server, warm up, run, sum up."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from giveway.bench.serve.bodies import BodyMaker
from giveway.bench.serve.client import Target, connect, first_model, wait_until_ready
from giveway.bench.serve.driver import Driver
from giveway.bench.serve.figures import ClassWindow, Metric, Question, run_figures
from giveway.bench.serve.load_class import LoadClass
from giveway.bench.serve.progress import watching
from giveway.bench.serve.prompts import PromptFormat
from giveway.bench.serve.records import RequestRecord
from giveway.bench.serve.report import ServeReport
from giveway.bench.serve.workload import Workload
from giveway.core.errors import ConfigError, TargetServerError


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `giveway bench serve` was asked for."""

    target: Target
    workload: Workload
    question: Question
    metrics: tuple[Metric, ...] = tuple(Metric)  # in the tables
    model: str | None = None  # None: the first that the server lists
    ignores_eos: bool = True
    temperature: float | None = None  # None: the server's default
    extra_body: Mapping[str, Any] | None = None
    max_concurrency: int | None = None  # of open loops together; None: no limit
    num_warmups: int = 0
    ready_timeout_s: float = 0.0  # 0: not asked whether it is ready
    shows_progress: bool = True
    metadata: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        check_workload(self.workload)
        if self.target.is_chat and self.workload.prompts.format is not PromptFormat.TEXT:
            raise ConfigError(f"--endpoint {self.target.endpoint} takes text, not token ids: --prompt-format text")


def check_workload(workload: Workload) -> None:
    """Refuse what would never end, or has nothing to do. Raises ConfigError."""
    names = workload.class_names()
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two classes are called {twice!r}; give each a name of its own")
    for load_class in workload.classes:
        _check_open_loop(load_class, workload)
    if workload.trace is None and workload.duration_s is None and all(each.is_endless for each in workload.classes):
        raise ConfigError(
            "only closed loops without an end: give one of them num=, or say with --duration how many seconds they run"
        )


def _check_open_loop(load_class: LoadClass, workload: Workload) -> None:
    if load_class.rate is None or load_class.num_requests is not None:
        return
    if workload.duration_s is None:
        raise ConfigError(f"class {load_class.name!r} has no end: give it num=, or the run --num-prompts or --duration")
    if math.isinf(load_class.rate):
        raise ConfigError(f"class {load_class.name!r}: rate=inf needs num=, for without it there are infinitely many")


def bench_serve(options: ServeOptions, *, now_s: Callable[[], float] = time.perf_counter) -> ServeReport:
    """Measure. The first Ctrl-C ends the run and what was seen is returned; a second one raises KeyboardInterrupt.

    Raises TargetServerError (not ready, no model, every warm-up fails).
    """
    return asyncio.run(_bench(options, now_s))


async def _bench(options: ServeOptions, now_s: Callable[[], float]) -> ServeReport:
    target, workload = options.target, options.workload
    if options.ready_timeout_s > 0:
        await wait_until_ready(target, timeout_s=options.ready_timeout_s, now_s=now_s)
    model = options.model or await first_model(target)
    bodies = BodyMaker(model, target.is_chat, options.ignores_eos, options.temperature, options.extra_body)
    sources = workload.sources(bodies)
    async with connect(target, now_s) as client:
        if options.num_warmups:
            _check_warm_ups(await Driver(client, now_s).warm_up(workload.warm_ups(options.num_warmups, bodies)))
        with _stopped_by_interrupt() as stop, watching(sources, is_wanted=options.shows_progress) as watcher:
            driver = Driver(client, now_s, max_concurrency=options.max_concurrency, watcher=watcher)
            run = await driver.run(sources, duration_s=workload.duration_s, stop=stop)
    windows = [
        ClassWindow(name, source.start_s, source.is_endless) for source in sources for name in source.class_names
    ]
    classes, total = run_figures(run, windows, options.question)
    return ServeReport(_settings(options, model), options.metadata or {}, run, classes, total, options.metrics)


def _check_warm_ups(records: list[RequestRecord]) -> None:
    if all(record.failure is not None for record in records):
        first = records[0]
        raise TargetServerError(
            f"every warm-up request failed, the first with {first.failure}: {first.detail or 'no message'}. Fields "
            "that only some servers know can be left out: --no-ignore-eos, or --extra-body with null."
        )


@contextmanager
def _stopped_by_interrupt() -> Iterator[asyncio.Event]:
    """Give an event that the first Ctrl-C sets; from then on Ctrl-C does what it always does."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():  # elsewhere Python delivers no signals
        yield stop
        return

    def on_interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _settings(options: ServeOptions, model: str) -> dict[str, Any]:
    """Return what the run was, for the report: no value of a header, which may be a secret."""
    workload, prompts = options.workload, options.workload.prompts
    settings: dict[str, Any] = {
        "base_url": options.target.base_url,
        "endpoint": options.target.endpoint,
        "model": model,
        "seed": workload.seed,
        "prompt_format": prompts.format.value,
        "ignore_eos": options.ignores_eos,
        "percentiles": list(options.question.percents),
        "num_warmups": options.num_warmups,
        "classes": {load_class.name: load_class.describe() for load_class in workload.classes},
    }
    if prompts.format is PromptFormat.IDS:
        settings["random_vocab"] = f"{prompts.vocabulary.first}-{prompts.vocabulary.last}"
    if options.question.limits is not None:
        settings["goodput_ms"] = {name.value: 1000 * limit_s for name, limit_s in options.question.limits.items()}
    if workload.trace is not None:
        summary = workload.trace.summary
        settings["trace"] = {
            "file": workload.trace.path.name,
            "format": workload.trace.format.value,
            "time_scale": workload.trace.time_scale,
            "requests": summary.num_requests,
            "left_out": summary.num_left_out,
            "seconds": summary.last_due_s * workload.trace.time_scale,
        }
    optional = {
        "random_prefix_len": prompts.prefix_tokens or None,
        "duration_s": workload.duration_s,
        "max_concurrency": options.max_concurrency,
        "temperature": options.temperature,
        "extra_body": dict(options.extra_body) if options.extra_body else None,
        "headers": sorted(options.target.headers) or None,
    }
    return settings | {name: value for name, value in optional.items() if value is not None}
