"""A trace that was read, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from giveway.core.errors import ConfigError
from giveway.core.ids import RequestId
from giveway.core.plan import Preemption
from giveway.engine.trace.content import TraceContent, TracedRequest, TracedStep
from giveway.engine.trace.explain import RequestTotals, Unserved, explain, totals_of
from giveway.engine.trace.export import chrome_trace
from giveway.engine.trace.reader import read_content


def read_trace(path: str | Path) -> Trace:
    """Read a file that `--trace` wrote. Raises ConfigError, with the number of the line that is wrong."""
    return Trace(Path(path), read_content(Path(path)))


class Trace:
    """Everything is derived from the file: no engine, no model and no clock is needed."""

    def __init__(self, path: Path, content: TraceContent) -> None:
        self.path = path
        self.content = content

    @property
    def steps(self) -> tuple[TracedStep, ...]:
        """Every line but the first."""
        return self.content.steps

    @property
    def is_cut_off(self) -> bool:
        """Whether the last line was not whole and is left out: the process was killed while it wrote."""
        return self.content.is_cut_off

    @property
    def origin_s(self) -> float:
        """Where the trace begins on the clock of the engine."""
        return min(
            [step.start_s for step in self.steps] + [request.arrival_s for request in self.requests], default=0.0
        )

    @cached_property
    def requests(self) -> tuple[TracedRequest, ...]:
        """Every request, by arrival."""
        return tuple(request for step in self.steps for request in step.accepted)

    def preemptions(self) -> Iterator[tuple[TracedStep, Preemption]]:
        """Yield every decision to let somebody give way, with its step, whose `costs` it was made with."""
        for step in self.steps:
            for preemption in step.preemptions:
                yield step, preemption

    def explain(self, request_id: str) -> tuple[Unserved, ...]:
        """Return why a request was not served, for every step in which it was not; steps in a row are one entry.

        Raises ConfigError if nobody bears that name.
        """
        names = list(dict.fromkeys(request.request_id for request in self.requests))
        if request_id not in names:
            near = get_close_matches(request_id, names, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are {len(names)}, such as {names[:3]}."
            raise ConfigError(f"{self.path}: there is no request {request_id!r}. {hint}")
        return explain(self.content, RequestId(request_id))

    def totals(self) -> tuple[RequestTotals, ...]:
        """Return one entry for each request, by arrival."""
        return totals_of(self.content)

    def as_chrome_trace(self) -> dict[str, Any]:
        """Return the trace in the format of ui.perfetto.dev and chrome://tracing, to be written as JSON."""
        return chrome_trace(self.content)
