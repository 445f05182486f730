"""The gateway's own work on requests, in turn between tenants (`weft.turnstile`): a burst of one waits behind itself.

Three bottlenecks. The event loop: of what takes it a moment a few pieces begin in each of its turns. The interpreter:
what holds it for longer runs in a thread, one piece of a tenant at a time, for the loop waits for the interpreter, too.
The processors: what leaves the interpreter alone runs in as many threads.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from weft.turnstile import Turnstile
from weft_gateway.errors import ClientDisconnected, Overloaded

THREAD_BYTES = 20_000  # a body this long is parsed in a thread: the loop goes on streaming
IN_LOOP = 4  # pieces of work in one turn of the loop, at the most half of them of one tenant
MAX_PROCESSORS = 4  # that one tenant's prompts take
T = TypeVar("T")
IsGone = Callable[[], Awaitable[bool]]


class BoundedTurnstile(Turnstile):
    """A turnstile at which at most `most` pieces of a tenant wait."""

    def __init__(self, places: int, max_waiting: int) -> None:
        super().__init__(places)
        self._max_waiting = max_waiting

    async def enter(self, tenant: str, is_gone: IsGone | None = None) -> None:
        """Wait for a turn. One call of `leave` follows, unless this raises.

        `is_gone`: of a client, who is asked after a wait. Raises Overloaded, ClientDisconnected, CancelledError.
        """
        if self.waiting(tenant) >= self._max_waiting:
            text = f"{self._max_waiting} requests of this namespace wait for their turn."
            raise Overloaded(text, retry_after_ms=1000)
        if (turn := self.begin(tenant)) is None:
            return
        await self.wait(tenant, turn)
        try:
            if is_gone is not None and await is_gone():
                raise ClientDisconnected
        except BaseException:
            self.leave(tenant, 0.0)
            raise

    async def in_loop(self, tenant: str, work: Callable[[], T]) -> T:
        """Do short work; its place is free again in the loop's next turn, after what else is due in this one."""
        await self.enter(tenant)
        began = time.perf_counter()
        try:
            return work()
        finally:
            asyncio.get_running_loop().call_soon(self.leave, tenant, time.perf_counter() - began)

    async def in_thread(self, tenant: str, work: Callable[[], T], is_gone: IsGone | None = None) -> T:
        """Do long work in a thread. Where the caller is cancelled the place is kept until the work has ended."""
        await self.enter(tenant, is_gone)
        cost_s = 0.0

        def timed() -> T:
            nonlocal cost_s
            began = time.thread_time()
            try:
                return work()
            finally:
                cost_s = time.thread_time() - began

        running = asyncio.get_running_loop().run_in_executor(None, timed)
        running.add_done_callback(lambda _: self.leave(tenant, cost_s))
        return await asyncio.shield(running)


class RequestTurns:
    """Lets work on a request wait for its tenant's turn; of one tenant at most `most` at a place. Raises Overloaded."""

    def __init__(self, max_waiting: int) -> None:
        self._loop, self._interpreter = BoundedTurnstile(IN_LOOP, max_waiting), BoundedTurnstile(2, max_waiting)
        self._processors = BoundedTurnstile(2 * min(MAX_PROCESSORS, len(os.sched_getaffinity(0))), max_waiting)

    async def take(self, tenant: str, piece: Callable[[], None]) -> None:
        """Do a short piece of work."""
        await self._loop.in_loop(tenant, piece)

    async def parse(self, tenant: str, check: Callable[[bytes], T], body: bytes) -> T:
        """Check a body. Raises the errors of `check`."""
        if len(body) > THREAD_BYTES:
            return await self.compute(tenant, partial(check, body))
        return await self._loop.in_loop(tenant, partial(check, body))

    async def compute(self, tenant: str, work: Callable[[], T]) -> T:
        """Do long work in a thread, in turn. Raises the errors of `work`."""
        return await self._interpreter.in_thread(tenant, work)

    async def encode(self, tenant: str, work: Callable[[], T], is_gone: IsGone | None = None) -> T:
        """Run work that releases the interpreter for most of its time. Raises also the errors of `work`."""
        return await self._processors.in_thread(tenant, work, is_gone)
