"""A real database per test, at the newest revision, of either kind: an SQLite file, or one of a PostgreSQL server.

The server is started for the run. Nothing is faked.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncEngine

from postgres import DIALECTS, Postgres
from weft.store import migrate
from weft.store.database import open_database, sqlite_url


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.close()


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def url(dialect: str, tmp_path: Path, request: pytest.FixtureRequest) -> URL:
    """Of an empty database."""
    if dialect == "sqlite":
        return sqlite_url(tmp_path / "weft.sqlite")
    return asyncio.run(request.getfixturevalue("postgres").new_database())


@pytest.fixture
async def empty(url: URL) -> AsyncIterator[AsyncEngine]:
    engine = open_database(url)
    yield engine
    await engine.dispose()


@pytest.fixture
async def engine(empty: AsyncEngine) -> AsyncEngine:
    await migrate.upgrade(empty)
    return empty
