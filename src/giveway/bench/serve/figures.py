"""From records to the figures of a class: pure functions over moments, so that they are tested exactly.

TTFT, TPOT, ITL and E2E are of completed requests, as in `vllm bench serve`. Tokens per second also count what a request
had received when it was cut off.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, pstdev

from giveway.bench.serve.driver import Run
from giveway.bench.serve.records import Outcome, RequestRecord
from giveway.core.errors import ConfigError


class Metric(Enum):
    """A length of time that is reported, by the name that `vllm bench serve` gives it."""

    TTFT = "ttft"  # time to first token
    TPOT = "tpot"  # time per output token after the first
    ITL = "itl"  # between two events with tokens
    E2E = "e2el"  # end to end


class Figure(Enum):
    """What one request says to a limit; ITL says it many times and so has none."""

    TTFT = "ttft"
    TPOT = "tpot"
    E2E = "e2el"


@dataclass(frozen=True, slots=True)
class Spread:
    """Many values of one metric, in seconds."""

    count: int
    mean: float
    std: float
    low: float
    high: float
    percentiles: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """One class, or all together."""

    name: str
    window_s: float  # that rates are taken over
    num_requests: int
    num_completed: int
    num_cut_off: int
    num_short: int  # completed with fewer tokens than wished
    num_without_usage: int  # completed, and the server did not count their tokens
    errors: Mapping[str, int]  # by kind
    prompt_tokens: int
    output_tokens: int
    num_good: int | None  # completed within all limits; None: no limits
    spreads: Mapping[Metric, Spread | None]  # None: no value
    lag: Spread | None  # how late the client sent; None: it sent nothing

    @property
    def num_errors(self) -> int:
        """Return how many failed, of every kind."""
        return sum(self.errors.values())

    def per_second(self, number: float) -> float:
        """Return a rate over the window."""
        return number / self.window_s if self.window_s > 0 else 0.0

    @property
    def goodput(self) -> float | None:
        """Return requests a second that kept all limits; None: no limits."""
        return None if self.num_good is None else self.per_second(self.num_good)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the value below which so many percent of `ordered` (ascending, not empty) lie, interpolated linearly."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Sequence[float], percents: Sequence[float]) -> Spread | None:
    """Sum up values; None if there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return Spread(
        count=len(ordered),
        mean=fmean(ordered),
        std=pstdev(ordered),
        low=ordered[0],
        high=ordered[-1],
        percentiles={percent: percentile(ordered, percent) for percent in percents},
    )


def parse_goodput(pairs: Sequence[str]) -> dict[Figure, float]:
    """Read "ttft:200" (milliseconds) and return seconds. Raises ConfigError."""
    limits: dict[Figure, float] = {}
    names = [figure.value for figure in Figure]
    for pair in pairs:
        name, _, text = pair.partition(":")
        try:
            milliseconds = float(text)
        except ValueError:
            milliseconds = math.nan
        if name not in names or not 0 <= milliseconds < math.inf:
            raise ConfigError(f"--goodput {pair!r}: write NAME:MILLISECONDS with one of {', '.join(names)}")
        if Figure(name) in limits:
            raise ConfigError(f"--goodput names {name} twice")
        limits[Figure(name)] = milliseconds / 1000
    return limits


def is_good(record: RequestRecord, limits: Mapping[Figure, float]) -> bool:
    """Return whether a completed request kept all limits (seconds). A single token has no TPOT and keeps any."""
    figures = {Figure.TTFT: record.ttft_s, Figure.TPOT: record.tpot_s or 0.0, Figure.E2E: record.e2e_s}
    if record.outcome is not Outcome.COMPLETED:
        return False
    return all((value := figures[figure]) is not None and value <= limit for figure, limit in limits.items())


@dataclass(frozen=True, slots=True)
class Question:
    """What the report shall say."""

    percents: tuple[float, ...] = (50, 90, 99)
    limits: Mapping[Figure, float] | None = None  # seconds; None: no goodput
    fixed_lengths: bool = True  # an answer with fewer tokens than wished is told


def class_figures(
    name: str, records: Sequence[RequestRecord], question: Question, *, begin_s: float, end_s: float
) -> ClassFigures:
    """Sum up the records of one class. Rates are taken from begin_s to end_s, moments of the records' clock."""
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    counted = [record for record in records if record.outcome is not Outcome.FAILED and record.token_times_s]
    values: dict[Metric, list[float]] = {
        Metric.TTFT: [each for record in completed if (each := record.ttft_s) is not None],
        Metric.TPOT: [each for record in completed if (each := record.tpot_s) is not None],
        Metric.ITL: [gap for record in completed for gap in record.itls_s],
        Metric.E2E: [record.e2e_s for record in completed],
    }
    lags = [each for record in records if (each := record.lag_s) is not None]
    is_short = [record.num_output_tokens < record.wished_output_tokens for record in completed]
    return ClassFigures(
        name=name,
        window_s=max(0.0, end_s - begin_s),
        num_requests=len(records),
        num_completed=len(completed),
        num_cut_off=sum(record.outcome is Outcome.CUT_OFF for record in records),
        num_short=sum(is_short) if question.fixed_lengths else 0,
        num_without_usage=sum(record.usage_output_tokens is None for record in completed),
        errors=dict(Counter(record.failure for record in records if record.failure is not None)),
        prompt_tokens=sum(record.num_prompt_tokens for record in counted),
        output_tokens=sum(record.num_output_tokens for record in counted),
        num_good=None if question.limits is None else sum(is_good(each, question.limits) for each in completed),
        spreads={metric: spread(found, question.percents) for metric, found in values.items()},
        lag=spread(lags, question.percents),
    )


@dataclass(frozen=True, slots=True)
class ClassWindow:
    """A class, and since when it is measured."""

    name: str
    start_s: float  # after the start of the run
    is_endless: bool  # it was cut off at the end of the run; any other class ends with its last request


def run_figures(
    run: Run, windows: Sequence[ClassWindow], question: Question
) -> tuple[list[ClassFigures], ClassFigures]:
    """Return the figures of every class, and those of all together."""
    classes = []
    for window in windows:
        records = [record for record in run.records if record.class_name == window.name]
        begin_s = run.started_s + window.start_s
        ends_s = [record.end_s for record in records]
        end_s = run.ended_s if window.is_endless or not ends_s else min(max(ends_s), run.ended_s)
        classes.append(class_figures(window.name, records, question, begin_s=begin_s, end_s=end_s))
    total = class_figures("total", run.records, question, begin_s=run.started_s, end_s=run.ended_s)
    return classes, total
