"""Waiting for what has to happen. A passing test never waits that long; a failing one says what did not happen."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 120.0
POLL_S = 0.02


async def soon(awaitable: Awaitable[T]) -> T:
    """What an event of this process gives. Raises TimeoutError."""
    return await asyncio.wait_for(awaitable, PATIENCE_S)


async def eventually(holds: Callable[[], Awaitable[bool]], timeout_s: float = PATIENCE_S) -> None:
    """For what another process does without an event to this one: ask until it holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not await holds():  # noqa: ASYNC110 (it is in another process)
            await asyncio.sleep(POLL_S)


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """The same without an event loop. Raises TimeoutError that says `what` did not happen."""
    until = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(POLL_S)
