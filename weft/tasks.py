"""Work that its caller's cancellation does not break off."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_end(work: Coroutine[Any, Any, T], *, leave_s: float | None = None) -> T:
    """Run `work` in a task of its own and wait for its end, also where the caller is cancelled meanwhile.

    The cancellation is raised at that end, whatever became of the work: what the caller does next finds nothing of it
    under way. `leave_s`: how long the work may take from the cancellation on; then it is cancelled too.
    """
    task, cancelled, deadline = asyncio.create_task(work), None, None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            if cancelled is None and leave_s is not None:
                deadline = asyncio.get_running_loop().call_later(leave_s, task.cancel)
            cancelled = error
    if deadline is not None:
        deadline.cancel()
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()
