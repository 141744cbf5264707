"""An event loop whose clock jumps to the next timer: exact times, and no waiting."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Jumping(selectors.SelectSelector):
    """Passes the time instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "nothing is left to wait for, and yet the work is not done"
            self.now_s += max(timeout, 0.0)
        return events


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtually(work: Callable[[Callable[[], float]], Awaitable[Result]]) -> Result:
    """Run `work(now_s)` from moment 0 on."""

    async def main() -> Any:
        return await work(asyncio.get_running_loop().time)

    with asyncio.Runner(loop_factory=_Loop) as runner:
        result: Result = runner.run(main())
        return result
