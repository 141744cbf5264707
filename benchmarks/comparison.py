"""Rounds of all engines in turn, and what they come to: medians, spread, ratio to the best peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine_process import Engine, EngineFailure, EngineProcess
from benchmarks.scenarios import Figures, Scenario, limits_for
from benchmarks.workers.protocol import Finished, Loaded, Model
from giveway.bench.measure import sample

_WARM_UP = 0  # round number


@dataclass(frozen=True, slots=True)
class Setup:
    """What is the same for all engines."""

    model: Model
    kv_bytes_per_token: int  # in float32
    threads: int
    rounds: int
    timeout_s: float  # for the answer to one command
    directory: Path  # of the engines' logs


@dataclass(slots=True)
class _Contestant:
    """One engine in one scenario."""

    engine: Engine
    process: EngineProcess | None = None  # with the model in it, for all rounds
    loaded: Loaded | None = None
    figures: list[Figures] = field(default_factory=list)  # [rounds], as the next one
    first_tokens: list[list[int]] = field(default_factory=list)  # [rounds][requests]
    failure: str | None = None  # why it had no further round


class Comparison:
    """All engines, loaded side by side; one at a time is at work.

    Every scenario has new processes, so that an engine has room for what the scenario needs and for no more.
    """

    def __init__(
        self, engines: Sequence[Engine], scenarios: Sequence[Scenario], setup: Setup, tell: Callable[[str], None]
    ) -> None:
        """tell: hears what is going on, a line at a time."""
        self._engines, self._scenarios, self._setup, self._tell = engines, scenarios, setup, tell

    def run(self) -> list[dict[str, Any]]:
        """Measure everything. Returns one row for each scenario and engine."""
        return [row for scenario in self._scenarios for row in self._run_scenario(scenario)]

    def _run_scenario(self, scenario: Scenario) -> list[dict[str, Any]]:
        contestants = [_Contestant(engine) for engine in self._engines]
        with ExitStack() as processes:
            for round_number in range(_WARM_UP, self._setup.rounds + 1):
                for index in _turns(len(contestants), round_number):
                    if contestants[index].failure is None:
                        self._turn(scenario, round_number, contestants[index], processes)
        rows = [_row(scenario, contestant, reference=contestants[0]) for contestant in contestants]
        _add_ratios(rows, [engine.is_peer for engine in self._engines])
        return rows

    def _turn(self, scenario: Scenario, round_number: int, contestant: _Contestant, processes: ExitStack) -> None:
        label = "warm-up" if round_number == _WARM_UP else f"round {round_number}"
        about = f"{scenario.name}, {contestant.engine.name}, {label}"
        try:
            finished = self._measure(scenario, round_number, contestant, processes)
        except EngineFailure as failure:
            contestant.failure = f"{label}: {failure}"
            self._tell(f"{about}: {failure}")
            return
        figures = scenario.measure(scenario, finished)
        self._tell(f"{about}: {scenario.figure} {getattr(figures, scenario.figure):.4g}")
        if round_number != _WARM_UP:
            contestant.figures.append(figures)
            contestant.first_tokens.append([output[0] for output in finished.token_ids])

    def _measure(
        self, scenario: Scenario, round_number: int, contestant: _Contestant, processes: ExitStack
    ) -> Finished:
        requests = scenario.requests(round_number)
        if scenario.is_from_start:
            with self._start(contestant.engine) as process:
                self._load(process, contestant, scenario)
                finished = process.run(requests)
                return replace(finished, seconds=process.age_s)
        if contestant.process is None:
            contestant.process = processes.enter_context(self._start(contestant.engine))
            self._load(contestant.process, contestant, scenario)
        return contestant.process.run(requests)

    def _start(self, engine: Engine) -> EngineProcess:
        log = self._setup.directory / f"{engine.name.replace(':', '-')}.log"
        try:
            return EngineProcess(engine, log, threads=self._setup.threads, timeout_s=self._setup.timeout_s)
        except OSError as error:
            raise EngineFailure(f"{engine.python} cannot be started: {error}") from error

    def _load(self, process: EngineProcess, contestant: _Contestant, scenario: Scenario) -> None:
        setup = self._setup
        limits = limits_for(scenario, threads=setup.threads, kv_bytes_per_token=setup.kv_bytes_per_token)
        try:
            contestant.loaded = process.load(setup.model, limits)
        except EngineFailure as failure:
            raise EngineFailure(f"cannot be loaded: {failure}") from failure


def _turns(count: int, round_number: int) -> Iterator[int]:
    """Another engine is first in every round."""
    return ((round_number + turn) % count for turn in range(count))


def _row(scenario: Scenario, contestant: _Contestant, *, reference: _Contestant) -> dict[str, Any]:
    loaded = contestant.loaded
    row: dict[str, Any] = {
        "scenario": scenario.name,
        "engine": contestant.engine.name,
        "version": loaded.version if loaded else None,
        "settings": loaded.settings if loaded else contestant.engine.options,
        "figure": scenario.figure,
        "rounds": len(contestant.figures),
        "failure": contestant.failure,
    }
    for each in fields(Figures):
        values = [getattr(figures, each.name) for figures in contestant.figures]
        row[each.name] = median(values) if values and values[0] is not None else None
    taken = [getattr(figures, scenario.figure) for figures in contestant.figures]
    row["values"] = taken
    row["spread_pct"] = sample(taken).spread_pct if taken else None
    row["same_first_token_pct"] = _agreement(contestant, reference)
    return row


def _agreement(contestant: _Contestant, reference: _Contestant) -> float | None:
    """Percent of the requests whose first token is that of the first engine; None if one of them has no round."""
    pairs = [
        pair
        for mine, theirs in zip(contestant.first_tokens, reference.first_tokens, strict=False)  # one may have failed
        for pair in zip(mine, theirs, strict=True)
    ]
    return 100 * sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def _add_ratios(rows: Sequence[dict[str, Any]], is_peer: Sequence[bool]) -> None:
    """How many times as fast as the best peer: above 1 is faster, for rates and for seconds alike."""
    speeds = [_speed(row) for row in rows]
    best = max((speed for speed, peer in zip(speeds, is_peer, strict=True) if peer and speed), default=None)
    for row, speed in zip(rows, speeds, strict=True):
        row["ratio_to_best_peer"] = speed / best if speed and best else None


def _speed(row: dict[str, Any]) -> float | None:
    value: float | None = row[row["figure"]]
    return 1 / value if value and row["figure"] == "seconds" else value
