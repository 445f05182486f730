"""Waiting for what has to happen. A passing test never waits that long; a failing one says what did not happen."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from weft_devcluster.waiting import PATIENCE_S, POLL_S, wait_until

__all__ = ["PATIENCE_S", "POLL_S", "eventually", "soon", "until", "wait_until"]

T = TypeVar("T")


async def soon(awaitable: Awaitable[T]) -> T:
    """What an event of this process gives. Raises TimeoutError."""
    return await asyncio.wait_for(awaitable, PATIENCE_S)


async def until(condition: Callable[[], Any]) -> Any:
    """For what has no event to await: the first true value of a condition. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        while not (value := condition()):  # noqa: ASYNC110 (nothing to wait on)
            await asyncio.sleep(0.002)
    return value


async def eventually(holds: Callable[[], Awaitable[bool]], timeout_s: float = PATIENCE_S) -> None:
    """For what another process does without an event to this one: ask until it holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not await holds():  # noqa: ASYNC110 (it is in another process)
            await asyncio.sleep(POLL_S)
