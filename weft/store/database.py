"""Opening the database. SQLite: WAL, one writer process, BEGIN IMMEDIATE. PostgreSQL: shared by several processes,
READ COMMITTED whatever the server's default; stricter levels only cost repetitions (`weft.store.transactions`)."""

from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from weft.store.errors import BadDatabaseUrl

BUSY_TIMEOUT_MS = 5_000
CONNECT_S = 5.0  # PostgreSQL: a server that does not answer is away
STATEMENT_S = 30.0  # PostgreSQL: of the longest batch, and of waiting for another process's migration
CONNECTIONS = 4  # of one process: a writer, a poll, two calls of people
STATEMENTS = 16  # that a connection keeps prepared; one of many rows takes 150 KB, and each number of rows has its own
POSTGRESQL = "postgresql+asyncpg"


def sqlite_url(path: Path) -> URL:
    """The URL of an SQLite file."""
    return URL.create("sqlite+aiosqlite", database=str(path))


def postgresql_url(text: str) -> URL:
    """A PostgreSQL URL as people have them, with the driver that is used here. Raises BadDatabaseUrl."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:
        raise BadDatabaseUrl("the database's URL is not postgresql://USER:PASSWORD@HOST:PORT/DATABASE") from error
    if url.drivername not in ("postgres", "postgresql", POSTGRESQL):
        raise BadDatabaseUrl(
            f"the database's URL begins with {url.drivername}://, it has to be postgresql:// "
            "(SQLite needs no URL: it is in the data directory)"
        )
    return url.set(drivername=POSTGRESQL)


def open_database(url: URL) -> AsyncEngine:
    """An engine for `url`. Nothing is connected yet; dispose of it at the end."""
    if url.get_backend_name() == "postgresql":
        return create_async_engine(
            url,
            isolation_level="READ COMMITTED",
            pool_pre_ping=True,
            pool_size=CONNECTIONS,
            max_overflow=0,
            hide_parameters=True,
            connect_args={
                "timeout": CONNECT_S,
                "command_timeout": STATEMENT_S,
                "prepared_statement_cache_size": STATEMENTS,
            },
        )
    engine = create_async_engine(
        url, pool_pre_ping=True, hide_parameters=True, connect_args={"cached_statements": STATEMENTS}
    )
    event.listen(engine.sync_engine, "connect", _on_sqlite_connect)
    event.listen(engine.sync_engine, "begin", _begin_immediate)
    return engine


def _on_sqlite_connect(connection: Any, _record: ConnectionPoolEntry) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself: `_begin_immediate` does
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")  # an acknowledged outcome survives a power cut
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_immediate(connection: Connection) -> None:
    # A deferred transaction that reads first and writes later can fail with SQLITE_BUSY whatever the timeout.
    connection.exec_driver_sql("BEGIN IMMEDIATE")
