"""The tokenizers of all pools, loaded in the background as the route table names them.

A pool whose tokenizer cannot be loaded does not disturb the others: the load is tried again for as long as a route
needs it (pauses bounded), and the gateway holds the pool's requests. A load that can never succeed is tried once.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from pathlib import Path

import httpx2

from weft.artifacts.blobs import BlobStore
from weft.artifacts.errors import ArtifactError, Unavailable, UnknownDigest
from weft.telemetry.logs import kv
from weft_gateway.core.events import TokenizerChanged, TokenizerState
from weft_gateway.shell.depot_client import fetch_tokenizer_files
from weft_gateway.shell.tokenizer import ModelTokenizer

PAUSE_MIN_S, PAUSE_MAX_S = 0.2, 10.0
EXPECTED = (ArtifactError, OSError, ValueError)
log = logging.getLogger(__name__)


class TokenizerCache:
    """Tokenizers by base digest, owned by one event loop.

    `on_change` gets each change of a tokenizer's state. `on_corrupt` is called for each cached file that was damaged.
    """

    def __init__(
        self,
        depot: httpx2.AsyncClient,
        folder: Path,
        *,
        on_change: Callable[[TokenizerChanged], None] = lambda _: None,
        on_corrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self._depot = depot
        self._blobs = BlobStore(folder)
        self._blobs.clean()
        self._on_change, self._on_corrupt = on_change, on_corrupt
        self._tokenizers: dict[str, ModelTokenizer] = {}
        self.get = self._tokenizers.get
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._digests: set[str] | None = None
        self._cleaning: asyncio.Task[None] | None = None
        self._ending: list[asyncio.Task[None]] = []  # loads that were cancelled, and may still hold their files

    def __len__(self) -> int:
        return len(self._tokenizers)

    def sync(self, digests: set[str]) -> None:
        """Load the tokenizers of these base models and forget all further tokenizers, also on disk."""
        if digests == self._digests:
            return
        self._digests = digests
        if self._cleaning is None or self._cleaning.done():
            self._cleaning = asyncio.create_task(self._clean(), name="tokenizer cache")
        for digest in sorted(digests - self._loads.keys()):
            self._loads[digest] = asyncio.create_task(self._load(digest), name=f"tokenizer {digest}")
            self._on_change(TokenizerChanged(digest, TokenizerState.LOADING))
        for digest in sorted(self._loads.keys() - digests):
            self._ending.append(self._loads.pop(digest))
            self._ending[-1].cancel()
            self._tokenizers.pop(digest, None)
            self._on_change(TokenizerChanged(digest, TokenizerState.REMOVED))

    async def close(self) -> None:
        for task in self._loads.values():
            task.cancel()
        await asyncio.gather(*self._loads.values(), *filter(None, [self._cleaning]), return_exceptions=True)

    async def _clean(self) -> None:
        """Remove the files of deleted pools. A route table is complete, so a restart loses no files of other pools."""
        retained: set[str] | None = None
        while retained != self._digests or self._ending:
            retained, ending, self._ending = self._digests or set(), self._ending, []
            await asyncio.gather(*ending, return_exceptions=True)
            try:
                removed = await asyncio.to_thread(self._blobs.retain, retained)
            except (ArtifactError, OSError) as error:
                log.warning("tokenizer cache not cleaned, the next change of pools tries again", extra=kv(error=error))
            else:
                log.info("tokenizer cache cleaned", extra=kv(models=len(retained), removed=removed))

    async def _load(self, digest: str) -> None:
        pause_s = PAUSE_MIN_S
        while not await self._attempt(digest):
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 (jitter, not a secret)
            pause_s = min(pause_s * 2, PAUSE_MAX_S)

    async def _attempt(self, digest: str) -> bool:
        """Try once. Return True if a further try would change nothing."""
        try:
            files = await fetch_tokenizer_files(self._depot, digest, self._blobs, self._on_corrupt)
            tokenizer = await asyncio.to_thread(ModelTokenizer, files)
        except Exception as error:
            if not isinstance(error, EXPECTED):
                log.exception("tokenizer failed to load", extra=kv(digest=digest))
            again = isinstance(error, Unavailable | UnknownDigest | OSError)
            log.warning("no tokenizer", extra=kv(digest=digest, error=error))
            state = TokenizerState.LOADING if again else TokenizerState.FAILED
            self._on_change(TokenizerChanged(digest, state, str(error)))
            return not again
        self._tokenizers[digest] = tokenizer
        log.info("tokenizer loaded", extra=kv(digest=digest, vocabulary=tokenizer.vocab_size))
        self._on_change(TokenizerChanged(digest, TokenizerState.READY))
        return True
