"""A real database per test, at the newest revision, of either kind: an SQLite file, or one of a PostgreSQL server.

The server is started for the run. Nothing is faked.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncEngine

from harness.postgres import DIALECTS
from harness.stored import new_store
from weft.store.database import open_database, sqlite_url


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def url(dialect: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[URL]:
    """The URL of an empty database."""
    if dialect == "sqlite":
        yield sqlite_url(tmp_path / "weft.sqlite")
        return
    with request.getfixturevalue("postgres").database() as made:
        yield made


@pytest.fixture
async def empty(url: URL) -> AsyncIterator[AsyncEngine]:
    engine = open_database(url)
    yield engine
    await engine.dispose()


@pytest.fixture
async def engine(url: URL) -> AsyncIterator[AsyncEngine]:
    made = await new_store(url)
    yield made
    await made.dispose()
