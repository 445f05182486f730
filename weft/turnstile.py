"""Waiting for a turn between tenants (`weft.domain.turns`) on an event loop: a tenant's burst waits behind itself."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from weft.domain.turns import TenantTurns


class Turnstile:
    """A bottleneck with `places` pieces of work at once, owned by one event loop."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._turns = TenantTurns[asyncio.Future[None]](places)
        self._here = 0  # pieces of work that run or wait
        self._alone: str | None = None  # whose is the only one, which needs no turn until another one comes

    def waiting(self, tenant: str) -> int:
        """How much work of a tenant waits."""
        return self._turns.waiting(tenant)

    def begin(self, tenant: str) -> "asyncio.Future[None] | None":
        """Begin a tenant's work and return None, or return the turn that it has to wait for, by `wait`."""
        if not self._here:
            self._here, self._alone = 1, tenant
            return None
        self._here += 1
        turn = asyncio.get_running_loop().create_future()
        if self._alone is not None:
            self._turns.enter(self._alone, turn)  # it runs: nobody is told that its turn has come
            self._alone = None
        return None if self._turns.enter(tenant, turn) else turn

    async def wait(self, tenant: str, turn: "asyncio.Future[None]") -> None:
        """Wait for a turn of `begin`. One call of `leave` follows, unless this raises CancelledError."""
        try:
            await turn
        except BaseException:
            if turn.cancelled():
                self._here -= 1
                self._turns.cancel(tenant, turn)
            else:  # it has come
                self.leave(tenant, 0.0)
            raise

    async def enter(self, tenant: str) -> None:
        """Wait until a tenant's work may begin. One call of `leave` follows, unless this raises CancelledError."""
        if (turn := self.begin(tenant)) is not None:
            await self.wait(tenant, turn)

    def leave(self, tenant: str, cost_s: float) -> None:
        """Give the place back after `cost_s` of work."""
        self._here -= 1
        begun = self._turns.leave(tenant, cost_s) if self._alone is None else []
        self._alone = None
        while begun:
            owner, turn = begun.pop()
            if turn.cancelled():  # it does not know yet
                begun += self._turns.leave(owner, 0.0)
            else:
                turn.set_result(None)

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncGenerator[None]:
        """Have a place for the length of the block, which costs the seconds that it takes."""
        await self.enter(tenant)
        began = time.monotonic()
        try:
            yield
        finally:
            self.leave(tenant, time.monotonic() - began)
