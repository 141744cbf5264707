"""Writes a trace: one JSON line a step, small enough to be always on, whole whenever the process may die.

A line says only what is new. Absent lists are empty, but for `decodes` and `deferrals`, which hardly change from step
to step: absent, they are those of the last line with a step. `costs` holds the numbers that differ from those before.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from enum import Enum
from io import FileIO
from operator import attrgetter
from pathlib import Path
from typing import Any

from giveway.core.config import CacheConfig, SchedulerConfig
from giveway.core.cost_profile import CostProfile
from giveway.core.errors import ConfigError
from giveway.core.events import (
    Accepted,
    Admitted,
    CopyEnded,
    Finished,
    ParkedMoved,
    Preempted,
    PromptLogprobs,
    Refused,
    StepEvent,
    TokenEmitted,
    TokensComputed,
)
from giveway.core.ids import RequestId
from giveway.core.plan import Deferral, Preemption, PreemptionCost, StepPlan
from giveway.core.request import FinishReason, Request
from giveway.core.state import SchedulerState
from giveway.engine.trace.content import FORMAT_NAME, FORMAT_VERSION

logger = logging.getLogger("giveway")

Planner = Callable[[SchedulerState], StepPlan]

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_COST_NAMES = tuple(field.name for field in fields(CostProfile))
_costs_of = attrgetter(*_COST_NAMES)
_PROGRESS = frozenset({TokenEmitted, TokensComputed, PromptLogprobs})  # told by the plan already


class TraceWriter:
    """Sees every plan being made (`watch`) and what became of it (a listener of the engine).

    A file that cannot be written harms nobody: there is one warning, and the trace ends. Not for several schedulers.
    """

    def __init__(self, path: Path, config: SchedulerConfig, cache_config: CacheConfig) -> None:
        """Open the file. An older trace is replaced; any other content is not. Raises ConfigError."""
        self._path = path
        self._file: FileIO | None = _open(path)
        self._last_number = -1  # of the newest request seen
        self._new: dict[RequestId, Request] = {}  # seen by a plan, acceptance not yet told
        self._unseen: set[RequestId] = set()  # taken back before any plan saw them: nothing is told of them
        self._state: SchedulerState | None = None
        self._start_s = 0.0
        self._planned_costs: CostProfile | None = None
        self._held: tuple[RequestId, ...] = ()
        self._suspects: tuple[RequestId, ...] = ()
        self._copying: frozenset[RequestId] = frozenset()  # waited for a copy when the plan was made
        self._begun: set[RequestId] = set()  # of the events of this step, preempted or admitted so far
        self._is_planned = False  # and not yet heard of again
        self._running: frozenset[RequestId] | None = None  # residents, if the step before was broken off
        # As they were written last
        self._costs: CostProfile | None = None
        self._cost_values: tuple[float, ...] = ()
        self._decodes: tuple[RequestId, ...] = ()
        self._deferrals: tuple[Deferral, ...] = ()
        header = {FORMAT_NAME: FORMAT_VERSION, "scheduler": _plain(config), "cache": _plain(cache_config)}
        self._write(header)

    # Seeing

    def watch(self, planner: Planner) -> Planner:
        """Return a planner for `Scheduler` that does what `planner` does, and lets the trace see the state."""

        def plan(state: SchedulerState) -> StepPlan:
            if self._file is not None:
                self._look(state)
            return planner(state)

        return plan

    def _look(self, state: SchedulerState) -> None:
        """Note what nobody will know any more when the step is over."""
        self._running = frozenset(state.kv.tables) if self._is_planned else None
        self._is_planned = True
        self._state, self._start_s, self._planned_costs = state, state.now_s, state.costs
        self._held = tuple(sorted(state.held))
        self._suspects = tuple(state.suspects[0].targets) if state.suspects else ()
        self._copying = frozenset(state.awaited_copies)
        last = self._last_number
        for request in reversed(state.requests.values()):
            number = request.rank[1]
            if number <= last:
                break
            self._new[request.request_id] = request
            self._last_number = max(self._last_number, number)

    def __call__(self, plan: StepPlan | None, events: Sequence[StepEvent]) -> None:
        """Write the line of a step."""
        if self._file is None:
            return
        line = self._line(plan, events)
        self._is_planned = False
        if line is not None:
            self._write(line)

    def close(self) -> None:
        """Close the file. Twice is harmless."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # Lines

    def _line(self, plan: StepPlan | None, events: Sequence[StepEvent]) -> dict[str, Any] | None:
        state = self._state
        rare = [event for event in events if type(event) not in _PROGRESS]
        if plan is None or state is None:
            if not rare:
                return None
            line: dict[str, Any] = {"step": None, "start_s": rare[-1].time_s, "end_s": rare[-1].time_s}
            self._add_events(line, rare, None, has_failed=False)
            return line
        if not events and plan.is_empty and not plan.deferrals and not state.requests:
            return None
        end_s = max(state.now_s, events[-1].time_s if events else 0.0)
        line = {"step": plan.step_id, "start_s": self._start_s, "end_s": end_s}
        has_failed = len(rare) == len(events) and _has_failed(plan, rare)
        if has_failed:
            line["failed"] = True
        if rare:
            self._add_events(line, rare, plan, has_failed=has_failed)
        self._add_plan(line, plan)
        device = state.kv.device
        free, owned = device.num_free, device.num_owned
        line["pools"] = [owned, device.size - owned - free, free, state.kv.host.num_owned, state.kv.disk.num_owned]
        return line

    def _add_plan(self, line: dict[str, Any], plan: StepPlan) -> None:
        if self._planned_costs is not self._costs:
            self._add_costs(line)
        line.update((key, ids) for key, ids in (("held", self._held), ("suspects", self._suspects)) if ids)
        if plan.preemptions:
            line["preemptions"] = [_preemption(preemption) for preemption in plan.preemptions]
        if plan.dropped:
            line["dropped"] = plan.dropped
        if plan.moves:
            line["moving"] = [move.request_id for move in plan.moves]
        if plan.swap_ins:
            line["swap_ins"] = [
                {
                    "id": swap_in.copy.request_id,
                    "blocks": len(swap_in.copy.device_blocks),
                    "tier": swap_in.copy.tier.value,
                    "guest": swap_in.is_guest,
                }
                for swap_in in plan.swap_ins
            ]
        if plan.admissions:
            line["admissions"] = [
                {
                    "id": admission.request_id,
                    "hit_blocks": len(admission.hits),
                    "new_blocks": len(admission.new),
                    "computed_tokens": admission.num_computed_tokens,
                    "guest": admission.is_guest,
                }
                for admission in plan.admissions
            ]
        if plan.chunks:
            line["chunks"] = [[chunk.request_id, chunk.start, chunk.num_tokens, chunk.samples] for chunk in plan.chunks]
        if plan.given_up:
            line["given_up"] = [lost.request_id for lost in plan.given_up]
        if plan.decodes.request_ids != self._decodes:
            self._decodes = line["decodes"] = plan.decodes.request_ids
        if plan.deferrals != self._deferrals:
            self._deferrals = plan.deferrals
            line["deferrals"] = [[each.request_id, each.reason.value, each.lacking_blocks] for each in plan.deferrals]

    def _add_costs(self, line: dict[str, Any]) -> None:
        values = _costs_of(self._planned_costs)
        before = self._cost_values or (None,) * len(values)
        changed = {name: value for name, value, old in zip(_COST_NAMES, values, before, strict=True) if value != old}
        if changed:
            line["costs"] = changed
        self._costs, self._cost_values = self._planned_costs, values

    def _add_events(
        self, line: dict[str, Any], events: Iterable[StepEvent], plan: StepPlan | None, *, has_failed: bool
    ) -> None:
        told: dict[str, list[Any]] = {}
        self._begun = set()
        for event in events:
            if isinstance(event, Preempted | Admitted):
                self._begun.add(event.request_id)
            entry = self._entry(event, plan, has_failed=has_failed)
            if entry is not None:
                told.setdefault(entry[0], []).append(entry[1])
        line |= told

    def _entry(self, event: StepEvent, plan: StepPlan | None, *, has_failed: bool) -> tuple[str, Any] | None:
        """Say under which name an event is told, and how; None: the plan tells it, or nobody needs it."""
        name = event.request_id
        if isinstance(event, Accepted):
            return self._accepted(name)
        if isinstance(event, Refused):
            return "refused", name
        if isinstance(event, CopyEnded):
            return ("overdue" if event.failed and not self._is_copied(name, plan) else "copies"), _copy(event)
        if isinstance(event, ParkedMoved):
            return "moved", [name, None if event.tier is None else event.tier.value]
        if isinstance(event, Preempted):
            return self._set_back(event, plan, has_failed=has_failed)
        if isinstance(event, Finished):
            if name in self._unseen:
                self._unseen.discard(name)
                return None
            # Nothing but an abort, which is accepted before the plan is made, ends with this reason.
            return ("aborted" if event.reason is FinishReason.ABORT else "finished"), _end(event)
        return None

    def _accepted(self, name: RequestId) -> tuple[str, Any] | None:
        request = self._new.pop(name, None)
        if request is None:
            self._unseen.add(name)
            return None
        spec = request.spec
        facts = {
            "id": name,
            "number": request.rank[1],
            "class": spec.priority,
            "arrival_s": spec.arrival_s,
            "prompt_tokens": len(spec.prompt_token_ids),
            "max_new_tokens": spec.max_new_tokens,
        }
        return "accepted", facts if spec.branch_of is None else {**facts, "branch_of": spec.branch_of}

    def _is_copied(self, name: RequestId, plan: StepPlan | None) -> bool:
        """Whether a request was waiting for a copy while the plan was carried out, not only before.

        A copy that the plan itself begins is told of after the preemption or admission that it belongs to.
        """
        if name in self._copying or plan is None:
            return plan is not None
        if name not in self._begun:
            return False
        copies = [*plan.copies_out, *(swap_in.copy for swap_in in plan.swap_ins)]
        return any(copy.request_id == name for copy in copies)

    def _set_back(self, event: Preempted, plan: StepPlan | None, *, has_failed: bool) -> tuple[str, Any] | None:
        """Tell of KV that was lost with a step; a preemption that was planned is none of these."""
        name = event.request_id
        if not has_failed:
            is_planned = plan is not None and any(preemption.victim == name for preemption in plan.preemptions)
            return None if is_planned else ("set_back_before", name)
        is_of_this_step = self._running is None or name in self._running or event.is_again
        return ("set_back" if is_of_this_step else "set_back_before"), name

    # The file

    def _write(self, line: dict[str, Any]) -> None:
        """Write a line in one go: the operating system has it then, whatever becomes of this process."""
        content = memoryview(_encode(line).encode() + b"\n")
        try:
            while self._file is not None and content:
                count = self._file.write(content)
                if not count:
                    raise BlockingIOError("it takes no more")
                content = content[count:]
        except OSError as error:
            logger.warning(
                "trace %s: cannot be written (%s); the trace ends here, the work goes on",
                self._path,
                error.strerror or error,
            )
            self._give_up()

    def _give_up(self) -> None:
        file, self._file = self._file, None
        self._new.clear()
        try:
            if file is not None:
                file.close()
        except OSError as error:
            logger.debug("trace %s: %s", self._path, error)


