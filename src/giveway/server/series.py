"""Columns of numbers behind /metrics: counters, gauges and histograms that cost an addition, not a call per sample.

The engine's thread writes them after every step, and a scrape copies them: both under one lock, so that a scrape never
sees half a step. Every series is there from the start, at 0.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

Labels = tuple[str, ...]
Common = Mapping[str, str]


class Family(ABC):
    """One metric with all its series.

    labels: every value that each label may have; a series is made for each combination, and no other ever. older_name:
    a further name under which the same numbers are told.
    """

    def __init__(
        self,
        name: str,
        meaning: str,
        labels: Mapping[str, Sequence[str]] | None = None,
        *,
        older_name: str | None = None,
    ) -> None:
        self.meaning = meaning
        self.names = (name,) if older_name is None else (name, older_name)
        self.label_names = tuple(labels or ())
        self.combinations: list[Labels] = list(product(*(labels or {}).values()))

    @abstractmethod
    def snapshot(self, common: Common) -> Callable[[], Iterator[Metric]]:
        """Copy the numbers; calling the result makes metrics of them. common: labels that every series has."""


class _Numbers(Family):
    """A metric with one number for each series."""

    _kind: type[CounterMetricFamily] | type[GaugeMetricFamily]

    def __init__(
        self,
        name: str,
        meaning: str,
        labels: Mapping[str, Sequence[str]] | None = None,
        *,
        older_name: str | None = None,
    ) -> None:
        super().__init__(name, meaning, labels, older_name=older_name)
        self.values: dict[Labels, float] = dict.fromkeys(self.combinations, 0.0)

    def add(self, amount: float, *labels: str) -> None:
        """Add to one series. Raises KeyError for a label value that was not declared."""
        self.values[labels] += amount

    def snapshot(self, common: Common) -> Callable[[], Iterator[Metric]]:
        """Copy the numbers."""
        values = self.values.copy()

        def metrics() -> Iterator[Metric]:
            for name in self.names:
                metric = self._kind(name, self.meaning, labels=(*common, *self.label_names))
                for labels, value in values.items():
                    metric.add_metric((*common.values(), *labels), value)
                yield metric

        return metrics


class Counter(_Numbers):
    """Numbers that only grow. The name is told with `_total` behind it."""

    _kind = CounterMetricFamily


class Gauge(_Numbers):
    """Numbers that go up and down."""

    _kind = GaugeMetricFamily

    def set(self, value: float, *labels: str) -> None:
        """Replace the number of one series. Raises KeyError for a label value that was not declared."""
        if labels not in self.values:
            raise KeyError(labels)
        self.values[labels] = value


class Histogram(Family):
    """Counts of observations by size. edges: upper ends of the buckets, ascending; one without end follows."""

    def __init__(
        self,
        name: str,
        meaning: str,
        edges: Sequence[float],
        labels: Mapping[str, Sequence[str]] | None = None,
        *,
        older_name: str | None = None,
    ) -> None:
        super().__init__(name, meaning, labels, older_name=older_name)
        self.edges = tuple(edges)
        self.counts: dict[Labels, list[int]] = {labels: [0] * (len(edges) + 1) for labels in self.combinations}
        self.sums: dict[Labels, float] = dict.fromkeys(self.combinations, 0.0)

    def observe(self, value: float, *labels: str, times: int = 1) -> None:
        """Count an observation. times: it was made so often. Raises KeyError for an undeclared label value."""
        self.counts[labels][bisect_left(self.edges, value)] += times
        self.sums[labels] += value * times

    def snapshot(self, common: Common) -> Callable[[], Iterator[Metric]]:
        """Copy the numbers."""
        counts = [(labels, counts.copy()) for labels, counts in self.counts.items()]
        sums = self.sums.copy()
        ends = [*(f"{edge:g}" for edge in self.edges), "+Inf"]

        def metrics() -> Iterator[Metric]:
            for name in self.names:
                metric = HistogramMetricFamily(name, self.meaning, labels=(*common, *self.label_names))
                for labels, each in counts:
                    metric.add_metric((*common.values(), *labels), list(_cumulated(ends, each)), sums[labels])
                yield metric

        return metrics


def _cumulated(ends: Sequence[str], counts: Sequence[int]) -> Iterator[tuple[str, float]]:
    total = 0
    for end, count in zip(ends, counts, strict=True):
        total += count
        yield end, total


class SeriesCollector(Collector):
    """Hands all families to prometheus_client. Whoever writes them holds `lock`."""

    def __init__(self, families: Iterable[Family], common: Common) -> None:
        """common: labels that every series has, with their values."""
        self.lock = threading.Lock()
        self._families = list(families)
        self._common = dict(common)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as of one moment between two steps."""
        with self.lock:
            snapshots = [family.snapshot(self._common) for family in self._families]
        for metrics in snapshots:
            yield from metrics()
