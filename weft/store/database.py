"""Opening the database. SQLite: WAL, one writer process, BEGIN IMMEDIATE. PostgreSQL: shared by several processes, READ
COMMITTED regardless of the server's default. Stricter levels only cost repetitions (`weft.store.transactions`)."""

from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from weft.store.errors import BadDatabaseUrl
from weft.turnstile import Turnstile

BUSY_TIMEOUT_MS = 5_000
CONNECT_S = 5.0  # PostgreSQL: without an answer by then the server is down
STATEMENT_S = 30.0  # PostgreSQL: for the longest batch, and for a wait for a concurrent migration
CONNECTIONS = 4  # of one process: a writer, a poll, two calls of people
SQLITE_TURNS = 1  # a transaction locks the file from its first statement on; SQLite waits by polling, which is unfair
STATEMENTS = 16  # prepared per connection; a statement of many rows takes 150 KB, and each number of rows has one
POSTGRESQL = "postgresql+asyncpg"
TURNS = "weft_turns"  # the execution option with an engine's `Turnstile`


def sqlite_url(path: Path) -> URL:
    """Return the URL of an SQLite file."""
    return URL.create("sqlite+aiosqlite", database=str(path))


def postgresql_url(text: str) -> URL:
    """Parse a PostgreSQL URL in its common form, and set the driver used here. Raises BadDatabaseUrl."""
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
    """Return an engine for `url`. Nothing is connected yet. Call `close_database` at the end."""
    if url.get_backend_name() == "postgresql":
        return create_async_engine(
            url,
            isolation_level="READ COMMITTED",
            pool_pre_ping=True,
            pool_size=CONNECTIONS,
            max_overflow=0,
            hide_parameters=True,
            execution_options={TURNS: Turnstile(CONNECTIONS)},
            connect_args={
                "timeout": CONNECT_S,
                "command_timeout": STATEMENT_S,
                "prepared_statement_cache_size": STATEMENTS,
            },
        )
    engine = create_async_engine(
        url,
        hide_parameters=True,
        execution_options={TURNS: Turnstile(SQLITE_TURNS)},
        connect_args={"cached_statements": STATEMENTS},
    )
    event.listen(engine.sync_engine, "connect", _on_sqlite_connect)
    event.listen(engine.sync_engine, "begin", _begin_immediate)
    return engine


def turns_of(engine: AsyncEngine) -> Turnstile:
    """Return the turns of an engine's transactions, between tenants. Engines made from it share them."""
    return engine.get_execution_options()[TURNS]


async def close_database(engine: AsyncEngine) -> None:
    """Dispose of an engine once its current transactions are over. No further transaction begins."""
    turns = turns_of(engine)
    for place in range(turns.places):
        await turns.enter(f":close {place}")
    await engine.dispose()


def _on_sqlite_connect(connection: Any, _record: ConnectionPoolEntry) -> None:
    connection.isolation_level = None  # the driver does not begin transactions: `_begin_immediate` does
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")  # an acknowledged outcome survives a power cut
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_immediate(connection: Connection) -> None:
    # A deferred transaction with a write after a read can fail with SQLITE_BUSY despite the timeout.
    connection.exec_driver_sql("BEGIN IMMEDIATE")