def _open(path: Path) -> FileIO:
    start = b'{"' + FORMAT_NAME.encode() + b'":'
    try:
        if not path.exists() or path.is_file():  # a pipe or a terminal holds nothing that could be lost
            return _take_over(path, start)
        return path.open("wb", buffering=0)
    except BlockingIOError as error:
        raise ConfigError(f"{path}: another run writes its trace there. Name another file with --trace.") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}. Name another file with --trace.") from error


def _take_over(path: Path, start: bytes) -> FileIO:
    """Open a file that is new, or an earlier trace, and keep others from writing into it as long as it is open."""
    file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = file.read(len(start))
        if found and found != start:
            raise ConfigError(f"{path}: holds something that is not a trace. Name another file with --trace.")
        file.truncate(0)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _has_failed(plan: StepPlan, events: Sequence[StepEvent]) -> bool:
    """Whether a step was discarded, for a step of which no progress is told.

    Whoever computes in a plan is never a victim of it. So, if the plan was carried out, one who had a seat is not
    preempted, and one who had none is admitted; if it was not, it is the other way round.
    """
    first = next(iter(plan.request_ids()), None)
    if first is None:
        return False
    if any(admission.request_id == first for admission in plan.admissions):
        return not any(isinstance(event, Admitted) and event.request_id == first for event in events)
    return any(isinstance(event, Preempted) and event.request_id == first for event in events)


