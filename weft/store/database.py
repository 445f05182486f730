"""Opening the database. SQLite: WAL, one writer process, BEGIN IMMEDIATE; PostgreSQL: its own defaults."""

from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

BUSY_TIMEOUT_MS = 5_000


def sqlite_url(path: Path) -> URL:
    """The URL of an SQLite file."""
    return URL.create("sqlite+aiosqlite", database=str(path))


def open_database(url: URL | str) -> AsyncEngine:
    """An engine for `url`. Nothing is connected yet; dispose of it at the end."""
    engine = create_async_engine(url, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":
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
