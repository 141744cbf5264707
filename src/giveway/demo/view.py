"""What the live display shows, as plain values: the pool by owner, the queues, and the latest events in words."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from giveway.core.events import Admitted, Finished, Preempted, StepEvent
from giveway.core.ids import RequestId
from giveway.core.plan import PreemptionMode
from giveway.core.request import RequestState
from giveway.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class PoolView:
    """One moment of a run."""

    step_id: int
    owners: tuple[RequestId | None, ...]  # [num_device_blocks]; None: free
    running: tuple[RequestId, ...]  # rank order
    waiting: tuple[RequestId, ...]  # rank order; own no KV: new, or dropped
    swapped: tuple[RequestId, ...]  # KV in host memory, or on its way
    num_host_blocks: int
    num_host_blocks_used: int


def look(scheduler: Scheduler) -> PoolView:
    """Read the state of a scheduler between two steps."""
    state = scheduler.state
    owners: list[RequestId | None] = [None] * state.kv.device.size
    for request_id, table in state.kv.tables.items():
        for block in table:
            owners[block] = request_id
    swapped = [request.request_id for request in state.newcomers if request.state is RequestState.SWAPPED]
    return PoolView(
        step_id=state.next_step_id,
        owners=tuple(owners),
        running=tuple(request.request_id for request in state.residents),
        waiting=tuple(r.request_id for r in state.newcomers if r.state is not RequestState.SWAPPED),
        swapped=(*swapped, *state.swapping_out),
        num_host_blocks=state.kv.host.size,
        num_host_blocks_used=state.kv.host.num_owned,
    )


class Story:
    """The latest remarkable events of a run in words, and how many requests have finished."""

    def __init__(self, length: int) -> None:
        self.lines: deque[str] = deque(maxlen=length)
        self.num_finished = 0
        self.preemptions: Counter[PreemptionMode] = Counter()

    def add(self, step_id: int, events: Sequence[StepEvent]) -> None:
        """Take in the events of one step."""
        for event in events:
            if isinstance(event, Preempted):
                self.preemptions[event.mode] += 1
                for_whom = f"for {event.beneficiary} " if event.beneficiary else ""
                self._say(
                    step_id, f"{event.request_id} gives way {for_whom}({event.mode.value}, {event.num_blocks} blocks)"
                )
            elif isinstance(event, Admitted):
                self._say(step_id, f"{event.request_id} {'goes on' if event.is_resume else 'starts'}")
            elif isinstance(event, Finished):
                self.num_finished += 1
                self._say(step_id, f"{event.request_id} ends after {event.num_output_tokens} tokens")

    def _say(self, step_id: int, text: str) -> None:
        self.lines.append(f"step {step_id:3d}  {text}")
