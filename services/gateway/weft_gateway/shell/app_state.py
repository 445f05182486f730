"""The process's parts put together: serving, tokenizers, admission, readiness."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator

from prometheus_client import REGISTRY, CollectorRegistry

from weft.telemetry.logs import kv
from weft.wire.tls import Tls
from weft_gateway.core.events import Failure
from weft_gateway.core.routes import Pool, RouteTable
from weft_gateway.errors import Unavailable
from weft_gateway.settings import Settings
from weft_gateway.shell.request_manager import Serving
from weft_gateway.shell.tokenizer import ModelTokenizer
from weft_gateway.shell.tokenizer_cache import TokenizerCache

ACK_SECONDS = 1.0  # for outcomes to be stored before the process leaves
HELD_SHARE = 4  # at most a quarter of all requests is held for one tokenizer: a broken one leaves room for the others
log = logging.getLogger(__name__)


class AppState:
    """What every handler uses. Create it inside the event loop that runs it."""

    def __init__(self, settings: Settings, *, registry: CollectorRegistry = REGISTRY, tls: Tls | None = None) -> None:
        self.settings, self.registry = settings, registry
        self.serving = Serving(settings, registry=registry, tls=tls)
        self.tokenizers = TokenizerCache(
            settings.depot,
            settings.data_dir / "blobs",
            tls,
            on_settled=self._something_changed,
            on_damaged=self.serving.metrics.corrupt_artifacts.inc,
        )
        self.serving.on_table = self._on_table
        self._changed = asyncio.Event()  # set, and replaced, when something comes that requests are held for
        self.held_for: Counter[str] = Counter()  # requests by the digest whose tokenizer they wait for

    def not_ready_reason(self) -> str | None:
        """Why requests should go to another gateway, if there is one; None when they can be served here."""
        if self.serving.draining:
            return "draining"
        if self.serving.table is None:
            return "no route table from the scheduler yet"
        return self.tokenizers.waiting_for(self.serving.table)

    def check_admission(self, choices: int = 1) -> None:
        """Raises Overloaded at the bound, Unavailable while the process stops, ParameterError beyond any hope."""
        self._check_running()
        self.serving.check_admission(choices)

    async def route_table(self) -> RouteTable:
        """The route table. A process that has just started holds its first requests until it is there.

        Raises Unavailable, Overloaded.
        """
        if self.serving.table is None:
            self.check_admission()
            await self._hold(lambda: self.serving.table is not None, self.settings.hold_seconds)
        if self.serving.table is None:
            raise Unavailable("The scheduler has not told any route yet.", code="no_scheduler", retry_after_ms=1000)
        return self.serving.table

    async def tokenizer(self, pool: Pool) -> ModelTokenizer:
        """The tokenizer of a pool; while it may still come the request is held. Raises Unavailable."""
        digest = pool.base_digest
        if self.tokenizers.may_come(digest) and self.held_for[digest] * HELD_SHARE < self.settings.max_in_flight:
            self.held_for[digest] += 1
            try:
                await self._hold(lambda: not self.tokenizers.may_come(digest), self.serving.hold_s(pool.name))
            finally:
                self.held_for -= Counter((digest,))
        return self.tokenizers.of(pool)

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
        self._something_changed()  # what is held before its submission is refused now
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

    def _on_table(self, table: RouteTable) -> None:
        self.tokenizers.want(table)
        self._something_changed()

    def _something_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _hold(self, there: Callable[[], bool], seconds: float) -> None:
        """Wait until something is there, at most so long. Raises Unavailable when the process stops meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not there() and not self.serving.draining:
                    await self._changed.wait()
        self._check_running()

    def _check_running(self) -> None:
        if self.serving.draining:
            raise Unavailable("This gateway is stopping.", code="shutting_down", retry_after_ms=1000)


class Preparing:
    """What one request counts for until it is submitted."""

    def __init__(self, gateway: AppState) -> None:
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
