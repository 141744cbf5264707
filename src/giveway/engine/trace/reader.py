"""Reads a trace. The file may come from anywhere: its shapes are checked, and so is that it tells one story."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from giveway.core.config import CacheConfig, PreemptionChoice, SchedulerConfig, SchedulingPolicy, VictimOrder
from giveway.core.cost_profile import CostProfile
from giveway.core.errors import ConfigError
from giveway.core.ids import RequestId
from giveway.core.kv_cache import CopyDirection, Tier
from giveway.core.plan import Deferral, DeferralReason, Giving, Preemption, PreemptionCost, PreemptionMode
from giveway.core.request import FinishReason
from giveway.engine.trace.content import (
    FORMAT_NAME,
    FORMAT_VERSION,
    PoolCounts,
    TraceContent,
    TracedAdmission,
    TracedChunk,
    TracedCopy,
    TracedEnd,
    TracedMove,
    TracedRequest,
    TracedStep,
    TracedSwapIn,
)
from giveway.engine.trace.line import Line
from giveway.engine.trace.situation import Situation

MAX_LINE_BYTES = 64 << 20
_SHORTEST_AGING_S = 1e-9

Config = TypeVar("Config", SchedulerConfig, CacheConfig)

_CHOICES: dict[str, type[Enum]] = {
    "policy": SchedulingPolicy,
    "preemption_mode": PreemptionChoice,
    "victim_order": VictimOrder,
}


def read_content(path: Path) -> TraceContent:
    """Read a file that `--trace` wrote. Raises ConfigError, with the number of the line.

    A last line that is not whole is left out: the process was killed while it was being written.
    """
    try:
        with path.open("rb") as file:
            return _Reader(path, file).read()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


class _Reader:
    """One pass over a file; remembers what lines leave out because it has not changed."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._is_cut_off = False
        self._costs: CostProfile | None = None
        self._decodes: tuple[RequestId, ...] = ()
        self._deferrals: tuple[Deferral, ...] = ()

    def read(self) -> TraceContent:
        lines = self._lines()
        first = next(lines, None)
        if first is None:
            raise ConfigError(f"{self._path}: is empty; a trace begins with a line of settings")
        header = Line(first[1], f"{self._path}: line 1")
        version = header.plain(FORMAT_NAME)
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"{self._path}: line 1: not a trace of format {FORMAT_VERSION} ({FORMAT_NAME} is {ascii(version)[:40]})"
            )
        config = _config(header.part("scheduler"), SchedulerConfig)
        if config.priority_aging_s is not None and config.priority_aging_s < _SHORTEST_AGING_S:
            raise ConfigError(
                f"{self._path}: line 1: priority_aging_s is {config.priority_aging_s}, which means nothing"
            )
        situation = Situation(config)
        steps: list[TracedStep] = []
        for number, value in lines:
            step = self._step(number, Line(value, f"{self._path}: line {number}"))
            with _placed(f"{self._path}: line {number}"):
                _check_order(step, steps)
                situation.begin(step)
                situation.check(step)
                situation.end(step)
            steps.append(step)
        return TraceContent(config, _config(header.part("cache"), CacheConfig), tuple(steps), self._is_cut_off)

    def _lines(self) -> Iterator[tuple[int, object]]:
        number = 0
        while line := self._file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise ConfigError(f"{self._path}: line {number} has more than {MAX_LINE_BYTES} bytes")
            if not line.endswith(b"\n"):  # the last one: nobody wrote its end
                self._is_cut_off = True
                return
            try:
                yield number, json.loads(line, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{self._path}: line {number} is not valid JSON: {error}") from error

    def _step(self, number: int, line: Line) -> TracedStep:
        step_id = line.maybe_count("step")
        has_plan = step_id is not None
        if "costs" in line:
            self._costs = self._read_costs(line.part("costs"))
        if self._costs is None and has_plan:
            raise ConfigError(f"{line.where}: no cost profile, here or before")
        if "decodes" in line:
            self._decodes = line.requests("decodes")
        if "deferrals" in line:
            rows = line.rows("deferrals", (str, DeferralReason, int))
            self._deferrals = tuple(Deferral(*row) for row in rows)
        return TracedStep(
            line=number,
            step_id=step_id,
            start_s=line.seconds("start_s"),
            end_s=line.seconds("end_s"),
            costs=self._costs or _FREE,
            has_failed=line.truth("failed", default=False),
            accepted=tuple(_request(part) for part in line.parts("accepted")),
            refused=line.requests("refused"),
            set_back_before=line.requests("set_back_before"),
            overdue=tuple(_copy(part) for part in line.parts("overdue")),
            aborted=tuple(_end(part) for part in line.parts("aborted")),
            held=line.requests("held"),
            suspects=line.requests("suspects"),
            preemptions=tuple(_preemption(part) for part in line.parts("preemptions")),
            dropped=line.requests("dropped"),
            moving=line.requests("moving"),
            swap_ins=tuple(_swap_in(part) for part in line.parts("swap_ins")),
            admissions=tuple(_admission(part) for part in line.parts("admissions")),
            chunks=tuple(TracedChunk(*row) for row in line.rows("chunks", (str, int, int, bool))),
            decodes=self._decodes if has_plan else (),
            deferrals=self._deferrals if has_plan else (),
            given_up=line.requests("given_up"),
            copies=tuple(_copy(part) for part in line.parts("copies")),
            moved=tuple(_moves(line)),
            set_back=line.requests("set_back"),
            finished=tuple(_end(part) for part in line.parts("finished")),
            pools=_pools(line) if has_plan else None,
        )

    def _read_costs(self, part: Line) -> CostProfile:
        values = {} if self._costs is None else self._costs.as_dict()
        with _placed(part.where):
            return CostProfile.from_dict({**values, **{name: part.seconds(name) for name in part.names()}})


# The profile of lines before the first step: nothing is planned with it.
_FREE = CostProfile(0, 0, 0, 0, 0, 0, 0, 0)


@contextmanager
def _placed(where: str) -> Iterator[None]:
    """Put the place in front of a complaint that knows none."""
    try:
        yield
    except ConfigError as error:
        if str(error).startswith(where):
            raise
        raise ConfigError(f"{where}: {error}") from error


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _check_order(step: TracedStep, before: Sequence[TracedStep]) -> None:
    """Time does not go back, and steps are numbered upwards."""
    if step.end_s < step.start_s:
        raise ConfigError(f"ends at {step.end_s} s, before its start at {step.start_s} s")
    if before and step.start_s < before[-1].start_s:
        raise ConfigError(f"starts at {step.start_s} s, before the line above it")
    last = next((each.step_id for each in reversed(before) if each.step_id is not None), None)
    if step.step_id is not None and last is not None and step.step_id <= last:
        raise ConfigError(f"step {step.step_id} comes after step {last}")


def _config(part: Line, kind: type[Config]) -> Config:
    """Read settings; those of a later version are left out, and those of an earlier one have their defaults."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        if field.name not in part:
            continue
        if field.name in _CHOICES:
            values[field.name] = part.maybe_choice(field.name, _CHOICES[field.name])
            continue
        value = values[field.name] = part.plain(field.name)
        if value is not None and not isinstance(value, bool | int | float):
            raise part.wrong(field.name, "a number, true, false or null")
    with _placed(part.where):
        try:
            return kind(**values)
        except TypeError as error:
            raise ConfigError(f"settings are missing or of a wrong type ({error})") from error


# Parts of a line


def _request(part: Line) -> TracedRequest:
    return TracedRequest(
        request_id=part.request("id"),
        number=part.count("number"),
        priority=part.count("class"),
        arrival_s=part.seconds("arrival_s"),
        num_prompt_tokens=part.count("prompt_tokens"),
        max_new_tokens=part.count("max_new_tokens"),
        branch_of=part.maybe_request("branch_of"),
    )


def _preemption(part: Line) -> Preemption:
    return Preemption(
        victim=part.request("victim"),
        beneficiary=part.maybe_request("beneficiary"),
        giving=_giving(part.part("giving")),
        wanted=part.choice("wanted", PreemptionChoice),
        cost=_cost(part.part("cost")),
        num_kept=part.count("kept_blocks"),
        whole=None if part.plain("whole") is None else _cost(part.part("whole")),
        is_resident=part.truth("resident"),
        is_for_its_class=part.truth("for_its_class"),
        has_paid=part.truth("paid"),
    )


def _giving(part: Line) -> Giving:
    return Giving(
        num_blocks=part.count("num_blocks"),
        num_computed_tokens=part.count("num_computed_tokens"),
        num_kept_tokens=part.count("num_kept_tokens"),
        num_copied_blocks=part.count("num_copied_blocks"),
        is_untouched=part.truth("is_untouched"),
        host_room=part.count("host_room"),
        disk_room=part.count("disk_room"),
        num_moved_blocks=part.count("num_moved_blocks"),
        bound_to=part.maybe_choice("bound_to", Tier),
        is_awaited=part.truth("is_awaited"),
    )


def _cost(part: Line) -> PreemptionCost:
    return PreemptionCost(
        part.choice("mode", PreemptionMode),
        part.maybe_choice("tier", Tier),
        part.seconds("recompute_s"),
        part.maybe_seconds("host_s"),
        part.maybe_seconds("disk_s"),
    )


def _swap_in(part: Line) -> TracedSwapIn:
    return TracedSwapIn(part.request("id"), part.count("blocks"), part.choice("tier", Tier), part.truth("guest"))


def _admission(part: Line) -> TracedAdmission:
    return TracedAdmission(
        part.request("id"),
        part.count("hit_blocks"),
        part.count("new_blocks"),
        part.count("computed_tokens"),
        part.truth("guest"),
    )


def _copy(part: Line) -> TracedCopy:
    return TracedCopy(
        part.request("id"),
        part.choice("direction", CopyDirection),
        part.count("blocks"),
        part.choice("tier", Tier),
        part.truth("failed"),
    )


def _moves(line: Line) -> Iterator[TracedMove]:
    for row in line.items("moved"):
        if not isinstance(row, list) or len(row) != 2 or not isinstance(row[0], str):
            raise line.wrong("moved", "a list of request ids and tiers")
        try:
            yield TracedMove(RequestId(row[0]), None if row[1] is None else Tier(row[1]))
        except ValueError as error:
            raise line.wrong("moved", "a list of request ids and tiers") from error


def _end(part: Line) -> TracedEnd:
    return TracedEnd(
        part.request("id"),
        part.choice("reason", FinishReason),
        part.count("output_tokens"),
        part.count("preemptions"),
        part.count("recomputed_tokens"),
    )


def _pools(line: Line) -> PoolCounts:
    names = fields(PoolCounts)
    values = line.items("pools")
    if len(values) != len(names) or not all(type(value) is int and value >= 0 for value in values):
        raise line.wrong("pools", f"{len(names)} whole numbers")
    return PoolCounts(*values)
