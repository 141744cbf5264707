"""The moments at which something becomes durable, by name, so that a test can end the process at each of them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto


class DurableStep(Enum):
    """Something that a kill must find either wholly done or not done at all."""

    PART_SYNCED = auto()  # the content of a file is on the disk under its temporary name
    FILE_RENAMED = auto()
    UPLOAD_RECORDED = auto()
    BATCH_RECORDED = auto()
    LINES_RECORDED = auto()
    REJECTION_RECORDED = auto()
    ANSWERS_RECORDED = auto()
    CANCEL_RECORDED = auto()
    FINALIZING_RECORDED = auto()
    END_RECORDED = auto()
    DELETION_RECORDED = auto()
    FILE_UNLINKED = auto()


class Moment(Enum):
    """On which side of a step somebody is."""

    BEFORE = auto()
    AFTER = auto()


StepListener = Callable[[DurableStep, Moment], None]


def ignore_steps(step: DurableStep, moment: Moment) -> None:
    """Listen to no step."""
    del step, moment
