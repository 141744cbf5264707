"""What one invocation of the command line knows besides its options."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Session:
    """Carried by click's context; written while options are parsed."""

    debug: bool = False  # show tracebacks
