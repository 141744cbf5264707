"""Ctrl-C as a wish that is looked at between two steps, so that no step is ever cut in half."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupt:
    """While entered, the first Ctrl-C sets `is_wanted`; a second one raises KeyboardInterrupt as usual."""

    def __init__(self) -> None:
        self.is_wanted = False
        self._before: Any = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_wanted:
            signal.default_int_handler(number, frame)
        self.is_wanted = True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python delivers no signals
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
