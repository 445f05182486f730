"""Waiting for what another process does, where it offers no event to this one: asked again, bounded in time."""

import asyncio
from collections.abc import Awaitable, Callable

POLL_S = 0.05


async def eventually(holds: Callable[[], Awaitable[bool]], timeout_s: float = 30.0) -> None:
    """Ask until it holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not await holds():  # noqa: ASYNC110 (it is in another process)
            await asyncio.sleep(POLL_S)
