"""A request told as JSON values and plain sentences. Nobody else's id is named, only classes and counts."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from giveway.core.plan import CopyDirection, Deferral, PreemptionCost
from giveway.core.request import NEWCOMER_STATES, FinishReason, Request
from giveway.core.state import SchedulerState
from giveway.engine.trace import UnservedReason
from giveway.engine.trace.explain import alternatives_of, way_of
from giveway.engine.trace.text import MEANINGS
from giveway.server.classes import PriorityClasses
from giveway.server.preemption_causes import PreemptionCause
from giveway.server.request_record import Loss, RequestRecord, Wait

_rank_of = attrgetter("rank")

MAX_TOLD = 64  # answers of one API request

_ARRIVING = "arriving"  # the engine has not looked at it yet
# The state of an API request is the first of these that one of its answers has.
_STATES = ("running", "swapping_in", "swapping_out", "swapped", "preempted", "waiting", _ARRIVING, "finished")


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of one answer."""

    record: RequestRecord | None  # None: the engine has not seen it yet
    facts: Request | None  # None: not seen yet, or ended


class Story:
    """Tells requests. classes: names for the integers that clients send."""

    def __init__(self, classes: PriorityClasses) -> None:
        self._classes = classes

    def whole(
        self,
        api_id: str,
        alias: str | None,
        answers: Sequence[Answer],
        state: SchedulerState,
        now_s: float,
        head: Deferral | None,
    ) -> dict[str, Any]:
        """Return an API request with its answers, by index; of very many only the first ones are told.

        head: why the first in the queue was not served, for those who stand behind it.
        """
        found = {_state_of(answer) for answer in answers}
        told = [self._answer(index, answer, state, now_s, head) for index, answer in enumerate(answers[:MAX_TOLD])]
        return {
            "id": api_id,
            "object": "giveway.request",
            "alias": alias,
            "state": next(each for each in _STATES if each in found),
            "num_answers": len(answers),
            "answers": told,
            "explanation": " ".join(
                f"Answer {each['index']}: {sentence}" if len(answers) > 1 else sentence
                for each in told
                for sentence in each["explanation"]
            ),
        }

    def _answer(
        self, index: int, answer: Answer, state: SchedulerState, now_s: float, head: Deferral | None
    ) -> dict[str, Any]:
        record, facts = answer.record, answer.facts
        if record is None:
            text = "The engine looks at it when the step under way has ended."
            return {"index": index, "state": _ARRIVING, "explanation": [text]}
        until_s = now_s if record.ended_s is None else record.ended_s
        told: dict[str, Any] = {
            "index": index,
            "state": _state_of(answer),
            "class": self._class(record.priority),
            "queue_position": _queue_position(facts, state),
            "is_held": facts is not None and facts.request_id in state.held,
            "age_s": _round(max(until_s - record.arrival_s, 0.0)),  # at its end, once that has come
            "queue_s": _since(record.arrival_s, record.seated_s),
            "ttft_s": _since(record.arrival_s, record.first_token_s),
            "prompt_tokens": record.num_prompt_tokens,
            "cached_tokens": record.num_cached_tokens,
            "output_tokens": _num_output(record, facts),
            "max_output_tokens": record.max_new_tokens,
            "recomputed_tokens": record.num_recomputed_tokens,
            "swapped_out_bytes": _bytes(record, CopyDirection.OUT),
            "swapped_in_bytes": _bytes(record, CopyDirection.IN),
            "num_preemptions": dict(record.num_preemptions or {}),
            "preemptions": [self._loss(loss, record.arrival_s) for loss in record.losses or ()],
            "waits_for": _wait(record.wait, until_s, head),
            "waited_s": _waited(record, until_s),
            "finish_reason": _finish_reason(record),
        }
        told["explanation"] = list(self._sentences(record, told))
        return told

    def _class(self, priority: int) -> dict[str, Any]:
        return {"number": priority, "name": self._classes.name_of(priority)}

    def _loss(self, loss: Loss, arrival_s: float) -> dict[str, Any]:
        event, priority = loss.event, loss.beneficiary_priority
        return {
            "at_s": _round(event.time_s - arrival_s),
            "cause": loss.cause.value,
            "mode": event.mode.value,
            "tier": None if event.tier is None else event.tier.value,
            "is_again": event.is_again,
            "beneficiary_class": None if priority is None else self._class(priority),
            "blocks": event.num_blocks,
            "kept_blocks": event.num_kept,
            "price_ms": None if loss.planned is None else _prices(loss.planned.cost),
        }

    # Sentences

    def _sentences(self, record: RequestRecord, told: dict[str, Any]) -> Iterator[str]:
        yield f"Class {told['class']['name']} ({record.priority})."
        if record.refusal is not None:
            yield f"The engine refused it: {record.refusal.error}"
            return
        if record.seated_s is not None:
            yield f"It stood {_time(record.seated_s - record.arrival_s)} in the queue."
        if record.losses and record.num_preemptions:
            yield self._losses(record.losses, record.num_preemptions)
        if record.end is not None:
            detail = f" with the error: {record.end.detail}" if record.end.reason is FinishReason.ERROR else ""
            yield f"It ended ({record.end.reason.value}) after {told['output_tokens']} tokens{detail}."
        elif record.wait is not None:
            yield from _waiting(record.wait, told)
        else:
            yield f"It is being served; tokens so far: {told['output_tokens']}."
        longest = sorted(told["waited_s"].items(), key=lambda each: -each[1])[:3]
        if any(seconds > 0 for _, seconds in longest):
            yield "Not served for: " + ", ".join(f"{reason} {_time(seconds)}" for reason, seconds in longest) + "."

    def _losses(self, losses: Sequence[Loss], counts: Counter[str]) -> str:
        modes = ", ".join(f"{mode} {count}" for mode, count in counts.items())
        last = losses[-1]
        text = f"It gave way {_times(counts.total())} ({modes}), last {self._for_whom(last)}: "
        if last.planned is None:
            return f"{text}{last.event.num_blocks} blocks, to be computed again."
        text += f"{way_of(last.planned.cost)}, blocks given up {last.event.num_blocks}, kept {last.event.num_kept}"
        others = [
            f"{each.way} {'not possible' if each.seconds is None else _time(each.seconds)}"
            for each in alternatives_of(last.planned)
            if not each.is_chosen
        ]
        chosen = last.planned.cost.seconds
        price = (
            "" if not others or chosen is None else f" at a price of {_time(chosen)} (instead of {', '.join(others)})"
        )
        return f"{text}{price}."

    def _for_whom(self, loss: Loss) -> str:
        if loss.cause is PreemptionCause.COMMAND:
            return "by command"
        if loss.cause is PreemptionCause.HELD:
            return "because its reader is too slow"
        if loss.cause is PreemptionCause.FAILED_STEP:
            return "because a step failed"
        if loss.beneficiary_priority is None:
            return "for another request"
        return f"for a request of class {self._classes.name_of(loss.beneficiary_priority)}"


