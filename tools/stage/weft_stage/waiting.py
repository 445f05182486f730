"""Wait until something holds, by asking; for what tells nobody that it has changed."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from weft_stage.errors import StackFailed


async def until(holds: Callable[[], Awaitable[bool]], what: str, patience_s: float, poll_s: float) -> None:
    """Ask until it holds. Raises StackFailed, with `what` was waited for."""
    end = time.monotonic() + patience_s
    while not await holds():
        if time.monotonic() > end:
            raise StackFailed(f"not within {patience_s:.0f} s: {what}")
        await asyncio.sleep(poll_s)
