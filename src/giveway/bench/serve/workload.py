"""From classes and a trace to requests: each made when its turn comes near, so that a long run needs little memory."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from giveway.bench.serve.arrivals import due_times_s
from giveway.bench.serve.bodies import BodyMaker, Wishes
from giveway.bench.serve.load_class import LoadClass, Shape
from giveway.bench.serve.prompts import PromptMaker
from giveway.bench.serve.traces import TraceFormat, TraceSummary, read_trace

_WARM_UP = "warm-up"
_TRACE = "trace"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, ready to be sent."""

    class_name: str
    name: str  # of the request, sent as X-Request-Id
    due_s: float | None  # after the start of the run; None: as soon as its closed loop has a place
    prompt_tokens: int  # wished
    output_tokens: int  # wished
    is_streamed: bool
    body: bytes


@dataclass(frozen=True, slots=True)
class Source:
    """Requests that are sent in order, by one rule."""

    requests: Iterator[PlannedRequest]
    class_names: tuple[str, ...]  # a trace with priorities has several
    concurrency: int | None  # None: open loop
    start_s: float
    num_requests: int | None  # None: not known before the end
    is_endless: bool  # ends with the others, not by itself


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file to replay, looked through already, as far as it will be replayed."""

    path: Path
    format: TraceFormat
    summary: TraceSummary
    limit: int | None  # requests; None: all
    time_scale: float  # 2: it takes twice as long


@dataclass(frozen=True, slots=True)
class Workload:
    """All that is sent in one run."""

    classes: tuple[LoadClass, ...]
    trace: Trace | None
    duration_s: float | None  # no arrival later than this; None: no such limit
    seed: int
    prompts: PromptMaker
    name_prefix: str  # of the names of requests

    def sources(self, bodies: BodyMaker) -> list[Source]:
        """Return one source a class, and one for the trace."""
        found = [self._class_source(place, load_class, bodies) for place, load_class in enumerate(self.classes)]
        if self.trace is not None:
            found.append(self._trace_source(self.trace, bodies))
        return found

    def warm_ups(self, number: int, bodies: BodyMaker) -> Iterator[PlannedRequest]:
        """Yield requests to send before the run: of each class in turn, or like the beginning of the trace."""
        serials = self._serials(len(self.classes) + 1)
        names = (f"{self.name_prefix}{_WARM_UP}-{index}" for index in count())
        if self.classes:
            rng = random.Random(f"{self.seed} {_WARM_UP}")  # noqa: S311  # repeatable on purpose
            for index in range(number):
                load_class = self.classes[index % len(self.classes)]
                yield self._request(load_class, None, next(serials), next(names), rng, bodies)
        elif self.trace is not None:
            for line in read_trace(self.trace.path, self.trace.format, limit=number):
                wishes = Wishes(line.output_tokens, priority=line.priority)
                body = bodies.make(self.prompts.fresh(next(serials), line.prompt_tokens), wishes)
                yield PlannedRequest(_WARM_UP, next(names), None, line.prompt_tokens, line.output_tokens, True, body)

    def class_names(self) -> list[str]:
        """Return the names under which requests are reported."""
        names = [load_class.name for load_class in self.classes]
        if self.trace is not None:
            names += [trace_class(priority) for priority in self.trace.summary.priorities]
        return names

    def _serials(self, place: int) -> Iterator[int]:
        """Numbers that no other source has: one residue each, for classes, trace and warm-ups."""
        return count(place, len(self.classes) + 2)

    def _class_source(self, place: int, load_class: LoadClass, bodies: BodyMaker) -> Source:
        is_closed = load_class.shape is Shape.CLOSED
        return Source(
            requests=self._class_requests(place, load_class, bodies),
            class_names=(load_class.name,),
            concurrency=load_class.concurrency if is_closed else None,
            start_s=load_class.start_s,
            num_requests=load_class.limit,
            is_endless=load_class.is_endless,
        )

    def _class_requests(self, place: int, load_class: LoadClass, bodies: BodyMaker) -> Iterator[PlannedRequest]:
        rng = random.Random(f"{self.seed} lengths {load_class.name}")  # noqa: S311  # repeatable on purpose
        due: Iterable[float | None]
        if load_class.shape is Shape.CLOSED:
            due = (None for _ in (count() if load_class.limit is None else range(load_class.limit)))
        else:
            gaps = random.Random(f"{self.seed} arrivals {load_class.name}")  # noqa: S311
            due = due_times_s(load_class, gaps, duration_s=self.duration_s)
        for number, (serial, due_s) in enumerate(zip(self._serials(place), due, strict=False)):
            yield self._request(load_class, due_s, serial, f"{self.name_prefix}{load_class.name}-{number}", rng, bodies)

    def _request(
        self,
        load_class: LoadClass,
        due_s: float | None,
        serial: int,
        name: str,
        rng: random.Random,
        bodies: BodyMaker,
    ) -> PlannedRequest:
        prompt_tokens, output_tokens = load_class.prompt.draw(rng), load_class.output.draw(rng)
        wishes = Wishes(output_tokens, load_class.is_streamed, load_class.priority, load_class.service_tier)
        return PlannedRequest(
            class_name=load_class.name,
            name=name,
            due_s=due_s,
            prompt_tokens=prompt_tokens + self.prompts.prefix_tokens,
            output_tokens=output_tokens,
            is_streamed=load_class.is_streamed,
            body=bodies.make(self.prompts.fresh(serial, prompt_tokens), wishes),
        )

    def _trace_source(self, trace: Trace, bodies: BodyMaker) -> Source:
        return Source(
            requests=self._trace_requests(trace, bodies),
            class_names=tuple(trace_class(priority) for priority in trace.summary.priorities),
            concurrency=None,
            start_s=0.0,
            num_requests=trace.summary.num_requests,
            is_endless=False,
        )

    def _trace_requests(self, trace: Trace, bodies: BodyMaker) -> Iterator[PlannedRequest]:
        serials = self._serials(len(self.classes))
        for number, line in enumerate(read_trace(trace.path, trace.format, limit=trace.limit)):
            due_s = line.due_s * trace.time_scale
            if self.duration_s is not None and due_s > self.duration_s:
                return
            prompt = self.prompts.from_blocks(next(serials), line.prompt_tokens, line.block_ids)
            yield PlannedRequest(
                class_name=trace_class(line.priority),
                name=f"{self.name_prefix}{_TRACE}-{number}",
                due_s=due_s,
                prompt_tokens=line.prompt_tokens + self.prompts.prefix_tokens,
                output_tokens=line.output_tokens,
                is_streamed=True,
                body=bodies.make(prompt, Wishes(line.output_tokens, priority=line.priority)),
            )


def trace_class(priority: int | None) -> str:
    """Return the name under which requests of a trace are reported."""
    return _TRACE if priority is None else f"{_TRACE}-p{priority}"