def _waiting(wait: Wait, told: dict[str, Any]) -> Iterator[str]:
    lacking = f"; blocks lacking: {wait.num_lacking_blocks}" if wait.num_lacking_blocks else ""
    yield f"For {_time(told['waits_for']['for_s'])} it has not been served: {MEANINGS[wait.reason]}{lacking}."
    behind = told["waits_for"]["behind"]
    if behind is not None:
        lacking = f"; blocks lacking: {behind['lacking_blocks']}" if behind["lacking_blocks"] else ""
        yield f"The first in the queue waits because of this: {behind['meaning']}{lacking}."
    position = told["queue_position"]
    if position is not None:
        yield f"Better-ranked requests without a seat: {position}."


def _state_of(answer: Answer) -> str:
    if answer.record is None:
        return _ARRIVING
    return "finished" if answer.facts is None else answer.facts.state.name.lower()


def _finish_reason(record: RequestRecord) -> str | None:
    if record.refusal is not None:
        return FinishReason.ERROR.value
    return None if record.end is None else record.end.reason.value


def _queue_position(facts: Request | None, state: SchedulerState) -> int | None:
    """Count the better-ranked newcomers. None: it has a seat, or is on its way from or to one."""
    if facts is None or facts.state not in NEWCOMER_STATES:
        return None
    return bisect_left(state.newcomers.as_list(), facts.rank, key=_rank_of)


def _num_output(record: RequestRecord, facts: Request | None) -> int:
    if record.end is not None:
        return record.end.num_output_tokens
    return 0 if facts is None else len(facts.output_token_ids)


def _bytes(record: RequestRecord, direction: CopyDirection) -> int:
    return 0 if record.swapped_bytes is None else record.swapped_bytes[direction]


def _prices(cost: PreemptionCost) -> dict[str, float | None]:
    """Return what each way would have cost (ms). None: not possible."""
    prices = {"recompute": cost.recompute_s, "host": cost.host_s, "disk": cost.disk_s}
    return {way: None if seconds is None else round(1e3 * seconds, 3) for way, seconds in prices.items()}


def _wait(wait: Wait | None, now_s: float, head: Deferral | None) -> dict[str, Any] | None:
    if wait is None:
        return None
    behind = head if wait.reason is UnservedReason.BEHIND_DEFERRED else None
    return {
        **_reason(wait.reason, wait.num_lacking_blocks),
        "for_s": _round(max(now_s - wait.since_s, 0.0)),
        "behind": None if behind is None else _reason(UnservedReason(behind.reason.value), behind.lacking_blocks),
    }


def _reason(reason: UnservedReason, num_lacking_blocks: int) -> dict[str, Any]:
    return {"reason": reason.value, "meaning": MEANINGS[reason], "lacking_blocks": num_lacking_blocks}


def _waited(record: RequestRecord, now_s: float) -> dict[str, float]:
    """Return the seconds that it was not served, by reason, the present one included."""
    waited: dict[UnservedReason, float] = dict(record.waited_s)
    if record.wait is not None:
        waited[record.wait.reason] = waited.get(record.wait.reason, 0.0) + max(now_s - record.wait.since_s, 0.0)
    return {reason.value: _round(seconds) for reason, seconds in waited.items()}


def _since(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else _round(end_s - start_s)


def _round(seconds: float) -> float:
    return round(seconds, 6)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
