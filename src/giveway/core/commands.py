"""What callers want of the scheduler: values that `Scheduler.accept` takes between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from giveway.core.config import PreemptionChoice
from giveway.core.ids import RequestId
from giveway.core.request import RequestSpec


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request."""

    spec: RequestSpec


@dataclass(frozen=True, slots=True)
class Abort:
    """A request is no longer wanted; unknown ids are ignored, for it may just have finished."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class GiveWay:
    """A resident is to give way in the next step, for nobody in particular; no-op for anybody else."""

    request_id: RequestId
    choice: PreemptionChoice


@dataclass(frozen=True, slots=True)
class Hold:
    """A request is to stay off the device until it is let go; unknown ids are ignored."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class LetGo:
    """The end of a hold; no-op for one that is not held."""

    request_id: RequestId


Command = Submit | Abort | GiveWay | Hold | LetGo
