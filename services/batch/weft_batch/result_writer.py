"""The writer of results into the store, many in a transaction. What is not stored does not count: after a crash it runs
again.

The store may be out of reach for a while: what came is held (the machine bounds how much), and written again with
bounded pauses for as long as the process lives; readiness says so.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from sqlalchemy.ext.asyncio import AsyncEngine

from weft.store import batches
from weft.store.batches import MAX_RESULTS, StoredResult
from weft.store.errors import StoreUnavailable
from weft.telemetry.logs import kv
from weft_batch import metrics

MAX_TRANSACTION_BYTES = 16 << 20
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
log = logging.getLogger(__name__)


class ResultWriter:
    """The one writer of results."""

    def __init__(self, engine: AsyncEngine, term: int, on_stored: Callable[[Sequence[StoredResult]], None]) -> None:
        self._engine, self._term, self._on_stored = engine, term, on_stored
        self._waiting: list[StoredResult] = []
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self.trouble: str | None = None

    def put(self, result: StoredResult) -> None:
        self._waiting.append(result)
        self._idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled. Raises Superseded."""
        while True:
            await self._wake.wait()
            part = self._next()
            await self._store(part)
            del self._waiting[: len(part)]
            if not self._waiting:
                self._wake.clear()
                self._idle.set()
            self._on_stored(part)

    async def drained(self) -> None:
        """Wait until everything put so far is stored."""
        await self._idle.wait()

    def _next(self) -> list[StoredResult]:
        """Take as many results as one transaction takes."""
        part, size = list[StoredResult](), 0
        for result in self._waiting[:MAX_RESULTS]:
            size += len(result.record)
            if part and size > MAX_TRANSACTION_BYTES:
                break
            part.append(result)
        return part

    async def _store(self, part: Sequence[StoredResult]) -> None:
        pause_s = MIN_PAUSE_S
        while True:
            try:
                await batches.add_results(self._engine, self._term, part)
            except StoreUnavailable as error:
                self.trouble = f"store: {error}"
                metrics.STORE_FAILURES.inc()
                log.error("results not stored: trying again", extra=kv(pause_s=pause_s, error=error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            else:
                self.trouble = None
                return
