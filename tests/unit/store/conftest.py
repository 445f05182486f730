"""A real SQLite file per test, at the newest revision; nothing is faked."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from weft.store import migrate
from weft.store.database import open_database, sqlite_url


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weft.sqlite"


@pytest.fixture
async def empty(path: Path) -> AsyncIterator[AsyncEngine]:
    engine = open_database(sqlite_url(path))
    yield engine
    await engine.dispose()


@pytest.fixture
async def engine(empty: AsyncEngine) -> AsyncEngine:
    await migrate.upgrade(empty)
    return empty