def _plain(config: SchedulerConfig | CacheConfig) -> dict[str, Any]:
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}


def _preemption(preemption: Preemption) -> dict[str, Any]:
    giving = preemption.giving
    return {
        "victim": preemption.victim,
        "beneficiary": preemption.beneficiary,
        "resident": preemption.is_resident,
        "for_its_class": preemption.is_for_its_class,
        "paid": preemption.has_paid,
        "kept_blocks": preemption.num_kept,
        "wanted": preemption.wanted.value,
        "cost": _cost(preemption.cost),
        "whole": None if preemption.whole is None else _cost(preemption.whole),
        "giving": {
            "num_blocks": giving.num_blocks,
            "num_computed_tokens": giving.num_computed_tokens,
            "num_kept_tokens": giving.num_kept_tokens,
            "num_copied_blocks": giving.num_copied_blocks,
            "is_untouched": giving.is_untouched,
            "host_room": giving.host_room,
            "disk_room": giving.disk_room,
            "num_moved_blocks": giving.num_moved_blocks,
            "bound_to": None if giving.bound_to is None else giving.bound_to.value,
            "is_awaited": giving.is_awaited,
        },
    }


def _cost(cost: PreemptionCost) -> dict[str, Any]:
    return {
        "mode": cost.mode.value,
        "tier": None if cost.tier is None else cost.tier.value,
        "recompute_s": cost.recompute_s,
        "host_s": cost.host_s,
        "disk_s": cost.disk_s,
    }


def _copy(event: CopyEnded) -> dict[str, Any]:
    return {
        "id": event.request_id,
        "direction": event.direction.value,
        "blocks": event.num_blocks,
        "tier": event.tier.value,
        "failed": event.failed,
    }


def _end(event: Finished) -> dict[str, Any]:
    """The detail is left out: it may hold a part of the answer."""
    return {
        "id": event.request_id,
        "reason": event.reason.value,
        "output_tokens": event.num_output_tokens,
        "preemptions": event.num_preemptions,
        "recomputed_tokens": event.num_recomputed_tokens,
    }
