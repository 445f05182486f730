"""The start of a process on the store: the choice of the database, and a wait until it is ready at this version's
revision."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from weft.store import migrate
from weft.store.database import open_database, postgresql_url, sqlite_url
from weft.store.errors import StoreUnavailable
from weft.telemetry.logs import kv

PATIENCE_S, PAUSE_S = 60.0, 1.0  # PostgreSQL may start after the processes that need it
log = logging.getLogger(__name__)


def store_at(database: str, file: Path) -> AsyncEngine:
    """Open a PostgreSQL database by its URL, or ("") an SQLite file. Raises BadDatabaseUrl."""
    return open_database(postgresql_url(database) if database else sqlite_url(file))


async def ready_term(
    engine: AsyncEngine, term_of: Callable[[AsyncEngine], Awaitable[int]], stop: asyncio.Event, *, shared: bool
) -> int | None:
    """Take the term to start with, in a store at this version's revision. Return None if `stop` came first.

    A `shared` store is waited for. Raises StoreError.
    """
    deadline = time.monotonic() + PATIENCE_S * shared
    while not stop.is_set():
        try:
            revision, term = await migrate.upgrade(engine), await term_of(engine)
            log.info("store ready", extra=kv(revision=revision, term=term))
            return term
        except StoreUnavailable as error:
            if time.monotonic() >= deadline:
                raise
            log.warning("the store does not answer yet", extra=kv(error=error))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), PAUSE_S)
    return None
