"""The process's parts put together: serving, tokenizers, admission, readiness."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Generator

from prometheus_client import REGISTRY, CollectorRegistry

from weft.telemetry.logs import kv
from weft.wire.tls import Tls
from weft_gateway.core.events import Failure
from weft_gateway.errors import Unavailable
from weft_gateway.serve import Serving
from weft_gateway.settings import Settings
from weft_gateway.tokenizers import Tokenizers

ACK_SECONDS = 1.0  # for outcomes to be stored before the process leaves
log = logging.getLogger(__name__)


class Gateway:
    """What every handler uses. Create it inside the event loop that runs it."""

    def __init__(self, settings: Settings, *, registry: CollectorRegistry = REGISTRY, tls: Tls | None = None) -> None:
        self.settings, self.registry = settings, registry
        self.serving = Serving(settings, registry=registry, tls=tls)
        self.tokenizers = Tokenizers(settings.depot, settings.data_dir / "blobs", tls)
        self.serving.on_table = self.tokenizers.want

    def unready(self) -> str | None:
        """Why no request can be served yet; None when one can."""
        if self.serving.draining:
            return "draining"
        if self.serving.table is None:
            return "no route table from the scheduler yet"
        return self.tokenizers.waiting_for(self.serving.table)

    def check_admission(self, choices: int = 1) -> None:
        """Raises Overloaded at the bound, Unavailable while the process stops, ParameterError beyond any hope."""
        if self.serving.draining:
            raise Unavailable("This gateway is stopping.", code="shutting_down", retry_after_ms=1000)
        self.serving.check_admission(choices)

    @contextlib.contextmanager
    def preparing(self) -> Generator["Preparing"]:
        """Counts a request that is not submitted yet."""
        counted = Preparing(self)
        counted.count(1)
        try:
            yield counted
        finally:
            counted.count(0)

    async def drain(self) -> None:
        """Take no more requests, let running answers finish for `drain_seconds`, then end the rest by name."""
        self.serving.draining = True
        log.info("draining", extra=kv(in_flight=self.serving.in_flight))
        await _until(lambda: not self.serving.in_flight, self.settings.drain_seconds)
        stopped = Failure("shutting_down", "The gateway stopped before the answer was complete.", 1000)
        for live in list(self.serving.live.values()):
            self.serving.abort(live, stopped)
        await _until(lambda: not self.serving.outcomes or not self.serving.scheduler.up, ACK_SECONDS)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator["asyncio.Task[None]"]:
        """Keep the streams for the length of the block; the task ends early only by a bug."""
        task = asyncio.create_task(self.serving.run(), name="serving")
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])
            await self.tokenizers.close()


class Preparing:
    """What one request counts for until it is submitted."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._choices = gateway, 0

    def admit(self, choices: int) -> None:
        """It asks for so many choices. Raises what `check_admission` raises."""
        self.count(choices)
        self._gateway.check_admission(choices)

    def count(self, choices: int) -> None:
        self._gateway.serving.preparing += choices - self._choices
        self._choices = choices


async def _until(done: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition, bounded."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not done():  # noqa: ASYNC110 (a condition over two owners, for a second at most twice a life)
                await asyncio.sleep(0.02)
