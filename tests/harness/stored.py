"""Stores at the newest revision, and what they hold of outcomes, read as people do: with SQL."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Row, func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from harness import postgres
from weft.store import migrate
from weft.store.database import open_database, sqlite_url
from weft.store.models import OutcomeRow, UsageRow

_newest = list[bytes]()  # an SQLite file without rows, once one has been made
_newest_dump = list[str]()  # the same of PostgreSQL, as statements


async def new_store(url: URL) -> AsyncEngine:
    """Open a database that is empty, at the newest revision: each gets a copy of the first one that was migrated."""
    if url.get_backend_name() == "sqlite":
        assert url.database is not None
        Path(url.database).write_bytes(await _newest_file())
        return open_database(url)
    engine = open_database(url)
    if _newest_dump:
        await postgres.execute(url, _newest_dump[0])
    else:
        await migrate.upgrade(engine)
        _newest_dump.append(await asyncio.to_thread(postgres.dump, url))
    return engine


async def _newest_file() -> bytes:
    if not _newest:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "weft.sqlite"
            engine = open_database(sqlite_url(file))
            await migrate.upgrade(engine)
            await engine.dispose()  # the last connection puts the log into the file
            _newest.append(file.read_bytes())
    return _newest[0]


async def usage(engine: AsyncEngine) -> list[Row[Any]]:
    """Return the usage rows."""
    async with engine.connect() as connection:
        return [*await connection.execute(select(UsageRow.__table__))]


async def count(engine: AsyncEngine) -> int:
    """How many outcomes are stored."""
    async with engine.connect() as connection:
        return (await connection.execute(select(func.count()).select_from(OutcomeRow))).scalar_one()
