"""Finding the one request that breaks a step: pure functions over plans, for `Scheduler.discard`."""

from __future__ import annotations

from dataclasses import dataclass

from giveway.core.ids import DeviceBlockId, RequestId
from giveway.core.plan import StepPlan


@dataclass(slots=True)
class SuspectGroup:
    """Requests of a failed step that run by themselves until each is past the point where the step failed."""

    targets: dict[RequestId, int]  # computed tokens to reach


def targets_of(plan: StepPlan) -> dict[RequestId, int]:
    """Return how far each request that computes in a plan would be after it (computed tokens)."""
    targets = {chunk.request_id: chunk.start + chunk.num_tokens for chunk in plan.chunks}
    for request_id, position in zip(plan.decodes.request_ids, plan.decodes.positions, strict=True):
        targets[request_id] = position + 1
    return targets


def halves(targets: dict[RequestId, int]) -> list[SuspectGroup]:
    """Split the requests of a failed step into two groups to be tried one after the other."""
    items = list(targets.items())
    middle = len(items) // 2
    return [SuspectGroup(dict(items[:middle])), SuspectGroup(dict(items[middle:]))]


def blocks_written(plan: StepPlan, block_size: int) -> set[DeviceBlockId]:
    """Return the device blocks that a plan means to write: after a failure their content is unknown."""
    written: set[DeviceBlockId] = set()
    for chunk in plan.chunks:
        last = chunk.start + chunk.num_tokens - 1
        written.update(chunk.block_table[chunk.start // block_size : last // block_size + 1])
    for position, table in zip(plan.decodes.positions, plan.decodes.block_tables, strict=True):
        written.add(table[position // block_size])
    for swap_in in plan.swap_ins:
        written.update(swap_in.copy.device_blocks)
    written.update(admission.fork.target for admission in plan.admissions if admission.fork is not None)
    return written
