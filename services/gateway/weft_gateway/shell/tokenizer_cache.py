"""The tokenizers of all pools, loaded in the background as the route table names them.

A pool whose tokenizer cannot be had does not disturb the others: the load is tried again for as long as a route needs
it (pauses bounded), its requests are held meanwhile (`Gateway.tokenizer`), then get a 503 that says why. What can never
succeed is tried once.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from pathlib import Path

import httpx2
import jinja2

from weft.artifacts.blobs import BlobStore
from weft.artifacts.errors import ArtifactError, Unavailable, UnknownDigest
from weft.telemetry.logs import kv
from weft.wire.tls import Tls
from weft_gateway import errors
from weft_gateway.core.routes import Pool, RouteTable
from weft_gateway.shell.depot_client import fetch_text_files
from weft_gateway.shell.tokenizer import ModelTokenizer

PAUSE_MIN_S, PAUSE_MAX_S = 0.2, 10.0
log = logging.getLogger(__name__)


class TokenizerCache:
    """Base digest -> tokenizer. One event loop owns it.

    `on_settled`: a load is over, one way or the other. `on_damaged`: a cached file was not what its digest says.
    """

    def __init__(
        self,
        depot_url: str,
        folder: Path,
        tls: Tls | None = None,
        *,
        on_settled: Callable[[], None] = lambda: None,
        on_damaged: Callable[[], None] = lambda: None,
    ) -> None:
        verify = tls.client_context("depot") if tls else True
        self._depot = httpx2.AsyncClient(base_url=depot_url, timeout=10.0, verify=verify)
        self._blobs = BlobStore(folder)
        self._blobs.clean()
        self._on_settled, self._on_damaged = on_settled, on_damaged
        self._texts: dict[str, ModelTokenizer] = {}
        self._problems: dict[str, str] = {}  # why a load has failed so far
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._wanted: set[str] | None = None
        self._tidying: asyncio.Task[None] | None = None
        self._ending: list[asyncio.Task[None]] = []  # loads that were given up, and may still hold their files

    def want(self, table: RouteTable) -> None:
        """Load what this table needs, forget what it does not, also on disk."""
        wanted = {pool.base_digest for pool in table.pools.values() if pool.base_digest}
        if wanted != self._wanted:
            self._wanted = wanted
            if self._tidying is None or self._tidying.done():
                self._tidying = asyncio.create_task(self._tidy(), name="tokenizer cache")
        for digest in wanted - self._texts.keys() - self._loads.keys():
            self._loads[digest] = asyncio.create_task(self._load(digest), name=f"tokenizer {digest}")
            self._loads[digest].add_done_callback(lambda _: self._on_settled())
        for digest in self._loads.keys() - wanted:
            self._ending.append(self._loads.pop(digest))
            self._ending[-1].cancel()
        for digest in (self._texts.keys() | self._problems.keys()) - wanted:
            self._texts.pop(digest, None)
            self._problems.pop(digest, None)

    def of(self, pool: Pool) -> ModelTokenizer:
        """The tokenizer of a pool. Raises errors.Unavailable when it is not there (yet), with the reason."""
        if text := self._texts.get(pool.base_digest):
            return text
        reason = self._problems.get(pool.base_digest, "it is being loaded")
        raise errors.Unavailable(
            f"The tokenizer of pool {pool.name} is not available: {reason}.",
            code="model_not_ready",
            retry_after_ms=1000,
        )

    def may_come(self, digest: str) -> bool:
        """Whether this tokenizer is not there and its load goes on."""
        load = self._loads.get(digest)
        return digest not in self._texts and load is not None and not load.done()

    def waiting_for(self, table: RouteTable) -> str | None:
        """Why the gateway is not ready: no tokenizer is there and one may still come. None: it is.

        One is enough: requests for the others are held, and a new pool must not take a serving gateway away.
        """
        digests = {pool.base_digest for pool in table.pools.values() if pool.base_digest}
        coming = {digest for digest in digests if self.may_come(digest)}
        if not coming or digests & self._texts.keys():
            return None
        problem = self._problems.get(min(coming))
        return f"no tokenizer could be loaded: {problem}" if problem else f"loading the tokenizer of {min(coming)}"

    async def close(self) -> None:
        for task in self._loads.values():
            task.cancel()
        await asyncio.gather(*self._loads.values(), *filter(None, [self._tidying]), return_exceptions=True)
        await self._depot.aclose()

    async def _tidy(self) -> None:
        """Files of pools that are gone leave the disk. A table is complete, so that a restart does not lose others."""
        kept: set[str] | None = None
        while kept != self._wanted or self._ending:
            kept, ending, self._ending = self._wanted or set(), self._ending, []
            await asyncio.gather(*ending, return_exceptions=True)
            try:
                removed = await asyncio.to_thread(self._blobs.retain, kept)
            except (ArtifactError, OSError) as error:
                log.warning("tokenizer cache not tidied, the next change of pools tries again", extra=kv(error=error))
            else:
                log.info("tokenizer cache tidied", extra=kv(models=len(kept), removed=removed))

    async def _load(self, digest: str) -> None:
        pause_s = PAUSE_MIN_S
        while not await self._attempt(digest):
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 (jitter, not a secret)
            pause_s = min(pause_s * 2, PAUSE_MAX_S)

    async def _attempt(self, digest: str) -> bool:
        """One try; True when another would change nothing."""
        try:
            files = await fetch_text_files(self._depot, digest, self._blobs, self._on_damaged)
            self._texts[digest] = await asyncio.to_thread(ModelTokenizer, files)
        except (ArtifactError, OSError) as error:
            self._failed(digest, error)
            return not isinstance(error, Unavailable | UnknownDigest | OSError)
        except (ValueError, jinja2.TemplateError) as error:
            self._failed(digest, error)
            return True
        except Exception as error:
            log.exception("tokenizer failed to load", extra=kv(digest=digest))
            self._failed(digest, error)
            return True
        self._problems.pop(digest, None)
        log.info("tokenizer loaded", extra=kv(digest=digest, vocabulary=self._texts[digest].vocab_size))
        return True

    def _failed(self, digest: str, error: Exception) -> None:
        self._problems[digest] = str(error)
        log.warning("no tokenizer", extra=kv(digest=digest, error=error))
