"""One transaction and one INSERT .. ON CONFLICT, whichever database. A transaction is retried where the
database asks for it, its errors are raised as the store's.

PostgreSQL ends a transaction that lost a race (serialization failure, deadlock) and expects it to be run again; with
SQLite there is one writer and nothing to lose. Other failures are not retried here: the caller
knows how long its work may wait.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DatabaseError, DataError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.orm import DeclarativeBase

from weft.store.errors import DatabaseDamaged, StoreUnavailable, Unstorable

T = TypeVar("T")
Upsert = sqlite.Insert | postgresql.Insert
Work = Callable[[AsyncConnection], Awaitable[T]]
TRIES = 10
PAUSE_S = 0.01  # before the second try; grows by as much with each, jittered
RACES = frozenset(("40001", "40P01"))  # serialization_failure, deadlock_detected
DATA, INTEGRITY, STATEMENT = "22", "23", "42"  # classes of SQLSTATE: the row itself twice, our own mistake


async def transact(engine: AsyncEngine, work: Work[T]) -> T:
    """Run `work` in a transaction of its own, again (at most `TRIES` times in all) while it loses races.

    So `work` may run more than once; only the last run counts. Raises StoreUnavailable, Unstorable.
    """
    for tried in range(1, TRIES + 1):
        try:
            async with engine.begin() as connection:
                return await work(connection)
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            if sqlstate(error) not in RACES or tried == TRIES:
                _raise_store_error(error)
        await asyncio.sleep(tried * PAUSE_S * random.uniform(0.5, 1.5))  # noqa: S311 (jitter, not a secret)
    raise AssertionError("TRIES is at least 1")


def insert_into(connection: AsyncConnection, table: type[DeclarativeBase]) -> Upsert:
    """An INSERT that can be given an ON CONFLICT clause, in the connection's dialect.

    Rows are given to `execute`: then a statement is compiled once, not for each transaction.
    """
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


def sqlstate(error: BaseException) -> str:
    """PostgreSQL's five characters for what happened; "" where there are none."""
    return str(getattr(error.orig, "sqlstate", None) or "") if isinstance(error, DBAPIError) else ""


def _raise_store_error(error: Exception) -> None:
    """Raise it as one of the store's; an error that neither the row nor the database explains is a bug, and passes."""
    state = sqlstate(error)
    if type(error) is DatabaseError:  # SQLite's alone: "malformed", "not a database"
        raise DatabaseDamaged(_message(error)) from error
    if isinstance(error, DataError | IntegrityError) or state[:2] in (DATA, INTEGRITY):
        raise Unstorable(_message(error)) from error
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    if lost or isinstance(error, OSError | TimeoutError | OperationalError | PoolTimeout):
        raise StoreUnavailable(_message(error)) from error
    if state and state[:2] != STATEMENT:
        raise StoreUnavailable(_message(error)) from error
    raise error


def _message(error: Exception) -> str:
    """The database's own message, without statement and parameters."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(cause).rpartition(">: ")[2] or type(cause).__name__
