"""The rest of a body that was refused: a client that is still sending would not see the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive


async def pass_over(pieces: AsyncIterator[bytes], *, max_bytes: int, wait_s: float, pause_s: float) -> None:
    """Read on to the end, until so many bytes have come, so much time has passed, or nothing comes for `pause_s`."""
    num_bytes = 0
    with suppress(TimeoutError, ClientDisconnect, HTTPException):  # the last: of a server that limits a body's time
        async with asyncio.timeout(wait_s):
            while num_bytes < max_bytes:
                async with asyncio.timeout(pause_s):
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                num_bytes += len(piece)


async def pieces_of(receive: Receive) -> AsyncIterator[bytes]:
    """Yield what comes of a body, below the level of routes."""
    has_more = True
    while has_more:
        message = await receive()
        has_more = message["type"] == "http.request" and message.get("more_body", False)
        yield message.get("body", b"")
