"""Transactions and INSERT .. ON CONFLICT for both databases. A transaction is retried if the database asks for it. Its
errors are raised as the store's.

PostgreSQL ends a transaction that lost a race (serialization failure, deadlock) and expects a repetition. With SQLite
there is a single writer and no race. Other failures are not retried here: the caller knows how long its work may wait.

A cancellation does not reach a transaction that has begun. A connection with a cancelled statement is closed with its
transaction open: SQLite's file stays locked for as long as a traceback holds the cursor, and PostgreSQL's pool has to
make a new connection.
"""

import asyncio
import random
import sqlite3
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DatabaseError, DataError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.orm import DeclarativeBase

from weft.store.database import turns_of
from weft.store.errors import DatabaseDamaged, StoreBusy, StoreFull, StoreUnavailable, Unstorable
from weft.tasks import run_to_end
from weft.turnstile import Turnstile

T = TypeVar("T")
Upsert = sqlite.Insert | postgresql.Insert
Work = Callable[[AsyncConnection], Awaitable[T]]
OnCommit = Callable[[T], None]
TRIES = 10
TURN_S = 5.0  # wait of a transaction for its turn
PLATFORM, WRITER = ":platform", ":writer"  # in place of a tenant; not a possible name of a namespace
LEAVE_S = 5.0  # for a transaction after its caller is cancelled; only a hanging server takes longer
PAUSE_S = 0.01  # before the second try; grows by this with each try, jittered
RACES = frozenset(("40001", "40P01"))  # serialization_failure, deadlock_detected
LOCKED = "55P03"  # lock_not_available
DISK_FULL = "53100"  # disk_full
DATA, INTEGRITY, STATEMENT = "22", "23", "42"  # classes of SQLSTATE: faults of the row, faults of the row, our mistake


_tenant = ContextVar("tenant", default=PLATFORM)


@contextmanager
def in_turn_of(tenant: str) -> Generator[None]:
    """Run transactions within the block, and of tasks made in it, in the turns of a tenant.

    Tenants take turns by the time of their transactions. A burst of a tenant delays itself, and never occupies every
    connection. `WRITER` stands for writers of outcomes and results, `PLATFORM` (the default) for the rest.
    """
    token = _tenant.set(tenant)
    try:
        yield
    finally:
        _tenant.reset(token)


def ignore(_: object) -> None:
    """Do nothing on a commit."""


async def transact(engine: AsyncEngine, work: Work[T], on_commit: OnCommit[T] = ignore) -> T:
    """Run `work` in a transaction, again (at most `TRIES` times in all) while it loses races. Return its result.

    `work` may run more than once; only the last run counts. A cancelled caller gives its turn up. After the transaction
    has begun, the cancellation is raised once the transaction is over, committed or not. `on_commit` is called with the
    result of `work` on a commit, also after a cancellation. Raises StoreUnavailable, Unstorable.
    """
    turns, tenant = turns_of(engine), _tenant.get()
    for tried in range(1, TRIES + 1):
        await _take_turn(turns, tenant)
        began = time.monotonic()
        try:
            return await run_to_end(_transaction(engine, work, on_commit), leave_s=LEAVE_S)
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            if sqlstate(error) not in RACES or tried == TRIES:
                _raise_store_error(error)
        finally:
            turns.leave(tenant, time.monotonic() - began)
        await asyncio.sleep(tried * PAUSE_S * random.uniform(0.5, 1.5))  # noqa: S311 (jitter, not a secret)
    raise AssertionError("TRIES is at least 1")


async def _take_turn(turns: Turnstile, tenant: str) -> None:
    """Wait until a transaction of the tenant may begin. Raises StoreBusy."""
    if (turn := turns.begin(tenant)) is None:
        return
    try:
        async with asyncio.timeout(TURN_S):
            await turns.wait(tenant, turn)
    except TimeoutError as error:
        raise StoreBusy(f"earlier transactions took more than {TURN_S:.0f} s") from error


async def _transaction(engine: AsyncEngine, work: Work[T], on_commit: OnCommit[T]) -> T:
    async with engine.begin() as connection:
        result = await work(connection)
    on_commit(result)
    return result


def insert_into(connection: AsyncConnection, table: type[DeclarativeBase]) -> Upsert:
    """Return an INSERT in the connection's dialect, ready for an ON CONFLICT clause.

    Pass rows to `execute`, so that the statement is compiled once, not for each transaction.
    """
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


def sqlstate(error: BaseException) -> str:
    """Return PostgreSQL's five characters for an error, or "" without them."""
    return str(getattr(error.orig, "sqlstate", None) or "") if isinstance(error, DBAPIError) else ""


def _raise_store_error(error: Exception) -> None:
    """Raise an error as an error of the store. An error explained by neither row nor database is a bug, and passes."""
    state = sqlstate(error)
    if type(error) is DatabaseError:  # only of SQLite: "malformed", "not a database"
        raise DatabaseDamaged(_message(error)) from error
    if isinstance(error, DataError | IntegrityError) or state[:2] in (DATA, INTEGRITY):
        raise Unstorable(_message(error)) from error
    if state in RACES or state == LOCKED or _is_sqlite_busy(error) or isinstance(error, PoolTimeout):
        raise StoreBusy(_message(error)) from error
    if state == DISK_FULL or _sqlite_code(error) == sqlite3.SQLITE_FULL:
        raise StoreFull(_message(error)) from error
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    if lost or isinstance(error, OSError | TimeoutError | OperationalError):
        raise StoreUnavailable(_message(error)) from error
    if state and state[:2] != STATEMENT:
        raise StoreUnavailable(_message(error)) from error
    raise error


def _is_sqlite_busy(error: Exception) -> bool:
    """Return whether SQLite's file, or a table, stayed locked for all of the busy timeout."""
    return _sqlite_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _sqlite_code(error: Exception) -> int:
    """Return SQLite's primary code of an error, or 0."""
    return (getattr(error.orig, "sqlite_errorcode", 0) & 0xFF) if isinstance(error, DBAPIError) else 0


def _message(error: Exception) -> str:
    """Return the database's message, without statement and parameters."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(cause).rpartition(">: ")[2] or type(cause).__name__
